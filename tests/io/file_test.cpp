// Which files are taken for data files, and what a failure leaves.
#include "io/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "io/filesystem.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using testing::failing;
using ::testing::HasSubstr;
using testing::in_child;
using testing::SystemCall;
using testing::SystemCalls;

constexpr FilePolicy kAnything{.allow_buffered = true, .allow_any_filesystem = true};

class FileTest : public ::testing::Test {
 protected:
  Error error_of(const Result<File>& file) { return file ? Error{} : file.error(); }
  Error open_error(const FilePolicy& policy = kAnything) { return error_of(File::open(path_, policy)); }
  void make() {
    std::ofstream(path_) << "bytes";
    chmod(path_.c_str(), 0600);
  }
  testing::TempDir folder_;
  const std::filesystem::path path_ = folder_.path() / "file";
};

TEST_F(FileTest, NobodyElseMayReachIt) {
  make();
  ASSERT_FALSE(open_error());
  for (const mode_t mode : {0640U, 0620U, 0610U, 0604U, 0602U, 0601U}) {
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
    const Error error = open_error();
    EXPECT_EQ(error.kind, ErrorKind::environment) << std::oct << mode;
    EXPECT_THAT(error.message(), HasSubstr("other users may reach it"));
  }
}

TEST_F(FileTest, ANewOneThatStaysOpenToOthersIsSaid) {
  for (const mode_t mode : {0640U, 0604U}) {
    SystemCalls calls([mode](const SystemCall& call) -> std::optional<long> {
      if (call.name != "fchmod") return {};
      chmod(call.path.c_str(), mode);
      return 0;
    });
    const File file = File::create(path_, kAnything).value();
    EXPECT_THAT(file.warnings(), ::testing::Contains(HasSubstr("permissions"))) << std::oct << mode;
    file.remove();
  }
}

TEST_F(FileTest, AnotherUsersIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  make();
  ASSERT_EQ(chown(path_.c_str(), 65534, 65534), 0);
  const Error error = open_error();
  EXPECT_EQ(error.kind, ErrorKind::environment);
  EXPECT_THAT(error.message(), HasSubstr("belongs to another user"));
  EXPECT_EQ(error.path, path_.string());
}

// Nobody may ever write to it.
TEST_F(FileTest, APipeUnderItsNameIsNotWaitedFor) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  for (const bool beside : {false, true}) {
    const int code = in_child([&] {
      alarm(10);
      FilePolicy reading = kAnything;
      reading.read_only = true;
      reading.beside_owner = beside;
      return open_error(reading).kind == ErrorKind::environment ? 0 : 1;
    });
    EXPECT_EQ(code, 0);
  }
}

TEST_F(FileTest, OnlyWhoReadsGoesWithoutALock) {
  const File owner = File::create(path_, kAnything).value();
  FilePolicy beside = kAnything;
  beside.beside_owner = true;
  EXPECT_EQ(open_error(beside).kind, ErrorKind::locked);
}

TEST_F(FileTest, WhatIsThereAlreadyIsSaidWhateverItIs) {
  make();
  chmod(path_.c_str(), 0644);
  const Error error = error_of(File::create(path_, kAnything));
  EXPECT_EQ(error.operation, "create");
  EXPECT_EQ(error.error_number, EEXIST);
  EXPECT_EQ(error.kind, ErrorKind::environment);
  EXPECT_THAT(error.message(), HasSubstr("remove it first"));
}

// As some kernels do: the file is there although O_DIRECT is refused.
TEST_F(FileTest, AFileThatIsMadeAndRefusedIsNotInTheWay) {
  FilePolicy strict = kAnything;
  strict.allow_buffered = false;
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name != "open" || (call.argument & O_DIRECT) == 0) return {};
    std::ofstream(call.path).close();
    return -EINVAL;
  });
  EXPECT_TRUE(error_of(File::create(path_, strict)));
  EXPECT_FALSE(std::filesystem::exists(path_));
  const Result<File> file = File::create(path_, kAnything);
  ASSERT_TRUE(file.ok()) << file.error().message();
  EXPECT_FALSE(file.value().direct());
}

TEST_F(FileTest, AFailedCreationLeavesNoFile) {
  {
    SystemCalls calls(failing("flock", ENOLCK));
    EXPECT_EQ(error_of(File::create(path_, kAnything)).error_number, ENOLCK);
  }
  EXPECT_FALSE(std::filesystem::exists(path_));
#ifdef STATX_DIOALIGN
  FilePolicy strict = kAnything;
  strict.allow_buffered = false;
  SystemCalls calls(
      [](const SystemCall& call) { return call.name == "statx" ? std::optional<long>(0) : std::nullopt; });
  EXPECT_TRUE(error_of(File::create(path_, strict)));
  EXPECT_FALSE(std::filesystem::exists(path_));
#endif
}

TEST_F(FileTest, OneOfTheSameSizeInItsPlaceIsNoticed) {
  File file = File::create(path_, kAnything).value();
  ASSERT_TRUE(file.preallocate(4096).ok());
  EXPECT_FALSE(file.check_in_place(4096));
  std::filesystem::rename(path_, folder_.path() / "moved");
  std::filesystem::copy(folder_.path() / "moved", path_);
  const Error error = file.check_in_place(4096);
  EXPECT_EQ(error.kind, ErrorKind::corruption);
  EXPECT_EQ(error.path, path_.string());
}

// Where space cannot be reserved, and where a limit shrinks.
TEST_F(FileTest, AFileSizeLimitIsNoSignal) {
  const auto under_limit = [&](const std::function<Error(File&)>& call) {
    return in_child([&] {
      File file = File::create(path_, kAnything).value();
      const rlimit limit{4096, 4096};
      if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
      const Error error = call(file);
      file.remove();
      return error.error_number == EFBIG ? 0 : 2;
    });
  };
  EXPECT_EQ(under_limit([](File& file) {
              SystemCalls calls(failing("fallocate", EOPNOTSUPP));
              const Result<bool> reserved = file.preallocate(8192);
              return reserved ? Error{} : reserved.error();
            }),
            0);
  EXPECT_EQ(under_limit([](File& file) {
              const Buffer buffer = allocate_buffer(8192);
              return file.write(0, buffer.data(), buffer.size());
            }),
            0);
}

TEST_F(FileTest, TheFolderThatIsMeantIsNamed) {
  const std::filesystem::path nowhere = folder_.path() / "nowhere";
  for (const Error& error : {check_filesystem(nowhere), sync_directory(nowhere)}) {
    EXPECT_EQ(error.error_number, ENOENT);
    EXPECT_EQ(error.path, nowhere.string());
  }
}

}  // namespace
}  // namespace tierflow::io
