// A whole drive that is pulled or hangs, under a real file system: ext4 on a loop device on a file that a process of
// ours serves. Needs root, /dev/fuse and loop devices; skips itself visibly elsewhere.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "tests/io/volume_fixture.h"
#include "tests/support/fuse_disk.h"
#include "tests/support/mounts.h"

namespace tierflow::io {
namespace {

using testing::FuseDisk;
using ::testing::HasSubstr;
using testing::LoopDisk;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kBytes = 8 * kMiB;

#define NEED(disk)     \
  if (!(disk).ready()) \
  GTEST_SKIP() << "this machine does not let us serve a drive (needs root, /dev/fuse, loop devices)"

class DriveTest : public ::testing::TestWithParam<EngineKind> {
 protected:
  static VolumeOptions options(const LoopDisk& disk) {
    VolumeOptions options;
    options.folders = {disk.path() / "tierflow"};
    options.bytes = kBytes;
    options.engine = GetParam();
    return options;
  }
  testing::TempDir folder_;
  FuseDisk drive_{folder_.path(), 64 * kMiB};
};

TEST_P(DriveTest, PulledItEndsInAnErrorWithinSeconds) {
  NEED(drive_);
  LoopDisk disk(folder_.path(), drive_.file());
  NEED(disk);
  auto volume = create(options(disk));
  ASSERT_TRUE(volume);
  EXPECT_TRUE(volume->mode().direct);
  ASSERT_FALSE(write_pattern(*volume, 0, kBytes, 1));
  ASSERT_FALSE(volume->flush());
  ASSERT_TRUE(read_holds(*volume, 0, kBytes, 1));
  drive_.pull();
  const auto started = std::chrono::steady_clock::now();
  for (Op op : {Op::read, Op::write}) {
    const Completion completion = transfer(*volume, op, 0, kBytes, allocate_buffer(kBytes));
    EXPECT_EQ(completion.error.kind, ErrorKind::io) << completion.error.message();
    EXPECT_THAT(completion.error.message(), HasSubstr("state.tfv"));
    EXPECT_TRUE(completion.buffer);
  }
  EXPECT_EQ(volume->flush().kind, ErrorKind::io);
  volume.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds{10});
}

TEST_P(DriveTest, PulledWhileItHangsItGivesTheMemoryBack) {
  NEED(drive_);
  LoopDisk disk(folder_.path(), drive_.file());
  NEED(disk);
  VolumeOptions wanted = options(disk);
  wanted.stall_warning = std::chrono::milliseconds{100};
  wanted.stall_limit = std::chrono::milliseconds{400};
  auto volume = create(wanted);
  ASSERT_TRUE(volume);
  ASSERT_FALSE(write_pattern(*volume, 0, kBytes, 1));
  drive_.hang();
  const Completion stuck = transfer(*volume, Op::read, 0, kMiB, allocate_buffer(kMiB));
  EXPECT_EQ(stuck.error.error_number, ETIMEDOUT) << stuck.error.message();
  EXPECT_FALSE(stuck.buffer);
  drive_.pull();
  for (int i = 0; i < 500 && volume->stats().front().in_flight != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds{10});
  }
  EXPECT_EQ(volume->stats().front().in_flight, 0U);
}

// A killed run whose last writes are still at the drive: nobody else gets the file before they have landed.
TEST_P(DriveTest, TheNextOwnerWaitsForTheLastWritesOfTheDead) {
  NEED(drive_);
  LoopDisk disk(folder_.path(), drive_.file());
  NEED(disk);
  int ready[2], go[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(go), 0);
  char byte = 0;
  const pid_t owner = fork();
  if (owner == 0) {
    Result<std::unique_ptr<Volume>> volume = Volume::create(options(disk));
    if (!volume || write_pattern(**volume, 0, kBytes, 1) || (*volume)->flush()) _exit(1);
    (void)!write(ready[1], &byte, 1);
    (void)!read(go[0], &byte, 1);
    for (std::uint64_t offset = 0; offset < kBytes; offset += kMiB) {
      Buffer buffer = allocate_buffer(kMiB);
      fill(buffer.bytes(), offset, 2);
      (*volume)->submit(Request{.op = Op::write, .offset = offset, .length = kMiB, .buffer = std::move(buffer)},
                        [](Completion&&) {});
    }
    while ((*volume)->stats().front().in_flight == 0) usleep(1000);
    usleep(100'000);
    (void)!write(ready[1], &byte, 1);
    pause();
    _exit(1);
  }
  close(ready[1]);
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  drive_.hang();
  ASSERT_EQ(write(go[1], &byte, 1), 1);
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  kill(owner, SIGKILL);
  usleep(100'000);
  Result<std::unique_ptr<Volume>> next = Volume::open(options(disk));
  EXPECT_FALSE(next.ok());
  if (!next) {
    EXPECT_EQ(next.error().kind, ErrorKind::locked) << next.error().message();
    EXPECT_THAT(next.error().message(), HasSubstr(std::to_string(owner)));
  }
  drive_.answer();
  waitpid(owner, nullptr, 0);
  for (int i = 0; i < 500 && !next; ++i) {
    next = Volume::open(options(disk));
    if (!next) usleep(10'000);
  }
  close(ready[0]);
  close(go[0]);
  close(go[1]);
  ASSERT_TRUE(next.ok()) << next.error().message();
  EXPECT_FALSE(write_pattern(**next, 0, kBytes, 3));
  EXPECT_FALSE((*next)->flush());
  usleep(100'000);
  EXPECT_TRUE(read_holds(**next, 0, kBytes, 3));
}

TEST(ServedFolderTest, AFolderThatAProcessServesIsRefused) {
  testing::TempDir folder;
  FuseDisk drive(folder.path(), kMiB);
  NEED(drive);
  VolumeOptions options;
  options.folders = {drive.folder()};
  options.bytes = kMiB;
  const Result<std::unique_ptr<Volume>> volume = Volume::create(options);
  ASSERT_FALSE(volume.ok());
  EXPECT_EQ(volume.error().kind, ErrorKind::environment);
  EXPECT_THAT(volume.error().message(), HasSubstr("FUSE"));
}

INSTANTIATE_TEST_SUITE_P(AllEngines, DriveTest,
                         ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads),
                         [](const auto& info) { return engine_name(info.param); });

}  // namespace
}  // namespace tierflow::io
