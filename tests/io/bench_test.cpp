#include "io/bench.h"

#include <gmock/gmock.h>

#include <fstream>

#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

using ::testing::HasSubstr;

BenchOptions small(const testing::TempDir& folder) {
  BenchOptions options;
  options.directories = {folder.path() / "a", folder.path() / "b"};
  options.bytes = 4 << 20;
  options.block = 256 << 10;
  options.depth = 4;
  options.allow_buffered = options.allow_any_filesystem = true;
  return options;
}

TEST(BenchTest, ReportsEveryEngineAloneAndTogetherAndLeavesNothing) {
  testing::TempDir folder;
  std::vector<BenchResult> results;
  const Error error = bench_engines(small(folder), [&](const BenchResult& result) { results.push_back(result); });
  EXPECT_FALSE(error) << error.message();
  EXPECT_GE(results.size(), 3U);
  for (const BenchResult& result : results) {
    EXPECT_GT(result.read_gb_s, 0.0);
    EXPECT_GT(result.write_gb_s, 0.0);
    EXPECT_GT(result.mixed_gb_s, 0.0);
    const std::string line = result.json();
    for (const char* field :
         {"\"engine\":\"", "\"direct\":", "\"read_gb_s\":", "\"write_gb_s\":", "\"read_latency_us\":"}) {
      EXPECT_THAT(line, HasSubstr(field));
    }
    EXPECT_EQ(line.find('\n'), std::string::npos);
  }
  EXPECT_EQ(results.back().directories.size(), 2U);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "a" / "tierflow-bench.tfv"));
}

TEST(BenchTest, KeepsTheFileWhereAsked) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.keep = true;
  ASSERT_TRUE(bench_storage(options).ok());
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "a" / "tierflow-bench.tfv"));
  ASSERT_TRUE(bench_storage(options).ok());
}

TEST(BenchTest, BadFoldersAreErrors) {
  BenchOptions options;
  EXPECT_FALSE(bench_storage(options).ok());
  options.directories = {"/proc/nowhere"};
  EXPECT_FALSE(bench_storage(options).ok());
}

TEST(BenchTest, MeasuredSpeedsShapeTheStripes) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.directories = {folder.path() / "a", folder.path() / "b"};
  options.speeds = {1.0, 3.0};
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_EQ(std::filesystem::file_size(folder.path() / "a" / "state.tfv"), 3U << 20);  // 1 MiB header, 2 MiB data
  EXPECT_EQ(std::filesystem::file_size(folder.path() / "b" / "state.tfv"), 7U << 20);
}

TEST(BenchTest, FoldersOnOneDriveAreEqualAndNotMeasured) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.directories = {folder.path() / "a", folder.path() / "b"};
  options.measure_speeds = true;
  // A measurement would refuse to overwrite this.
  std::filesystem::create_directory(folder.path() / "a");
  std::ofstream(folder.path() / "a" / "tierflow-bench.tfv") << "in the way";
  auto volume = create(options);
  ASSERT_TRUE(volume);
  for (const char* name : {"a", "b"})
    EXPECT_EQ(std::filesystem::file_size(folder.path() / name / "state.tfv"), 5U << 20);
}

}  // namespace
}  // namespace tierflow::io
