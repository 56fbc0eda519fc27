// Memory that a ring has registered is the memory that it moves, whichever piece a request lies in.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <future>

#include "io/backend.h"
#include "io/file.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kGiB = std::size_t{1} << 30;

void* map(void* where, std::size_t bytes, int protection = PROT_READ | PROT_WRITE) {
  return mmap(where, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | (where == nullptr ? 0 : MAP_FIXED), -1, 0);
}

// Only what was registered still has the old pages.
TEST(RegisteredMemoryTest, EveryPieceIsUsedInWhateverOrderTheyAreNamed) {
  testing::TempDir folder;
  File file = File::create(folder.path() / "file", {.allow_buffered = true, .allow_any_filesystem = true}).value();
  ASSERT_TRUE(file.preallocate(8 * kBlock).ok());
  auto ring = make_uring_backend(4).value();
  const int descriptor = file.descriptor();
  ASSERT_FALSE(ring->register_files({&descriptor, 1}));
  void* const begin = map(nullptr, 4 * kBlock);
  ASSERT_NE(begin, MAP_FAILED);
  const std::span<std::byte> all(static_cast<std::byte*>(begin), 4 * kBlock);
  std::vector<std::span<std::byte>> pieces;
  for (const std::size_t at : {2U, 0U, 3U, 1U}) pieces.push_back(all.subspan(at * kBlock, kBlock));
  for (std::size_t i = 0; i < 4; ++i) fill(pieces[i], 0, i + 1);
  ASSERT_FALSE(ring->register_memory(pieces));
  ASSERT_EQ(map(begin, all.size()), begin);
  for (std::uint32_t i = 0; i < 4; ++i)
    ASSERT_TRUE(ring->push(
        {.action = Action::write, .ticket = i, .offset = i * kBlock, .data = pieces[i].data(), .length = kBlock}));
  std::vector<KernelResult> results;
  while (results.size() < 4) ring->reap(results, std::chrono::seconds{10});
  for (const KernelResult& result : results) EXPECT_EQ(result.value, static_cast<std::int64_t>(kBlock));
  const Buffer back = allocate_buffer(4 * kBlock);
  ASSERT_FALSE(file.read(0, back.data(), back.size()));
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(holds(back.bytes().subspan(i * kBlock, kBlock), 0, i + 1)) << i;
  ring.reset();
  munmap(begin, all.size());
}

class RegisteredVolumeTest : public ::testing::Test {
 protected:
  RegisteredVolumeTest() {
    VolumeOptions options = options_in(folder_, 1 << 20);
    options.engine = EngineKind::io_uring;
    volume_ = create(options);
  }
  testing::TempDir folder_;
  std::unique_ptr<Volume> volume_;
};

TEST_F(RegisteredVolumeTest, WhatTheKernelRefusedDoesNotHinderWhatComesNext) {
  ASSERT_TRUE(volume_);
  void* const none = map(nullptr, kBlock, PROT_NONE);
  ASSERT_NE(none, MAP_FAILED);
  const Buffer good = allocate_buffer(kBlock);
  volume_->register_memory({static_cast<std::byte*>(none), kBlock});
  EXPECT_FALSE(volume_->mode().registered_buffers);
  EXPECT_EQ(volume_->mode().warnings.size(), volume_->mode().direct ? 1U : 2U);
  volume_->register_memory(good.bytes());
  EXPECT_TRUE(volume_->mode().registered_buffers);
  volume_.reset();
  munmap(none, kBlock);
}

TEST_F(RegisteredVolumeTest, ACallbackThatRegistersMemoryDoesNotWaitForItself) {
  ASSERT_TRUE(volume_);
  std::promise<void> said;
  const Buffer memory = allocate_buffer(kBlock);
  volume_->submit({}, [&](Completion&&) {
    volume_->register_memory(memory.bytes());
    said.set_value();
  });
  std::future<void> end = said.get_future();
  if (end.wait_for(std::chrono::seconds{10}) != std::future_status::ready) std::abort();
}

// The same two mebibytes over and over: it takes no more than they do.
TEST_F(RegisteredVolumeTest, MoreThanAGibibyteIsRegistered) {
  ASSERT_TRUE(volume_);
  constexpr std::size_t kPart = std::size_t{2} << 20;
  const int memory = memfd_create("pages", MFD_CLOEXEC);
  ASSERT_GE(memory, 0);
  ASSERT_EQ(ftruncate(memory, kPart), 0);
  void* const begin = map(nullptr, kGiB + kPart, PROT_NONE);
  ASSERT_NE(begin, MAP_FAILED);
  const std::span<std::byte> all(static_cast<std::byte*>(begin), kGiB + kPart);
  for (std::size_t at = 0; at < all.size(); at += kPart)
    ASSERT_NE(mmap(all.data() + at, kPart, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0), MAP_FAILED);
  volume_->register_memory(all);
  const bool registered = volume_->mode().registered_buffers;
  const bool too_much = !registered && volume_->mode().warnings.back().find("(errno 12)") != std::string::npos;
  EXPECT_TRUE(registered || too_much);
  fill(all.last(kBlock), 0, 3);
  EXPECT_FALSE(transfer(*volume_, Op::write, 0, kBlock, Buffer(&all.last(kBlock)[0], kBlock, nullptr, nullptr)).error);
  EXPECT_TRUE(read_holds(*volume_, 0, kBlock, 3));
  volume_.reset();
  munmap(begin, all.size());
  close(memory);
  if (too_much) GTEST_SKIP() << "this user may not lock a gibibyte of memory (ulimit -l)";
}

}  // namespace
}  // namespace tierflow::io
