#include "io/bench.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <optional>
#include <thread>

#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using ::testing::HasSubstr;

BenchOptions small(const testing::TempDir& folder) {
  BenchOptions options;
  options.folders = {folder.path() / "a", folder.path() / "b"};
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
  // Each folder alone by every engine that works here, then both together.
  ASSERT_EQ(results.size() % 3, 0U);
  const std::size_t engines = results.size() / 3;
  for (std::size_t i = 0; i < results.size(); ++i)
    EXPECT_EQ(results[i].folders, i < engines       ? std::vector{folder.path() / "a"}
                                  : i < 2 * engines ? std::vector{folder.path() / "b"}
                                                    : (std::vector{folder.path() / "a", folder.path() / "b"}));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "a" / "tierflow-bench.tfv"));
}

// Bytes that were asked of the volume's files in blocks, by the kind of call.
std::uint64_t moved(const testing::SystemCalls& calls, std::string_view name, std::size_t block) {
  std::uint64_t bytes = 0;
  for (const testing::SystemCall& call : calls.seen())
    if (call.name == name && call.argument == static_cast<long>(block)) bytes += block;
  return bytes;
}

TEST(BenchTest, EachPassReadsOrWritesWhatItsNameSays) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.engine = EngineKind::threads;
  options.keep = true;
  std::vector<std::string> phases;
  options.progress = [&](const std::string& phase) { phases.push_back(phase); };
  const auto bench = [&](bool write, bool read, bool mixed) {
    options.write = write;
    options.read = read;
    options.mixed = mixed;
    testing::SystemCalls calls;
    Result<BenchResult> result = bench_storage(options);
    EXPECT_TRUE(result.ok());
    EXPECT_EQ(result->write_gb_s > 0, write);
    EXPECT_EQ(result->read_gb_s > 0, read);
    EXPECT_EQ(result->mixed_gb_s > 0, mixed);
    EXPECT_EQ(result->write_cores_per_gb_s != 0, write);
    EXPECT_EQ(result->read_cores_per_gb_s != 0, read);
    return std::pair(moved(calls, "pwrite", options.block), moved(calls, "pread", options.block));
  };
  const std::uint64_t all = options.bytes;
  EXPECT_EQ(bench(false, false, false), std::pair(all, std::uint64_t{0}));  // the first fills
  EXPECT_EQ(bench(false, false, false), std::pair(std::uint64_t{0}, std::uint64_t{0}));
  EXPECT_EQ(bench(true, false, false), std::pair(all, std::uint64_t{0}));
  EXPECT_EQ(bench(false, true, false), std::pair(std::uint64_t{0}, all));
  EXPECT_EQ(bench(false, false, true), std::pair(all / 2, all / 2));
  const std::string where =
      "threads on " + (folder.path() / "a").string() + "," + (folder.path() / "b").string() + ": ";
  EXPECT_THAT(phases,
              ::testing::ElementsAre(where + "filling", where + "writing", where + "reading", where + "both at once"));
}

TEST(BenchTest, ALongerMeasurementGoesOnUntilItsTimeIsOver) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.engine = EngineKind::threads;
  options.seconds = 0.05;
  options.read = options.mixed = false;
  testing::SystemCalls calls;
  ASSERT_TRUE(bench_storage(options).ok());
  EXPECT_GT(moved(calls, "pwrite", options.block), 2 * options.bytes);
}

// Each byte value comes about as often as any other.
TEST(BenchTest, WhatIsWrittenCannotBeCompressed) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.keep = true;
  ASSERT_TRUE(bench_storage(options).ok());
  std::ifstream file(folder.path() / "a" / "tierflow-bench.tfv", std::ios::binary);
  file.seekg(-static_cast<long>(options.block), std::ios::end);
  std::string block(options.block, '\0');
  ASSERT_TRUE(file.read(block.data(), static_cast<long>(block.size())));
  std::array<std::size_t, 256> times{};
  for (const char byte : block) ++times[static_cast<unsigned char>(byte)];
  EXPECT_LT(*std::max_element(times.begin(), times.end()), 2 * options.block / 256);
  EXPECT_GT(*std::min_element(times.begin(), times.end()), options.block / 256 / 2);
}

