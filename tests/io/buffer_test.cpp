#include "io/buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace tierflow::io {
namespace {

int released = 0;
void count_release(std::byte*, std::size_t, void*) noexcept {
  ++released;
}

TEST(BufferTest, IsAlignedZeroedAndItsOwn) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{4096}, std::size_t{9 << 20}}) {
    const Buffer buffer = allocate_buffer(size);
    ASSERT_TRUE(buffer);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 4096, 0U);
    EXPECT_TRUE(
        std::all_of(buffer.bytes().begin(), buffer.bytes().end(), [](std::byte b) { return b == std::byte{}; }));
  }
  EXPECT_FALSE(allocate_buffer(0));
  EXPECT_FALSE(allocate_buffer(std::size_t{1} << 62));  // refused, not thrown
}

TEST(BufferTest, GivesItsPagesBack) {
  Buffer buffer = allocate_buffer(std::size_t{1} << 20);
  void* const data = buffer.data();
  unsigned char resident = 0;
  ASSERT_EQ(mincore(data, 4096, &resident), 0);
  buffer.reset();
  EXPECT_EQ(mincore(data, 4096, &resident), -1);
  EXPECT_EQ(errno, ENOMEM);
}

// Nor does a child's end take away what it has at these addresses since.
TEST(BufferTest, AForkedChildDoesNotGetMemoryOfThisProcess) {
  Buffer buffer = allocate_buffer_of_this_process(8192);
  std::fill_n(buffer.data(), 8192, std::byte{7});
  const pid_t child = fork();
  if (child == 0) {
    unsigned char resident[2] = {};  // a byte for each page
    if (mincore(buffer.data(), 8192, resident) == 0) _exit(1);
    void* const own = mmap(buffer.data(), 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    buffer.reset();
    _exit(mincore(own, 8192, resident) == 0 ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::all_of(buffer.bytes().begin(), buffer.bytes().end(), [](std::byte b) { return b == std::byte{7}; }));
  std::byte* const data = buffer.data();
  buffer.reset();
  unsigned char resident = 0;
  EXPECT_EQ(mincore(data, 4096, &resident), -1);
}

TEST(BufferTest, IsReleasedOnceByItsLastHolder) {
  released = 0;
  std::byte memory[8];
  {
    Buffer first(memory, sizeof memory, count_release, nullptr);
    Buffer second(std::move(first));
    EXPECT_FALSE(first);
    EXPECT_EQ(first.size(), 0U);
    Buffer third;
    third = std::move(second);
    EXPECT_FALSE(second);
    EXPECT_EQ(second.size(), 0U);
    EXPECT_EQ(third.size(), 8U);
    Buffer& same = third;
    third = std::move(same);
    EXPECT_EQ(third.data(), memory);
    EXPECT_EQ(released, 0);
    third = Buffer(memory, 4, count_release, nullptr);  // lets go of what it held
    EXPECT_EQ(released, 1);
  }
  EXPECT_EQ(released, 2);
}

TEST(BufferTest, PartsKeepTheirSlab) {
  released = 0;
  std::byte memory[64];
  auto slab = std::make_shared<const Buffer>(memory, sizeof memory, count_release, nullptr);
  Buffer a = part_of(slab, slab->bytes().first(16)), b = part_of(slab, slab->bytes().last(16));
  EXPECT_EQ(b.data(), memory + 48);
  EXPECT_EQ(b.size(), 16U);
  slab.reset();
  a.reset();
  EXPECT_EQ(released, 0);
  b.reset();
  EXPECT_EQ(released, 1);
}

TEST(BufferTest, OneAllocationGivesManyBuffersOnPagesOfTheirOwn) {
  std::vector<Buffer> buffers = allocate_buffers(3, 5000);
  ASSERT_EQ(buffers.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(buffers[i].size(), 5000U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers[i].data()) % 4096, 0U);
    EXPECT_EQ(buffers[i].data() - buffers[0].data(), static_cast<std::ptrdiff_t>(i * 8192));
  }
  buffers.erase(buffers.begin(), buffers.begin() + 2);
  std::fill_n(buffers[0].data(), 5000, std::byte{7});  // the others' end is not its own
  EXPECT_TRUE(allocate_buffers(std::size_t{1} << 20, std::size_t{1} << 40).empty());
}

}  // namespace
}  // namespace tierflow::io
