// What io asks of the kernel, and what it makes of the answers: barriers, reservations, locks, permissions, interrupted
// and partial calls.
#include "tests/support/system_calls.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "io/discard.h"
#include "io/file.h"
#include "io/filesystem.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

using ::testing::Contains;
using testing::failing;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SystemCall;
using testing::SystemCalls;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr FilePolicy kAnything{.allow_buffered = true, .allow_any_filesystem = true};
constexpr long kBtrfs = 0x9123683E, kZfs = 0x2FC12FC1, kExfat = 0x2011BAB0, kFat = 0x4D44;

class SystemCallsTest : public ::testing::Test {
 protected:
  VolumeOptions options() {
    VolumeOptions options = options_in(folder_, kMiB);
    options.engine = EngineKind::threads;
    return options;
  }
  std::filesystem::path file() { return folder_.path() / "drive" / "state.tfv"; }
  Error create_error(testing::Answer answer) {
    SystemCalls calls(std::move(answer));
    Result<std::unique_ptr<Volume>> made = Volume::create(options());
    return made ? Error{} : made.error();
  }
  std::vector<std::string> warnings(testing::Answer answer) {
    SystemCalls calls(std::move(answer));
    auto volume = create(options());
    if (!volume) return {"no volume"};
    std::vector<std::string> found = volume->mode().warnings;
    volume->remove_files();
    std::erase_if(found, [](const std::string& line) { return line.find("O_DIRECT: its bytes") != std::string::npos; });
    // Each says where.
    for (const std::string& line : found) EXPECT_THAT(line, HasSubstr((folder_.path() / "drive").string()));
    return found;
  }
  File data_file() { return File::create(folder_.path() / "file", kAnything).value(); }

  testing::TempDir folder_;
};

// The place of the last call of this name for a path that ends in `end`; -1 where there is none.
std::ptrdiff_t last(const std::vector<SystemCall>& calls, std::string_view name, const std::string& end) {
  for (std::size_t i = calls.size(); i-- > 0;)
    if (calls[i].name == name && calls[i].path.ends_with(end)) return static_cast<std::ptrdiff_t>(i);
  return -1;
}

TEST_F(SystemCallsTest, ANewVolumeIsFlushedWithTheFoldersThatLeadToIt) {
  VolumeOptions wanted = options();
  wanted.folders = {folder_.path() / "new" / "a", folder_.path() / "b"};
  std::vector<SystemCall> seen;
  {
    SystemCalls calls;
    ASSERT_TRUE(create(wanted));
    seen = calls.seen();
  }
  const auto first = [&seen](std::string_view name, const std::string& end) {
    return std::find_if(seen.begin(), seen.end(),
                        [&](const SystemCall& call) { return call.name == name && call.path.ends_with(end); }) -
           seen.begin();
  };
  for (const char* name : {"/a", "/b"}) {
    const std::string file = std::string(name) + "/state.tfv";
    const auto flushed = last(seen, "fsync", file);
    EXPECT_GT(flushed, first("pwrite", file)) << name;
    EXPECT_GT(last(seen, "fsync", name), flushed) << "the folder of " << name;
  }
  EXPECT_GT(last(seen, "fsync", "/new"), 0);                     // holds the new name "a"
  EXPECT_GT(last(seen, "fsync", folder_.path().filename()), 0);  // holds "new" and "b"
  EXPECT_LT(last(seen, "fsync", ""), first("fdatasync", ""));    // the probe's: all of this comes before it
}

// Where a file system reserves nothing, the numbers alone tell that the drive would be full one day.
TEST_F(SystemCallsTest, FoldersOfOneDriveNeedTheirSpaceTogether) {
  VolumeOptions wanted = options();
  wanted.folders = {folder_.path() / "a", folder_.path() / "b"};
  wanted.bytes = std::filesystem::space(folder_.path()).available / 5 * 6;
  const SystemCalls calls(failing("fallocate", EOPNOTSUPP));
  const Result<std::unique_ptr<Volume>> refused = Volume::create(wanted);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().error_number, ENOSPC);
  EXPECT_THAT(refused.error().message(), HasSubstr("bytes needed"));
}

TEST_F(SystemCallsTest, RemovingFilesIsFlushedToo) {
  auto volume = create(options());
  SystemCalls calls;
  volume->remove_files();
  EXPECT_GE(last(calls.seen(), "fsync", "/drive"), 0);
}

