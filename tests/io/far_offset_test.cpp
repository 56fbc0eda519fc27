// Places that 32 bits do not name.
#include <gtest/gtest.h>
#include <unistd.h>

#include "io/backend.h"
#include "io/layout.h"
#include "io/member.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::uint64_t kFar = (std::uint64_t{5} << 30) + kBlock;
constexpr FilePolicy kAnything{.allow_buffered = true, .allow_any_filesystem = true};

class FarOffsetTest : public ::testing::Test {
 protected:
  // With holes: it takes no more than what is written.
  File file_to(std::uint64_t bytes, const std::string& name) {
    File file = File::create(folder_.path() / name, kAnything).value();
    EXPECT_EQ(ftruncate(file.descriptor(), static_cast<off_t>(bytes)), 0);
    return file;
  }
  testing::TempDir folder_;
};

TEST_F(FarOffsetTest, EveryEngineAndBlockingCallsMeanTheSamePlace) {
  for (const auto make : {make_uring_backend, make_libaio_backend, make_threads_backend}) {
    auto backend = make(4).value();
    const File file = file_to(kFar + 2 * kBlock, engine_name(backend->kind()));
    const int descriptor = file.descriptor();
    ASSERT_FALSE(backend->register_files({&descriptor, 1}));
    const auto moved = [&](Action action, std::uint64_t offset, const Buffer& buffer) {
      EXPECT_TRUE(backend->push({.action = action, .offset = offset, .data = buffer.data(), .length = kBlock}));
      std::vector<KernelResult> results;
      while (results.empty()) backend->reap(results, std::chrono::seconds{1});
      return results[0].value;
    };
    const Buffer one = allocate_buffer(kBlock), two = allocate_buffer(kBlock), back = allocate_buffer(kBlock);
    fill(one.bytes(), 0, 1);
    fill(two.bytes(), 0, 2);
    EXPECT_EQ(moved(Action::write, kFar, one), static_cast<std::int64_t>(kBlock));
    EXPECT_FALSE(file.write(kFar + kBlock, two.data(), kBlock));
    EXPECT_FALSE(file.read(kFar, back.data(), kBlock));
    EXPECT_TRUE(holds(back.bytes(), 0, 1)) << engine_name(backend->kind());
    EXPECT_EQ(moved(Action::read, kFar + kBlock, back), static_cast<std::int64_t>(kBlock));
    EXPECT_TRUE(holds(back.bytes(), 0, 2)) << engine_name(backend->kind());
  }
}

TEST_F(FarOffsetTest, AVolumeReachesItsLastBytes) {
  const MemberHeader header{
      .volume_bytes = kFar + kBlock, .stripe_unit = 1 << 20, .data_bytes = kFar + kBlock, .weights = {1}};
  VolumeOptions options = options_in(folder_, 0);
  options.folders = {folder_.path()};
  {
    const File file = file_to(kDataStart + header.data_bytes, "state.tfv");
    ASSERT_FALSE(header.write(file));
  }
  {
    const auto volume = std::move(Volume::open(options)).value();
    EXPECT_FALSE(write_pattern(*volume, kFar, kBlock, 3));
    EXPECT_TRUE(read_holds(*volume, kFar, kBlock, 3));
  }
  const File file = File::open(folder_.path() / "state.tfv", kAnything).value();
  const Buffer back = allocate_buffer(kBlock);
  EXPECT_FALSE(file.read(kDataStart + kFar, back.data(), kBlock));
  EXPECT_TRUE(holds(back.bytes(), kFar, 3));
}

TEST_F(FarOffsetTest, StripesGoOnBehindFourGibibytesOfADrive) {
  const Layout layout(std::uint64_t{1} << 40, 1 << 20, {1, 1});
  layout.split(std::uint64_t{1} << 36, 100, 1 << 20, [](const Piece& piece) {
    EXPECT_EQ(piece.member, 0U);
    EXPECT_EQ(piece.member_offset, std::uint64_t{1} << 35);
    EXPECT_EQ(piece.length, 100U);
  });
}

}  // namespace
}  // namespace tierflow::io