TEST(BenchTest, RatesAreBytesByTheTimeTheyTook) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.engine = EngineKind::threads;
  options.keep = true;
  ASSERT_TRUE(bench_storage(options).ok());
  testing::SystemCalls calls([](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" || call.name == "pread") std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return {};
  });
  const auto start = std::chrono::steady_clock::now();
  Result<BenchResult> result = bench_storage(options);
  const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - start;
  ASSERT_TRUE(result.ok());
  const double blocks = static_cast<double>(options.bytes / options.block);
  // Each pass took less than all of it, and more than its calls one behind the other in the lanes there are.
  const double least = 1e-9 * static_cast<double>(options.bytes) / whole.count();
  const double most = 1e-9 * static_cast<double>(options.bytes) / (0.005 * blocks / (2 * options.depth * 2));
  for (const double rate : {result->write_gb_s, result->read_gb_s, result->mixed_gb_s}) {
    EXPECT_GT(rate, least);
    EXPECT_LT(rate, most);
  }
  // No more cores than the machine has, for as long as it took.
  const double cores = 1e9 * whole.count() * std::thread::hardware_concurrency() / static_cast<double>(options.bytes);
  for (const double used : {result->write_cores_per_gb_s, result->read_cores_per_gb_s}) EXPECT_LE(used, cores);
  // Half of the mixed pass reads.
  EXPECT_EQ(result->read_latency.count, options.bytes / options.block * 3 / 2);
  EXPECT_EQ(result->write_latency.count, options.bytes / options.block * 3 / 2);
  EXPECT_GE(result->read_latency.p50, std::chrono::milliseconds(4));
}

TEST(BenchTest, SpeedIsThatOfReadingAndWritingAsMuch) {
  BenchResult result;
  EXPECT_EQ(result.speed(), 0.0);
  result.read_gb_s = 6;
  EXPECT_EQ(result.speed(), 6.0);
  result.write_gb_s = 2;
  result.mixed_gb_s = 9;
  EXPECT_DOUBLE_EQ(result.speed(), 3.0);
}

TEST(BenchTest, TheLineHasEveryField) {
  BenchResult result{.folders = {"a \"b\"", "c\nd"},
                     .engine = EngineKind::libaio,
                     .direct = true,
                     .registered_buffers = false,
                     .registered_files = true,
                     .bytes = 7,
                     .block = 8,
                     .depth = 9,
                     .speeds = {1.5, 2.5},
                     .warnings = {"slow", "old"}};
  result.read_gb_s = 3.25;
  result.write_gb_s = 4.25;
  result.mixed_gb_s = 5.25;
  result.first_write_gb_s = 8.25;
  result.read_cores_per_gb_s = 6.25;
  result.write_cores_per_gb_s = 7.25;
  using std::chrono::microseconds;
  result.read_latency = {.count = 1, .p50 = microseconds(10), .p99 = microseconds(20), .longest = microseconds(30)};
  result.write_latency = {.count = 1, .p50 = microseconds(40), .p99 = microseconds(50), .longest = microseconds(60)};
  EXPECT_EQ(
      result.json(),
      R"({"engine":"libaio","direct":true,"read_gb_s":3.25,"write_gb_s":4.25,"mixed_gb_s":5.25,"first_write_gb_s":8.25,)"
      R"("folders":["a \"b\"","c d"],"speeds":[1.5,2.5],"bytes":7,"block":8,"depth":9,)"
      R"("registered_buffers":false,"registered_files":true,"read_latency_us":{"p50":10,"p99":20,"max":30},)"
      R"("write_latency_us":{"p50":40,"p99":50,"max":60},"read_cores_per_gb_s":6.25,"write_cores_per_gb_s":7.25,)"
      R"("warnings":["slow","old"]})");
}