TEST_F(SystemCallsTest, AFlushReachesEveryDrive) {
  VolumeOptions wanted = options();
  wanted.folders = {folder_.path() / "a", folder_.path() / "b"};
  auto volume = create(wanted);
  SystemCalls calls;
  EXPECT_FALSE(volume->flush());
  EXPECT_EQ(calls.count("fdatasync"), 2U);
  for (const char* name : {"/a/state.tfv", "/b/state.tfv"}) EXPECT_GE(last(calls.seen(), "fdatasync", name), 0);
}

TEST_F(SystemCallsTest, ALongRequestGoesToTheKernelInMebibytesUnlessAskedOtherwise) {
  VolumeOptions wanted = options();
  wanted.bytes = 4 * kMiB;
  auto volume = create(wanted);
  SystemCalls calls;
  EXPECT_FALSE(write_pattern(*volume, 0, 3 * kMiB, 1));
  EXPECT_EQ(calls.count("pwrite"), 3U);
  for (const SystemCall& call : calls.seen()) {
    if (call.name == "pwrite") {
      EXPECT_EQ(call.argument, static_cast<long>(kMiB));
    }
  }
}

TEST_F(SystemCallsTest, AFileThatIsNotThereIsNoFaultOfTheMachine) {
  for (const bool any : {false, true}) {
    VolumeOptions wanted = options();
    wanted.allow_any_filesystem = any;
    const Result<std::unique_ptr<Volume>> absent = Volume::open(wanted);
    ASSERT_FALSE(absent.ok());
    EXPECT_EQ(absent.error().kind, ErrorKind::input);
    EXPECT_EQ(absent.error().error_number, ENOENT);
  }
  create(options()).reset();
  for (const int number : {EPERM, EACCES, EMFILE}) {
    SystemCalls calls(failing("open", number, "state.tfv"));
    const Result<std::unique_ptr<Volume>> refused = Volume::open(options());
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().kind, ErrorKind::environment);
    EXPECT_EQ(refused.error().error_number, number);
  }
}

TEST_F(SystemCallsTest, AFileWhoseStateCannotBeReadIsAnError) {
  create(options()).reset();
  const auto nth = [](int left) {
    return [left](const SystemCall& call) mutable -> std::optional<long> {
      if (call.name == "fstat" && left-- == 0) return -EIO;
      return {};
    };
  };
  for (const int at : {0, 1}) {  // when it is opened, and when its header is read
    SystemCalls calls(nth(at));
    const Result<std::unique_ptr<Volume>> opened = Volume::open(options());
    ASSERT_FALSE(opened.ok()) << at;
    EXPECT_EQ(opened.error().kind, ErrorKind::io);
    EXPECT_EQ(opened.error().operation, "stat");
    EXPECT_EQ(opened.error().error_number, EIO);
  }
  {
    Result<std::unique_ptr<Volume>> opened = Volume::open(options());
    ASSERT_TRUE(opened.ok());
    SystemCalls calls(nth(0));
    EXPECT_EQ((*opened)->flush().operation, "stat");
  }
  std::filesystem::remove_all(folder_.path() / "drive");
  EXPECT_EQ(create_error(nth(0)).operation, "stat");
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "drive")) << "what was made is left behind";
}

TEST_F(SystemCallsTest, WhatCannotBeFlushedIsNotTrusted) {
  for (const char* part : {"state.tfv", "/drive"}) {
    const Error error = create_error(failing("fsync", EIO, part));
    EXPECT_EQ(error.kind, ErrorKind::io) << part;
    EXPECT_EQ(error.operation, "flush");
    EXPECT_EQ(error.error_number, EIO);
    EXPECT_THAT(error.message(), ::testing::AllOf(HasSubstr("dmesg"), HasSubstr("--storage")));
    EXPECT_FALSE(std::filesystem::exists(folder_.path() / "drive"));
  }
}

TEST_F(SystemCallsTest, FoldersThatCannotBeFlushedAreTolerated) {
  for (const int number : {EINVAL, ENOTSUP, ENOSYS, EBADF}) {
    SystemCalls calls(failing("fsync", number));
    EXPECT_FALSE(sync_directory(folder_.path())) << number;
  }
  EXPECT_FALSE(sync_directory("/proc"));  // one that really cannot
  EXPECT_EQ(sync_directory(folder_.path() / "nowhere").error_number, ENOENT);
  EXPECT_EQ(sync_directory("/proc/self/comm").error_number, ENOTDIR);
  SystemCalls calls(failing("fsync", EIO));
  EXPECT_EQ(sync_directory(folder_.path()).kind, ErrorKind::io);
}

