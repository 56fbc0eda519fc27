#include <gtest/gtest.h>

#include <tuple>

#include "io/histogram.h"
#include "io/meter.h"
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

TEST(HistogramTest, BucketsAreExactWhereTheyAreNarrow) {
  for (int value : {0, 1, 7, 8, 15}) {
    Histogram one;
    one.add(std::chrono::nanoseconds{value});
    one.add(std::chrono::nanoseconds{1'000'000});
    EXPECT_EQ(one.percentile(0.0).count(), value);
    EXPECT_EQ(one.percentile(0.49).count(), value);
    EXPECT_EQ(one.percentile(0.5).count(), 1'000'000);
  }
  Histogram wide;
  wide.add(std::chrono::nanoseconds{16});
  wide.add(std::chrono::nanoseconds{1000});
  EXPECT_EQ(wide.percentile(0.0).count(), 17);  // 16 and 17 share one
}

Outcome outcome(Action action, std::span<std::byte> bytes, std::chrono::microseconds elapsed, Error error = {}) {
  Outcome made;
  made.transfer.action = action;
  made.transfer.bytes = bytes;
  made.error = std::move(error);
  made.elapsed = elapsed;
  made.retries = 2;
  return made;
}

TEST(MeterTest, CountsReadsWritesFlushesFailuresAndWhatIsUnderWay) {
  std::vector<std::byte> bytes(4096);
  Meter meter("/drive");
  meter.start();
  meter.start();
  meter.start();
  EXPECT_EQ(meter.stats().in_flight, 3U);
  meter.end(outcome(Action::read, bytes, std::chrono::microseconds{30}));
  meter.end(outcome(Action::write, bytes, std::chrono::microseconds{50}));
  meter.end(outcome(Action::read, bytes, std::chrono::microseconds{10}, Error{.kind = ErrorKind::io}));
  meter.end(outcome(Action::flush, {}, std::chrono::microseconds{70}));  // never start()ed
  const DriveStats stats = meter.stats();
  EXPECT_EQ(stats.directory, "/drive");
  EXPECT_EQ(stats.in_flight, 0U);
  EXPECT_EQ(stats.peak_in_flight, 3U);
  EXPECT_EQ(stats.reads, 1U);
  EXPECT_EQ(stats.bytes_read, 4096U);
  EXPECT_EQ(stats.writes, 1U);
  EXPECT_EQ(stats.bytes_written, 4096U);
  EXPECT_EQ(stats.flushes, 1U);
  EXPECT_EQ(stats.retries, 8U);
  EXPECT_EQ(stats.read_latency.count, 2U);
  EXPECT_EQ(stats.read_latency.longest, std::chrono::microseconds{30});
  EXPECT_EQ(stats.write_latency.longest, std::chrono::microseconds{50});
  EXPECT_EQ(stats.flush_latency.longest, std::chrono::microseconds{70});
  EXPECT_LT(stats.read_latency.p50, stats.flush_latency.p50);
  EXPECT_EQ(meter.stats().busy, stats.busy);  // nothing is under way: it does not grow
  EXPECT_NEAR(stats.mean_in_flight * static_cast<double>(stats.busy.count()), 90'000.0, 0.5);
}

TEST(MeterTest, IsBusyWhileSomethingIsUnderWay) {
  Meter meter("/drive");
  EXPECT_EQ(meter.stats().busy.count(), 0);
  EXPECT_EQ(meter.stats().mean_in_flight, 0.0);
  meter.start();
  const auto first = meter.stats().busy;
  while (meter.stats().busy == first) {
  }
  EXPECT_GT(meter.stats().busy, first);
  std::vector<std::byte> bytes(8);
  meter.end(outcome(Action::read, bytes, std::chrono::microseconds{1}));
  const auto then = meter.stats().busy;
  meter.start();  // the time between is not busy
  meter.end(outcome(Action::read, bytes, std::chrono::microseconds{1}));
  EXPECT_GE(meter.stats().busy, then);
  EXPECT_EQ(meter.stats().peak_in_flight, 1U);
}

TEST(StatsTest, OfSeveralDrivesAreSumsAndTheLargerTimes) {
  using std::chrono::nanoseconds;
  const auto latency = [](std::uint64_t count, int p50, int p99, int longest) {
    return Latency{.count = count, .p50 = nanoseconds{p50}, .p99 = nanoseconds{p99}, .longest = nanoseconds{longest}};
  };
  const auto same = [](const Latency& a, const Latency& b) {
    return std::tie(a.count, a.p50, a.p99, a.longest) == std::tie(b.count, b.p50, b.p99, b.longest);
  };
  const DriveStats one{.bytes_read = 1,
                       .bytes_written = 2,
                       .reads = 3,
                       .writes = 4,
                       .flushes = 5,
                       .retries = 6,
                       .in_flight = 7,
                       .peak_in_flight = 8,
                       .mean_in_flight = 1.5,
                       .busy = nanoseconds{90},
                       .read_latency = latency(10, 20, 30, 40),
                       .write_latency = latency(11, 23, 33, 43),
                       .flush_latency = latency(12, 22, 32, 42)};
  const DriveStats other{.bytes_read = 100,
                         .bytes_written = 200,
                         .reads = 300,
                         .writes = 400,
                         .flushes = 500,
                         .retries = 600,
                         .in_flight = 700,
                         .peak_in_flight = 800,
                         .mean_in_flight = 2.0,
                         .busy = nanoseconds{80},
                         .read_latency = latency(1, 21, 29, 41),
                         .write_latency = latency(2, 22, 34, 42),
                         .flush_latency = latency(3, 1, 1, 1)};
  for (const bool turned : {false, true}) {
    DriveStats sum = turned ? other : one;
    sum.add(turned ? one : other);
    EXPECT_EQ(sum.bytes_read, 101U);
    EXPECT_EQ(sum.bytes_written, 202U);
    EXPECT_EQ(sum.reads, 303U);
    EXPECT_EQ(sum.writes, 404U);
    EXPECT_EQ(sum.flushes, 505U);
    EXPECT_EQ(sum.retries, 606U);
    EXPECT_EQ(sum.in_flight, 707U);
    EXPECT_EQ(sum.peak_in_flight, 808U);
    EXPECT_EQ(sum.mean_in_flight, 3.5);
    EXPECT_EQ(sum.busy.count(), 90);
    EXPECT_TRUE(same(sum.read_latency, latency(11, 21, 30, 41)));
    EXPECT_TRUE(same(sum.write_latency, latency(13, 23, 34, 43)));
    EXPECT_TRUE(same(sum.flush_latency, latency(15, 22, 32, 42)));
  }
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