TEST(BenchTest, BlocksBeyondAQuarterOfTheMemoryAreRefused) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.block = std::size_t{1} << 40;
  const Result<BenchResult> refused = bench_storage(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::usage);
  EXPECT_THAT(refused.error().message(), HasSubstr("choose a smaller block or depth"));
}

// Refused before it is taken: a process that may not have it says so all the same.
TEST(BenchTest, AllLanesTogetherTakeAQuarterOfTheMemoryAtMost) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.folders = {folder.path() / "a"};
  const auto page = static_cast<std::size_t>(getpagesize());
  const auto memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  options.block = (memory / 4 / options.depth / page + 1) * page;
  EXPECT_EQ(testing::in_child([&] {
              std::size_t pages = 0;
              std::ifstream("/proc/self/statm") >> pages;
              rlimit limit;
              if (getrlimit(RLIMIT_AS, &limit) != 0) return -1;
              limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, pages * page + (256 << 20));
              if (setrlimit(RLIMIT_AS, &limit) != 0) return -2;
              const Result<BenchResult> refused = bench_storage(options);
              return refused ? 0 : static_cast<int>(refused.error().kind);
            }),
            static_cast<int>(ErrorKind::usage));
}

TEST(BenchTest, AStopEndsItWithoutAFile) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  std::atomic<int> asked = 0;
  options.stop = [&] { return ++asked > 5; };
  const Result<BenchResult> stopped = bench_storage(options);
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().kind, ErrorKind::cancelled);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "a" / "tierflow-bench.tfv"));
}

TEST(BenchTest, SpeedsOfFoldersAreMeasuredAsTheVolumeWillBeUsed) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 64 << 20);
  options.folders = {folder.path() / "a", folder.path() / "b"};
  options.allow_buffered = options.allow_any_filesystem = true;
  testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "open" && (call.argument & O_DIRECT) != 0) return -EINVAL;
    return {};
  });
  Result<std::vector<double>> speeds = measure_speeds(options);
  ASSERT_TRUE(speeds.ok());
  ASSERT_EQ(speeds->size(), 2U);
  for (const double speed : *speeds) EXPECT_GT(speed, 1e6);  // bytes a second
  options.allow_buffered = false;
  EXPECT_FALSE(measure_speeds(options).ok());
}

TEST(BenchTest, TogetherTheStripesFollowTheSpeedsOfEachAlone) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.bytes = 2 << 20;
  options.engine = EngineKind::threads;
  options.mixed = false;
  std::vector<BenchResult> results;
  const auto report = [&](const BenchResult& result) { results.push_back(result); };
  ASSERT_FALSE(bench_engines(options, report));
  ASSERT_EQ(results.size(), 3U);
  EXPECT_THAT(results[0].speeds, ::testing::IsEmpty());
  EXPECT_EQ(results[2].speeds, (std::vector<double>{results[0].speed(), results[1].speed()}));
  // Unless there are others.
  options.speeds = {1.0, 3.0};
  results.clear();
  ASSERT_FALSE(bench_engines(options, report));
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(results[2].speeds, options.speeds);
}

TEST(BenchTest, AFileThatDoesNotReachTheDriveIsAnError) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.engine = EngineKind::threads;
  bool filled = false;
  testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" && call.argument == static_cast<long>(options.block)) filled = true;
    if (call.name == "fdatasync" && filled) return -EIO;
    return {};
  });
  const Result<BenchResult> result = bench_storage(options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().error_number, EIO);
  EXPECT_EQ(result.error().operation, "flush");
}

TEST(BenchTest, AKeptFileThatIsDamagedIsSaidToBe) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.keep = true;
  ASSERT_TRUE(bench_storage(options).ok());
  std::filesystem::resize_file(folder.path() / "a" / "tierflow-bench.tfv", 2 << 20);
  const Result<BenchResult> result = bench_storage(options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().kind, ErrorKind::corruption);
}

TEST(BenchTest, SpeedsAreMeasuredByTheEngineAndInTheBlocksOfTheVolume) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.engine = EngineKind::threads;
  options.block = 2 << 20;
  testing::SystemCalls calls;
  ASSERT_TRUE(measure_speeds(options).ok());
  EXPECT_EQ(moved(calls, "pwrite", options.block), 2 * options.bytes);
  EXPECT_EQ(moved(calls, "pread", options.block), options.bytes);
}