TEST_F(SystemCallsTest, AFailedReservationIsAnErrorAndLeavesNothing) {
  for (const int number : {ENOSPC, EIO, EFBIG}) {
    const Error error = create_error(failing("fallocate", number));
    EXPECT_EQ(error.kind, ErrorKind::environment);
    EXPECT_EQ(error.error_number, number);
    EXPECT_EQ(error.operation, "preallocate");
    EXPECT_EQ(error.length, 2 * kMiB);
    if (number == ENOSPC) {
      EXPECT_THAT(error.detail, HasSubstr(std::to_string(2 * kMiB) + " bytes needed"));
    } else {
      EXPECT_THAT(error.detail, Not(HasSubstr("bytes needed")));
    }
    if (number == EFBIG) {
      EXPECT_THAT(error.detail, HasSubstr("ulimit -f"));
    }
    EXPECT_FALSE(std::filesystem::exists(folder_.path() / "drive"));
  }
}

TEST_F(SystemCallsTest, WithoutReservationsTheFileHasItsSizeAndItIsSaid) {
  for (const int number : {EOPNOTSUPP, ENOSYS}) {
    EXPECT_THAT(warnings(failing("fallocate", number)),
                ::testing::ElementsAre(::testing::AllOf(HasSubstr("cannot reserve"), HasSubstr("--storage"))));
  }
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name == "fallocate") return -EOPNOTSUPP;
    if (call.name == "ftruncate") return -EFBIG;
    return {};
  });
  File file = data_file();
  const Result<bool> reserved = file.preallocate(kMiB);
  ASSERT_FALSE(reserved.ok());
  EXPECT_EQ(reserved.error().error_number, EFBIG);
}

TEST_F(SystemCallsTest, AnInterruptedReservationIsMadeAgain) {
  SystemCalls calls(failing("fallocate", EINTR, "", 3));
  File file = data_file();
  const Result<bool> reserved = file.preallocate(kMiB);
  ASSERT_TRUE(reserved.ok());
  EXPECT_TRUE(reserved.value());
  EXPECT_EQ(calls.count("fallocate"), 4U);
  EXPECT_EQ(file.size().value(), kMiB);
}

TEST_F(SystemCallsTest, WhatAFileSystemDoesNotDoIsSaid) {
  EXPECT_THAT(warnings({}), ::testing::IsEmpty());
  const auto remedy = ::testing::HasSubstr("--storage");
  EXPECT_THAT(warnings(failing("fchmod", EPERM)),
              ::testing::ElementsAre(::testing::AllOf(HasSubstr("permissions"), HasSubstr("umask=077"), remedy)));
  const auto is = [](long type, std::optional<long> flags = {}) {
    return [type, flags](const SystemCall& call) -> std::optional<long> {
      if (call.name == "fstatfs") return type;
      if (call.name == "ioctl" && flags) return flags;
      return {};
    };
  };
  EXPECT_THAT(warnings(is(kBtrfs, -EOPNOTSUPP)),
              ::testing::ElementsAre(::testing::AllOf(HasSubstr("copy on write"), HasSubstr("chattr +C"), remedy)));
  EXPECT_THAT(warnings(is(kBtrfs, 0)), ::testing::IsEmpty());
  EXPECT_THAT(warnings(is(kZfs)),
              ::testing::ElementsAre(::testing::AllOf(HasSubstr("ZFS"), HasSubstr("O_DIRECT"), remedy)));
  for (const long type : {kExfat, kFat})
    EXPECT_THAT(warnings(is(type)), ::testing::ElementsAre(::testing::AllOf(HasSubstr("exFAT and FAT"), remedy)));
}

TEST_F(SystemCallsTest, CopyOnWriteIsTurnedOffWhereThereIsAny) {
  std::vector<long> requests;
  SystemCalls calls([&](const SystemCall& call) -> std::optional<long> {
    if (call.name == "fstatfs") return kBtrfs;
    if (call.name != "ioctl") return {};
    requests.push_back(call.argument);
    return 0;
  });
  data_file();
  EXPECT_EQ(requests, (std::vector<long>{static_cast<long>(FS_IOC_GETFLAGS), static_cast<long>(FS_IOC_SETFLAGS)}));
}

TEST_F(SystemCallsTest, PermissionsThatAreNotKeptAreSaid) {
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name != "fchmod") return {};
    chmod(call.path.c_str(), 0644);  // as a mount option decides on exFAT
    return 0;
  });
  EXPECT_THAT(data_file().warnings(), ::testing::ElementsAre(HasSubstr("permissions")));
}

