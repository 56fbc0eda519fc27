// What opening a volume asks of its files, and what each of several drives is asked.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "io/file.h"
#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using testing::failing;
using ::testing::HasSubstr;
using testing::SystemCall;
using testing::SystemCalls;

class OpenTest : public ::testing::Test {
 protected:
  VolumeOptions options() {
    VolumeOptions options = options_in(folder_, 1 << 20);
    options.engine = EngineKind::threads;
    options.folders = {folder_.path() / "a", folder_.path() / "b"};
    return options;
  }
  std::filesystem::path file(std::size_t drive) { return options().folders[drive] / "state.tfv"; }
  Error open_error(const VolumeOptions& options) {
    const Result<std::unique_ptr<Volume>> opened = Volume::open(options);
    return opened ? Error{} : opened.error();
  }
  testing::TempDir folder_;
};

TEST_F(OpenTest, NothingIsWrittenBeforeTheFirstRequest) {
  create(options()).reset();
  SystemCalls calls;
  ASSERT_FALSE(open_error(options()));
  EXPECT_GT(calls.count("pread"), 0U);
  for (const char* name : {"pwrite", "fdatasync", "fsync", "ftruncate", "fallocate", "fchmod"})
    EXPECT_EQ(calls.count(name), 0U) << name;
}

TEST_F(OpenTest, ASectorThatCannotBeReadCostsNoVolume) {
  create(options()).reset();
  SystemCalls calls(failing("pread", EIO, "a/state.tfv", 1));
  const Result<std::unique_ptr<Volume>> opened = Volume::open(options());
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  EXPECT_THAT(opened.value()->mode().warnings,
              ::testing::Contains(::testing::AllOf(HasSubstr(file(0).string()), HasSubstr("Input/output error"),
                                                   HasSubstr("second header is whole"))));
}

TEST_F(OpenTest, ARejectedFileIsNamed) {
  create(options()).reset();
  std::filesystem::resize_file(file(1), 100);
  EXPECT_EQ(open_error(options()).path, file(1).string());
}

// Each says so in itself, and its size is what its header says.
TEST_F(OpenTest, PartsThatAreNotAsLongAsTheVolumeNeedsAreRefused) {
  create(options()).reset();
  {
    const FilePolicy anything{.allow_buffered = true, .allow_any_filesystem = true};
    const File part = File::open(file(1), anything).value();
    MemberHeader header = MemberHeader::read(part).value();
    header.data_bytes += header.stripe_unit;
    std::filesystem::resize_file(file(1), header.data_start + header.data_bytes);
    ASSERT_FALSE(header.write(part));
  }
  const Error error = open_error(options());
  EXPECT_EQ(error.kind, ErrorKind::input);
  EXPECT_EQ(error.path, file(1).string());
  EXPECT_THAT(error.message(), HasSubstr("contradicts the volume's size"));
}

TEST_F(OpenTest, AFlushLooksAtEveryFile) {
  for (const std::size_t drive : {0U, 1U}) {
    const auto volume = create(options());
    ASSERT_TRUE(volume);
    EXPECT_FALSE(volume->flush());
    std::filesystem::rename(file(drive), folder_.path() / "moved");
    std::filesystem::copy(folder_.path() / "moved", file(drive));
    const Error error = volume->flush();
    EXPECT_EQ(error.kind, ErrorKind::corruption);
    EXPECT_EQ(error.path, file(drive).string());
    for (const auto& folder : options().folders) std::filesystem::remove_all(folder);
  }
}

TEST_F(OpenTest, OneDriveWithoutDirectIoMakesTheVolumeOneWithout) {
  for (const char* name : {"a/state.tfv", "b/state.tfv"}) {
    SystemCalls calls([name](const SystemCall& call) -> std::optional<long> {
      if (call.name == "open" && (call.argument & O_DIRECT) != 0 && call.path.ends_with(name)) return -EINVAL;
      return {};
    });
    const auto volume = create(options());
    ASSERT_TRUE(volume);
    EXPECT_FALSE(volume->mode().direct) << name;
    volume->remove_files();
  }
}

// libaio would block on it.
TEST_F(OpenTest, WithoutDirectIoAndRingsThreadsServe) {
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name == "open" && (call.argument & O_DIRECT) != 0) return -EINVAL;
    if (call.name == "io_uring_setup") return -EPERM;
    return {};
  });
  VolumeOptions wanted = options();
  wanted.engine = EngineKind::automatic;
  const auto volume = create(wanted);
  ASSERT_TRUE(volume);
  EXPECT_EQ(volume->mode().engine, EngineKind::threads);
}

#ifdef STATX_DIOALIGN
TEST_F(OpenTest, BlocksThatTheDriveDoesNotTakeAreRefused) {
  create(options()).reset();
  SystemCalls calls(
      [](const SystemCall& call) { return call.name == "statx" ? std::optional<long>(16384) : std::nullopt; });
  VolumeOptions wanted = options();
  EXPECT_FALSE(open_error(wanted));
  wanted.block = 8192;
  EXPECT_EQ(open_error(wanted).kind, ErrorKind::usage);
  for (const SystemCall& call : calls.seen()) {
    if (call.name == "pread") {
      EXPECT_EQ(call.argument % 16384, 0);
    }
  }
}
#endif

TEST_F(OpenTest, ARefusedRequestNamesItsVolume) {
  const auto volume = create(options());
  EXPECT_EQ(transfer(*volume, Op::read, 1, 4096, allocate_buffer(4096)).error.path, file(0).string());
}

}  // namespace
}  // namespace tierflow::io