TEST(BenchTest, TheSlowerFolderHasTheLesserSpeed) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.folders = {folder.path() / "a", folder.path() / "b"};
  options.engine = EngineKind::threads;
  options.depth = 1;
  options.block = 2 << 20;
  const std::string slow = (folder.path() / "b").string();
  testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" && call.path.starts_with(slow))
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return {};
  });
  Result<std::vector<double>> speeds = measure_speeds(options);
  ASSERT_TRUE(speeds.ok());
  ASSERT_EQ(speeds->size(), 2U);
  EXPECT_GT((*speeds)[0], (*speeds)[1]);
}

TEST(BenchTest, KeepsTheFileWhereAsked) {
  testing::TempDir folder;
  BenchOptions options = small(folder);
  options.keep = true;
  options.speeds = {1.0, 1.0};
  Result<BenchResult> result = bench_storage(options);
  ASSERT_TRUE(result.ok());
  // What it says of the volume is so.
  VolumeOptions same;
  same.folders = options.folders;
  same.name = "tierflow-bench";
  same.depth = options.depth;
  same.engine = result->engine;
  same.allow_buffered = same.allow_any_filesystem = true;
  {
    Result<std::unique_ptr<Volume>> volume = Volume::open(same);
    ASSERT_TRUE(volume.ok()) << volume.error().message();
    EXPECT_EQ(result->bytes, (*volume)->size());
    EXPECT_EQ(result->direct, (*volume)->mode().direct);
    EXPECT_EQ(result->registered_files, (*volume)->mode().registered_files);
  }
  EXPECT_EQ(result->folders, options.folders);
  EXPECT_EQ(result->block, options.block);
  EXPECT_EQ(result->depth, options.depth);
  EXPECT_EQ(result->speeds, options.speeds);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "a" / "tierflow-bench.tfv"));
  ASSERT_TRUE(bench_storage(options).ok());
}

TEST(BenchTest, BadFoldersAreErrors) {
  BenchOptions options;
  EXPECT_FALSE(bench_storage(options).ok());
  options.folders = {"/proc/nowhere"};
  EXPECT_FALSE(bench_storage(options).ok());
  int reports = 0;
  EXPECT_TRUE(bench_engines(options, [&](const BenchResult&) { ++reports; }));
  EXPECT_EQ(reports, 0);
}

TEST(BenchTest, MeasuredSpeedsShapeTheStripes) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.folders = {folder.path() / "a", folder.path() / "b"};
  options.speeds = {1.0, 3.0};
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_EQ(std::filesystem::file_size(folder.path() / "a" / "state.tfv"), 3U << 20);  // 1 MiB header, 2 MiB data
  EXPECT_EQ(std::filesystem::file_size(folder.path() / "b" / "state.tfv"), 7U << 20);
}

// Of two drives, as /dev/shm is one of its own.
TEST(BenchTest, WhereDrivesAreMeasuredTheSlowerOneHoldsLess) {
  testing::TempDir folder, memory("/dev/shm");
  VolumeOptions options = options_in(folder, 8 << 20);
  options.folders = {folder.path() / "fast", memory.path() / "slow"};
  options.allow_buffered = options.allow_any_filesystem = options.measure_speeds = true;
  options.engine = EngineKind::threads;
  options.block = 1 << 20;
  testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" && call.path.starts_with("/dev/shm/"))
      std::this_thread::sleep_for(std::chrono::milliseconds(80));
    return {};
  });
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_GT(std::filesystem::file_size(folder.path() / "fast" / "state.tfv"),
            std::filesystem::file_size(memory.path() / "slow" / "state.tfv"));
}

TEST(BenchTest, FoldersOnOneDriveAreEqualAndNotMeasured) {
  testing::TempDir folder;
  VolumeOptions options = options_in(folder, 8 << 20);
  options.folders = {folder.path() / "a", folder.path() / "b"};
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