TEST_F(SystemCallsTest, TheLockIsTakenAndGivenBack) {
  std::vector<SystemCall> seen;
  {
    SystemCalls calls;
    create(options());
    seen = calls.seen();
  }
  std::vector<long> operations;
  for (const SystemCall& call : seen)
    if (call.name == "flock") operations.push_back(call.argument);
  EXPECT_EQ(operations, (std::vector<long>{LOCK_EX | LOCK_NB, LOCK_UN}));
  std::filesystem::remove(file());
  const Error error = create_error(failing("flock", ENOLCK));
  EXPECT_EQ(error.kind, ErrorKind::environment);
  EXPECT_EQ(error.error_number, ENOLCK);
}

TEST_F(SystemCallsTest, AHolderThatTheKernelDoesNotNameIsNotNamed) {
  const Error error = create_error(failing("flock", EWOULDBLOCK));
  EXPECT_EQ(error.kind, ErrorKind::locked);
  EXPECT_THAT(error.message(), HasSubstr("another process holds it"));
}

// It let go between the question for the lock and that for its holder.
TEST_F(SystemCallsTest, ALockThatNobodyHoldsAnyMoreIsTaken) {
  SystemCalls calls(failing("flock", EWOULDBLOCK, {}, 1));
  EXPECT_TRUE(create(options()));
  EXPECT_EQ(calls.count("flock"), 3U);  // refused, taken, given back
}

TEST_F(SystemCallsTest, AFileThatCannotBeDiscardedIsSaidToStay) {
  create(options()).reset();
  SystemCalls calls(failing("unlink", EACCES));
  const Error error = discard(options());
  EXPECT_EQ(error.kind, ErrorKind::environment);
  EXPECT_EQ(error.path, file().string());
  EXPECT_THAT(error.message(), HasSubstr("the folder must be one that can be written"));
  EXPECT_TRUE(std::filesystem::exists(file()));
}

TEST_F(SystemCallsTest, AFileIsReadAndWrittenWholeInPiecesAndAfterInterruptions) {
  File file = File::create(folder_.path() / "file", kAnything).value();
  ASSERT_TRUE(file.preallocate(64 << 10).ok());
  Buffer data = allocate_buffer(32 << 10), back = allocate_buffer(32 << 10);
  fill(data.bytes(), 0, 3);
  int round = 0;
  SystemCalls calls([&round](const SystemCall& call) -> std::optional<long> {
    if (call.name != "pread" && call.name != "pwrite") return {};
    return ++round % 2 == 0 ? 4096L : static_cast<long>(-EINTR);
  });
  ASSERT_FALSE(file.write(8 << 10, data.data(), data.size()));
  ASSERT_FALSE(file.read(8 << 10, back.data(), back.size()));
  EXPECT_EQ(round, 32);
  EXPECT_TRUE(holds(back.bytes(), 0, 3));
}

TEST_F(SystemCallsTest, AFileNamesTheSpotThatFailed) {
  File file = File::create(folder_.path() / "file", kAnything).value();
  ASSERT_TRUE(file.preallocate(64 << 10).ok());
  Buffer data = allocate_buffer(32 << 10);
  const auto one = [&](const char* name, long value) {
    SystemCalls calls(
        [=](const SystemCall& call) { return call.name == name ? std::optional<long>(value) : std::nullopt; });
    return std::string(name) == "pread" ? file.read(4096, data.data(), 8192) : file.write(4096, data.data(), 8192);
  };
  for (const char* name : {"pread", "pwrite"}) {
    const Error error = one(name, -EIO);
    EXPECT_EQ(error.kind, ErrorKind::io);
    EXPECT_EQ(error.error_number, EIO);
    EXPECT_EQ(error.offset, 4096U);
    EXPECT_EQ(error.length, 8192U);
    EXPECT_EQ(error.path, file.path());
  }
  EXPECT_EQ(one("pread", 0).kind, ErrorKind::corruption);
  EXPECT_EQ(one("pwrite", 0).error_number, ENOSPC);
  EXPECT_EQ(file.read(60 << 10, data.data(), 8192).kind, ErrorKind::corruption);
  SystemCalls calls(failing("fsync", EIO));
  EXPECT_EQ(file.sync().error_number, EIO);
}

