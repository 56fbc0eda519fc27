#include <gtest/gtest.h>

#include "io/histogram.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

TEST(HistogramTest, PercentilesAreWithinAnEighthAboveTheTruth) {
  Histogram histogram;
  for (int i = 1; i <= 100'000; ++i) histogram.add(std::chrono::nanoseconds{i * 10});
  EXPECT_EQ(histogram.count(), 100'000U);
  EXPECT_EQ(histogram.longest().count(), 1'000'000);
  for (double share : {0.01, 0.5, 0.9, 0.99}) {
    const double truth = share * 1e6;
    EXPECT_GE(histogram.percentile(share).count(), truth);
    EXPECT_LE(histogram.percentile(share).count(), truth * 1.13);
  }
  EXPECT_EQ(histogram.percentile(1.0), histogram.longest());
}

TEST(HistogramTest, TakesAnyDuration) {
  Histogram histogram;
  EXPECT_EQ(histogram.percentile(0.5).count(), 0);
  histogram.add(std::chrono::nanoseconds{-5});
  histogram.add(std::chrono::nanoseconds{0});
  histogram.add(std::chrono::nanoseconds::max());
  EXPECT_EQ(histogram.percentile(0.0).count(), 0);
  EXPECT_EQ(histogram.percentile(1.0), std::chrono::nanoseconds::max());
}

TEST(StatsTest, CountWhatWasMoved) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 4 << 20);
  options.block = 64 << 10;
  options.depth = 4;
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_FALSE(write_pattern(*volume, 0, 1 << 20, 1));
  EXPECT_TRUE(read_holds(*volume, 0, 512 << 10, 1));
  EXPECT_FALSE(volume->flush());
  const DriveStats stats = volume->stats().front();
  EXPECT_EQ(stats.bytes_written, 1U << 20);
  EXPECT_EQ(stats.writes, 16U);
  EXPECT_EQ(stats.bytes_read, 512U << 10);
  EXPECT_EQ(stats.reads, 8U);
  EXPECT_EQ(stats.flushes, 1U);
  EXPECT_EQ(stats.in_flight, 0U);
  EXPECT_GE(stats.peak_in_flight, 1U);
  EXPECT_LE(stats.peak_in_flight, 4U);
  EXPECT_GT(stats.mean_in_flight, 0.0);
  EXPECT_LE(stats.mean_in_flight, 4.1);
  EXPECT_EQ(stats.write_latency.count, 16U);
  EXPECT_LE(stats.write_latency.p50, stats.write_latency.p99);
  EXPECT_LE(stats.write_latency.p99, stats.write_latency.longest);
  EXPECT_GT(stats.busy.count(), 0);
}

}  // namespace
}  // namespace tierflow::io
