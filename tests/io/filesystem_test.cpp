// Volumes on real file systems that are full, of another kind, with large sectors, frozen, or lose their medium. Needs
// root and loop devices; skips itself visibly elsewhere.
#include "io/filesystem.h"

#include <gmock/gmock.h>

#include <fstream>
#include <future>
#include <thread>

#include "io/backend.h"
#include "io/bench.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/mounts.h"

namespace tierflow::io {
namespace {

using ::testing::HasSubstr;
using testing::LoopDisk;
using testing::PlainMount;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

#define NEED(mount) \
  if (!(mount).ready()) GTEST_SKIP() << "this machine does not let us mount (needs root, loop devices, mkfs.ext4)"

VolumeOptions on(const std::filesystem::path& folder, std::uint64_t bytes, EngineKind engine = EngineKind::automatic) {
  VolumeOptions options;
  options.folders = {folder / "tierflow"};
  options.bytes = bytes;
  options.engine = engine;
  return options;
}

constexpr EngineKind kEngines[] = {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads};

TEST(FilesystemTest, AFullDriveIsRefusedAtTheStartWithFigures) {
  testing::TempDir folder;
  LoopDisk disk(folder.path(), 64 * kMiB);
  NEED(disk);
  Result<std::unique_ptr<Volume>> volume = Volume::create(on(disk.path(), 200 * kMiB));
  ASSERT_FALSE(volume.ok());
  EXPECT_EQ(volume.error().kind, ErrorKind::environment);
  EXPECT_EQ(volume.error().error_number, ENOSPC);
  EXPECT_THAT(volume.error().message(), HasSubstr(std::to_string(201 * kMiB) + " bytes needed (201 MiB)"));
  EXPECT_FALSE(std::filesystem::exists(disk.path() / "tierflow"));
  // Two folders share the drive: each alone would fit.
  VolumeOptions two = on(disk.path(), 60 * kMiB);
  two.folders = {disk.path() / "a", disk.path() / "b"};
  volume = Volume::create(two);
  ASSERT_FALSE(volume.ok());
  EXPECT_EQ(volume.error().error_number, ENOSPC);
}

TEST(FilesystemTest, AfterTheStartAFullDriveDoesNotMatter) {
  testing::TempDir folder;
  LoopDisk disk(folder.path(), 64 * kMiB);
  NEED(disk);
  auto volume = create(on(disk.path(), 24 * kMiB));
  ASSERT_TRUE(volume);
  {
    std::ofstream filler(disk.path() / "filler", std::ios::binary);
    const std::string block(1 << 20, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    EXPECT_FALSE(write_pattern(*volume, 0, 24 * kMiB, seed));
    EXPECT_FALSE(volume->flush());
    EXPECT_TRUE(read_holds(*volume, 0, 24 * kMiB, seed));
  }
}

TEST(FilesystemTest, SeveralDrivesAreMeasuredBeforeTheyAreStriped) {
  testing::TempDir folder;
  std::filesystem::create_directory(folder.path() / "one");
  std::filesystem::create_directory(folder.path() / "two");
  LoopDisk one(folder.path() / "one", 64 * kMiB), two(folder.path() / "two", 64 * kMiB);
  NEED(one);
  NEED(two);
  VolumeOptions options = on(one.path(), 16 * kMiB);
  options.folders = {one.path(), two.path()};
  options.measure_speeds = true;
  options.block = 64 << 10;
  std::ofstream(two.path() / "tierflow-bench.tfv") << "in the way of a measurement";
  EXPECT_FALSE(Volume::create(options).ok());
  std::filesystem::remove(two.path() / "tierflow-bench.tfv");
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_FALSE(write_pattern(*volume, 0, 16 * kMiB, 5));
  EXPECT_TRUE(read_holds(*volume, 0, 16 * kMiB, 5));
}

TEST(FilesystemTest, LargeSectorsAreRespected) {
  testing::TempDir folder;
  LoopDisk disk(folder.path(), 64 * kMiB, 4096);
  NEED(disk);
  for (EngineKind engine : kEngines) {
    VolumeOptions options = on(disk.path(), 8 * kMiB + 5, engine);
    options.name = "sectors" + std::to_string(static_cast<int>(engine));
    auto volume = create(options);
    ASSERT_TRUE(volume);
    EXPECT_TRUE(volume->mode().direct);
    EXPECT_EQ(volume->mode().alignment % 4096, 0U);
    EXPECT_FALSE(write_pattern(*volume, 4096, 4 * kMiB, 2));
    EXPECT_TRUE(read_holds(*volume, 4096, 4 * kMiB, 2));
  }
}

TEST(FilesystemTest, RamIsNoDriveUnlessForced) {
  testing::TempDir folder;
  for (const char* kind : {"ramfs", "tmpfs"}) {
    PlainMount mount(folder.path(), kind);
    NEED(mount);
    VolumeOptions options = on(mount.path(), 2 * kMiB);
    Result<std::unique_ptr<Volume>> volume = Volume::create(options);
    ASSERT_FALSE(volume.ok());
    EXPECT_EQ(volume.error().kind, ErrorKind::environment);
    EXPECT_THAT(volume.error().message(), HasSubstr(kind));
    options.allow_any_filesystem = true;
    options.allow_buffered = true;
    auto forced = create(options);
    ASSERT_TRUE(forced);
    EXPECT_FALSE(write_pattern(*forced, 0, 2 * kMiB, 3));
    EXPECT_TRUE(read_holds(*forced, 0, 2 * kMiB, 3));
  }
}

TEST(FilesystemTest, TheBenchMeasuresRamWhereItIsForcedTo) {
  testing::TempDir folder;
  PlainMount mount(folder.path(), "tmpfs");
  NEED(mount);
  BenchOptions bench;
  bench.folders = {mount.path()};
  bench.bytes = 2 * kMiB;
  bench.depth = 2;
  bench.allow_buffered = true;
  const Result<BenchResult> refused = bench_storage(bench);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("--allow-any-filesystem"));
  bench.allow_any_filesystem = true;
  EXPECT_TRUE(bench_storage(bench).ok());
  VolumeOptions options = on(mount.path(), 2 * kMiB);
  options.allow_buffered = true;
  EXPECT_FALSE(measure_speeds(options).ok());
  options.allow_any_filesystem = true;
  EXPECT_TRUE(measure_speeds(options).ok());
}

TEST(FilesystemTest, ALayerOverTheDriveIsRefusedAndLeftAsItWas) {
  testing::TempDir folder;
  PlainMount mount(folder.path(), "overlay");
  NEED(mount);
  Result<std::unique_ptr<Volume>> volume = Volume::create(on(mount.path(), 2 * kMiB));
  ASSERT_FALSE(volume.ok());
  EXPECT_EQ(volume.error().kind, ErrorKind::environment);
  EXPECT_THAT(volume.error().message(), HasSubstr("overlay"));
  EXPECT_TRUE(std::filesystem::is_empty(mount.path()));
}

// The kinds that this machine cannot mount, by the number that statfs() gives for them.
TEST(FilesystemTest, RamOtherMachinesAndLayersAreRefusedByNameAndReason) {
  struct {
    std::uint32_t type;
    const char* name;
    const char* why;
  } kinds[] = {{0x01021994, "tmpfs", "lives in RAM"},       {0x858458F6, "ramfs", "lives in RAM"},
               {0x958458F6, "hugetlbfs", "lives in RAM"},   {0x6969, "NFS", "not a local drive"},
               {0xFF534D42, "CIFS", "not a local drive"},   {0xFE534D42, "SMB2", "not a local drive"},
               {0x517B, "SMB", "not a local drive"},        {0x00C36400, "Ceph", "not a local drive"},
               {0x5346414F, "AFS", "not a local drive"},    {0x01021997, "9p", "not a local drive"},
               {0x0BD00BD0, "Lustre", "not a local drive"}, {0x47504653, "GPFS", "not a local drive"},
               {0x65735546, "FUSE", "another layer"},       {0x794C7630, "overlay", "another layer"}};
  for (const auto& [type, name, why] : kinds) {
    const Error error = check_filesystem_type(type, "/mnt/somewhere");
    EXPECT_EQ(error.kind, ErrorKind::environment);
    EXPECT_EQ(error.operation, "open");
    EXPECT_EQ(error.error_number, 0);  // the system refused nothing
    EXPECT_THAT(error.message(),
                ::testing::AllOf(HasSubstr("the file system is " + std::string(name) + ": it "), HasSubstr(why),
                                 HasSubstr("/mnt/somewhere"), HasSubstr("name a folder on a local drive")));
  }
  // Where people meet these: the remedy is spelled out.
  EXPECT_THAT(check_filesystem_type(0x01021997, "/mnt/c/state").message(),
              ::testing::AllOf(HasSubstr("WSL2"), HasSubstr("/mnt/c"), HasSubstr("--storage")));
  EXPECT_THAT(check_filesystem_type(0x794C7630, "/state").message(),
              ::testing::AllOf(HasSubstr("docker run -v"), HasSubstr("--storage /state")));
  EXPECT_THAT(check_filesystem_type(0x01021994, "/tmp").message(), HasSubstr("--allow-any-filesystem"));
  for (const std::uint32_t local : {0xEF53U, 0x58465342U, 0x9123683EU}) {  // ext4, xfs, btrfs
    EXPECT_FALSE(check_filesystem_type(local, "/mnt/somewhere"));
  }
}

TEST(FilesystemTest, WithoutDirectIoOnlyOnRequestAndSaidAloud) {
  testing::TempDir folder;
  PlainMount mount(folder.path(), "ramfs");
  NEED(mount);
  VolumeOptions options = on(mount.path(), 2 * kMiB);
  options.allow_any_filesystem = true;
  Result<std::unique_ptr<Volume>> refused = Volume::create(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::environment);
  EXPECT_THAT(refused.error().message(), ::testing::AllOf(HasSubstr("O_DIRECT"), HasSubstr("--allow-buffered")));
  options.allow_buffered = true;
  auto volume = create(options);
  ASSERT_TRUE(volume);
  EXPECT_FALSE(volume->mode().direct);
  EXPECT_NE(volume->mode().engine, EngineKind::libaio);
  EXPECT_THAT(volume->mode().warnings, ::testing::Contains(HasSubstr("O_DIRECT")));
  EXPECT_FALSE(write_pattern(*volume, 0, kMiB, 1));
  EXPECT_FALSE(volume->flush());
  EXPECT_TRUE(read_holds(*volume, 0, kMiB, 1));
}

TEST(FilesystemTest, ALostMediumEndsInAnErrorWithinSeconds) {
  testing::TempDir folder;
  for (EngineKind engine : kEngines) {
    std::filesystem::create_directory(folder.path() / engine_name(engine));
    LoopDisk disk(folder.path() / engine_name(engine), 64 * kMiB);
    NEED(disk);
    auto volume = create(on(disk.path(), 32 * kMiB, engine));
    ASSERT_TRUE(volume);
    EXPECT_FALSE(write_pattern(*volume, 0, 32 * kMiB, 1));
    EXPECT_FALSE(volume->flush());
    disk.lose_medium(kMiB);
    const auto started = std::chrono::steady_clock::now();
    Completion completion = transfer(*volume, Op::read, 0, 32 * kMiB, allocate_buffer(32 * kMiB));
    EXPECT_EQ(completion.error.kind, ErrorKind::io);
    EXPECT_EQ(completion.error.error_number, EIO);
    EXPECT_TRUE(completion.buffer);
    volume.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds{10});
  }
}

TEST(FilesystemTest, AFilesystemThatTurnsReadOnlyIsAnError) {
  testing::TempDir folder;
  LoopDisk disk(folder.path(), 64 * kMiB);
  NEED(disk);
  auto volume = create(on(disk.path(), 16 * kMiB));
  ASSERT_TRUE(volume);
  EXPECT_FALSE(write_pattern(*volume, 0, kMiB, 1));
  const std::string trigger = "/sys/fs/ext4/" + disk.name() + "/trigger_fs_error";
  testing::shell("mount -o remount,errors=remount-ro " + disk.path().string());
  if (testing::shell("echo broken > " + trigger) == "!") GTEST_SKIP() << "no way to break this ext4";
  // Space that was written before may still be overwritten in place; what needs the journal may not.
  Error error = write_pattern(*volume, 8 * kMiB, 4 * kMiB, 2);
  if (!error) error = volume->flush();
  EXPECT_EQ(error.kind, ErrorKind::io) << error.message();
}

class FrozenTest : public ::testing::TestWithParam<EngineKind> {};

TEST_P(FrozenTest, WarnsAndEndsAtTheLimit) {
  testing::TempDir folder;
  LoopDisk disk(folder.path(), 64 * kMiB);
  NEED(disk);
  VolumeOptions options = on(disk.path(), 8 * kMiB, GetParam());
  options.stall_warning = std::chrono::milliseconds{100};
  options.stall_limit = std::chrono::milliseconds{600};
  std::atomic<int> warned{0};
  options.on_notice = [&warned](const Notice& notice) { warned += notice.kind == Notice::Kind::stalled ? 1 : 0; };
  auto volume = create(options);
  ASSERT_TRUE(volume);
  ASSERT_TRUE(disk.freeze());
  std::promise<void> ended;
  std::future<void> end = ended.get_future();
  std::thread rescue([&disk, &end] {  // whatever happens, nothing stays frozen
    end.wait_for(std::chrono::seconds{5});
    disk.thaw();
  });
  const auto started = std::chrono::steady_clock::now();
  Completion completion = transfer(*volume, Op::write, 0, kMiB, allocate_buffer(kMiB));
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds{4});
  ended.set_value();
  rescue.join();
  EXPECT_EQ(completion.error.error_number, ETIMEDOUT) << completion.error.message();
  EXPECT_FALSE(completion.buffer);
  EXPECT_EQ(warned, 1);
  for (int i = 0; i < 200 && volume->stats().front().in_flight != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds{10});
  }
  EXPECT_EQ(volume->stats().front().in_flight, 0U);
  volume.reset();
  EXPECT_TRUE(Volume::open(options).ok());
}

INSTANTIATE_TEST_SUITE_P(Engines, FrozenTest, ::testing::ValuesIn(kEngines),
                         [](const auto& info) { return engine_name(info.param); });

}  // namespace
}  // namespace tierflow::io