TEST_F(SystemCallsTest, WithoutDirectIoItSaysHowToGoOn) {
  const auto refuse = [](const SystemCall& call) -> std::optional<long> {
    if (call.name == "open" && (call.argument & O_DIRECT) != 0) return -EINVAL;
    return {};
  };
  VolumeOptions strict = options();
  strict.allow_buffered = false;
  SystemCalls calls(refuse);
  const Result<std::unique_ptr<Volume>> refused = Volume::create(strict);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::environment);
  EXPECT_THAT(refused.error().message(), HasSubstr("--allow-buffered"));
  EXPECT_EQ(refused.error().operation, "open");
  auto volume = create(options());
  ASSERT_TRUE(volume);
  EXPECT_FALSE(volume->mode().direct);
  EXPECT_THAT(volume->mode().warnings, Contains(HasSubstr("O_DIRECT")));
}

#ifdef STATX_DIOALIGN
TEST_F(SystemCallsTest, TheAlignmentIsWhatTheFileSystemAsksForAndNeverLessThanAPage) {
  const auto with = [](long alignment) {
    return [alignment](const SystemCall& call) {
      return call.name == "statx" ? std::optional<long>(alignment) : std::nullopt;
    };
  };
  for (const auto& [asked, expected] : {std::pair{512L, 4096U}, {4096L, 4096U}, {16384L, 16384U}, {12288L, 16384U}}) {
    SystemCalls calls(with(asked));
    File file = data_file();
    EXPECT_EQ(file.alignment(), expected);
    file.remove();
  }
  SystemCalls calls(with(16384));
  VolumeOptions wanted = options();
  wanted.block = 8192;
  const Result<std::unique_ptr<Volume>> refused = Volume::create(wanted);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::usage);
  EXPECT_THAT(refused.error().message(), HasSubstr("16384"));
  auto volume = create(options());
  ASSERT_TRUE(volume);
  EXPECT_EQ(volume->alignment(), 16384U);
  EXPECT_EQ(transfer(*volume, Op::read, 4096, 16384, allocate_buffer(16384)).error.kind, ErrorKind::usage);
  const Buffer memory = allocate_buffer(32 << 10);
  std::byte* aligned = memory.data() + (16384 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16384) % 16384;
  EXPECT_FALSE(transfer(*volume, Op::read, 16384, 16384, Buffer(aligned, 16384, nullptr, nullptr)).error);
}

TEST_F(SystemCallsTest, ANewVolumeIsTriedInBlocksThatTheDriveTakes) {
  SystemCalls calls(
      [](const SystemCall& call) { return call.name == "statx" ? std::optional<long>(16384) : std::nullopt; });
  ASSERT_TRUE(create(options()));
  for (const char* name : {"pwrite", "pread"}) EXPECT_GT(calls.count(name), 0U);
  for (const SystemCall& call : calls.seen()) {
    if (call.name == "pwrite" || call.name == "pread") {
      EXPECT_EQ(call.argument % 16384, 0) << call.name;
    }
  }
}

TEST_F(SystemCallsTest, DirectIoThatTheFileSystemTakesBackIsNotUsed) {
  SystemCalls calls(
      [](const SystemCall& call) { return call.name == "statx" ? std::optional<long>(0) : std::nullopt; });
  File file = data_file();
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(fcntl(file.descriptor(), F_GETFL) & O_DIRECT, 0);
  VolumeOptions strict = options();
  strict.allow_buffered = false;
  const Result<std::unique_ptr<Volume>> refused = Volume::create(strict);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().operation, "open");
  EXPECT_THAT(refused.error().message(), HasSubstr("--allow-buffered"));
}
#endif

std::set<int> open_descriptors() {
  std::set<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    found.insert(std::stoi(entry.path().filename()));
  std::erase_if(found, [](int descriptor) { return fcntl(descriptor, F_GETFD) < 0; });  // the iterator's own
  return found;
}

TEST_F(SystemCallsTest, NoDescriptorLeaksNorOutlivesExec) {
  for (const EngineKind engine : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    const std::set<int> before = open_descriptors();
    VolumeOptions wanted = options();
    wanted.engine = engine;
    wanted.name = engine_name(engine);
    auto volume = create(wanted);
    ASSERT_TRUE(volume);
    int extra = 0;
    for (const int descriptor : open_descriptors()) {
      if (before.contains(descriptor)) continue;
      ++extra;
      EXPECT_NE(fcntl(descriptor, F_GETFD) & FD_CLOEXEC, 0) << descriptor;
    }
    EXPECT_GE(extra, 1);
    volume.reset();
    EXPECT_EQ(open_descriptors().size(), before.size()) << engine_name(engine);
    EXPECT_FALSE(sync_directory(folder_.path()));
    EXPECT_FALSE(Volume::create(wanted).ok());  // it exists
    EXPECT_EQ(open_descriptors().size(), before.size());
  }
}

}  // namespace
}  // namespace tierflow::io
