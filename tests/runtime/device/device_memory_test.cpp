// What torch may take of the host's memory, where that is the device: never more than the cap, and what is kept for
// reuse gives way.
#include "runtime/device/device_memory.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace tierflow {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

torch::Tensor taken(std::int64_t bytes) {
  return torch::empty({bytes}, torch::kUInt8);
}

class CappedMemory : public ::testing::Test {
 protected:
  CappedMemory() { memory_.release_kept(); }
  ~CappedMemory() override { memory_.set_cap(~std::uint64_t{0} / 2); }
  void leave(std::int64_t bytes) { memory_.set_cap(memory_.stats().held + static_cast<std::uint64_t>(bytes)); }
  std::int64_t held() const { return static_cast<std::int64_t>(memory_.stats().held); }
  std::int64_t used() const { return static_cast<std::int64_t>(memory_.stats().used); }

  DeviceMemory& memory_ = DeviceMemory::install();
};

TEST_F(CappedMemory, IsTakenToItsLastPage) {
  leave(4 * kMiB);
  const std::int64_t before = held();
  EXPECT_THROW(taken(4 * kMiB + 1), c10::OutOfMemoryError);
  const torch::Tensor all = taken(4 * kMiB);
  EXPECT_EQ(held(), before + 4 * kMiB);
  EXPECT_THROW(taken(kMiB), c10::OutOfMemoryError);
}

TEST_F(CappedMemory, WhatIsKeptGivesWay) {
  leave(9 * kMiB);
  const std::int64_t before = held();
  taken(8 * kMiB);
  EXPECT_EQ(held(), before + 8 * kMiB) << "freed, and kept for reuse";
  const torch::Tensor other = taken(9 * kMiB);
  EXPECT_EQ(held(), before + 9 * kMiB);
}

// One of about the same size is used again; a small one takes no large block.
TEST_F(CappedMemory, IsReusedWhereItIsNotWasted) {
  const std::int64_t before = held(), in_use = used();
  taken(8 * kMiB);
  {
    const torch::Tensor again = taken(8 * kMiB - 4096);
    EXPECT_EQ(held(), before + 8 * kMiB);
    EXPECT_EQ(used(), in_use + 8 * kMiB);
  }
  const torch::Tensor small = taken(kMiB);
  EXPECT_EQ(used(), in_use + kMiB);
  EXPECT_EQ(held(), before + 9 * kMiB);
}

}  // namespace
}  // namespace tierflow
