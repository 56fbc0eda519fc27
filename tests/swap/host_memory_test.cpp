// The host budget is hard: what a run takes is what `arrange` counted, whatever the sizes, and no buffer crosses the
// border of two registrations.
#include "swap/host_memory.h"

#include <gtest/gtest.h>

#include <numeric>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/pinning.h"
#include "tests/support/forwarding_device.h"

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kMiB = 1 << 20, kGiB = 1 << 30;

// A model of these shapes in the way the runtime cuts one: a table in tiles, blocks in two halves.
Layout model(int blocks, std::uint64_t attention, std::uint64_t mlp, std::uint64_t tile, int tiles, std::uint64_t carry,
             std::uint64_t chunk_elements) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  const auto stage = [&](std::uint64_t elements, bool needs_weights) {
    units.push_back({.name = "unit",
                     .groups = {{.elements = round_up(elements, kElementsPad),
                                 .state_bytes_element = 4,
                                 .state_bytes_block = 8,
                                 .precision = "a"}}});
    stages.push_back({.units = {static_cast<int>(units.size()) - 1},
                      .backward_needs_weights = needs_weights,
                      .carry_bytes = stages.empty() ? 0 : carry});
  };
  for (int i = 0; i < tiles; ++i) stage(tile, false);
  for (int i = 0; i < blocks; ++i) {
    stage(attention, true);
    stage(mlp, true);
  }
  for (int i = 0; i < tiles; ++i) stage(tile, true);
  return Layout(std::move(units), std::move(stages), chunk_elements);
}

void expect_exact(const Layout& layout, const Arrangement& arrangement, std::uint64_t budget) {
  std::vector<std::size_t> sizes;
  for (const HostBuffer& buffer : arrangement.host_buffers(layout)) {
    ASSERT_EQ(buffer.bytes % kSector, 0U);
    ASSERT_GT(buffer.bytes, 0U);
    sizes.push_back(buffer.bytes);
  }
  const std::uint64_t all = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
  EXPECT_EQ(all, arrangement.host_bytes(layout));
  EXPECT_LE(all, budget);
  const std::vector<std::size_t> registrations = registrations_for(sizes);
  EXPECT_EQ(std::accumulate(registrations.begin(), registrations.end(), std::uint64_t{0}), all);
  // Every border of a registration is one of a buffer, or inside of one larger than a registration.
  std::size_t buffer = 0;
  std::uint64_t at = 0, begin = 0;
  for (const std::size_t size : registrations) {
    ASSERT_LE(size, kRegistration);
    ASSERT_EQ(size % kSector, 0U);
    at += size;
    while (buffer < sizes.size() && begin + sizes[buffer] <= at) begin += sizes[buffer++];
    if (begin == at) continue;
    ASSERT_GT(sizes[buffer], kRegistration) << "a buffer of " << sizes[buffer] << " is crossed";
    ASSERT_EQ((at - begin) % kRegistration, 0U);
  }
}

TEST(HostMemory, OfA405BIsWhatTheBudgetCounts) {
  // Llama 3.1 405B: 126 blocks of 16384 x 53248, heads of 128 with 8 for keys and values, 128256 tokens in 16 tiles.
  const std::uint64_t attention = 2ULL * 16384 * 16384 + 2ULL * 16384 * 1024 + 16384,
                      mlp = 3ULL * 16384 * 53248 + 16384, tile = 8016ULL * 16384;
  for (const std::uint64_t carry : {128 * kMiB, 1536 * kMiB, 3 * kGiB + kSector})
    for (const std::uint64_t chunk : {8ULL << 20, 32ULL << 20}) {
      const Layout layout = model(126, attention, mlp, tile, 16, carry, chunk);
      for (const std::uint64_t host : {24ULL, 64ULL, 100ULL, 512ULL, 1900ULL, 5000ULL})
        for (const bool staged : {true, false}) {
          const auto arranged = arrange(
              layout, {.host_budget = host * kGiB, .device_budget = 80 * kGiB, .micro_batches = 16, .staged = staged});
          if (!arranged.ok()) {
            EXPECT_EQ(host, 24U) << arranged.error().message();  // slots of 3 GiB need more
            continue;
          }
          expect_exact(layout, arranged.value(), host * kGiB);
          if (::testing::Test::HasFatalFailure()) return;
        }
    }
}

TEST(HostMemory, OfOddSizesAsWell) {
  // A carry that is no multiple of a sector: what is saved of it is rounded up, and so is the slot that it passes.
  const Layout layout = model(4, 300 * 1024, 500 * 1024, 200 * 1024, 1, 500'001, kChunkQuantum);
  int exact = 0, slots = 0;
  for (std::uint64_t kibibytes = 900; kibibytes < 40'000; kibibytes += 777) {
    const auto arranged = arrange(layout, {.host_budget = kibibytes << 10,
                                           .device_budget = 6700 << 10,
                                           .swapped_bytes = std::vector<std::uint64_t>(10, 9000),
                                           .swap_to_host = static_cast<int>(kibibytes % 2),
                                           .swap_to_storage = static_cast<int>(kibibytes % 2),
                                           .micro_batches = 3});
    if (!arranged.ok()) continue;
    ++exact;
    slots += arranged.value().slots != 0 && arranged.value().saved_on_host() != 0 ? 1 : 0;
    EXPECT_EQ(arranged.value().slot_bytes % kSector, 0U);
    expect_exact(layout, arranged.value(), kibibytes << 10);
  }
  EXPECT_GT(exact, 30);
  EXPECT_GT(slots, 10);
}

TEST(HostMemory, BuffersLieOneAfterTheOther) {
  const auto device = open_cpu_device();
  const std::vector<std::size_t> sizes{kSector, 3 * kSector, 2 * kSector};
  auto memory = HostMemory::create(sizes, *device);
  ASSERT_TRUE(memory.ok());
  const std::byte* at = (*memory)->slab()->data();
  EXPECT_EQ((*memory)->slab()->size(), 6 * kSector);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ((*memory)->buffer(i).data(), at);
    EXPECT_EQ((*memory)->buffer(i).size(), sizes[i]);
    at += sizes[i];
  }
  ASSERT_EQ((*memory)->registrations().size(), 1U);
  EXPECT_EQ((*memory)->registrations()[0].size(), 6 * kSector);
  // What is lent outlives the memory.
  io::Buffer lent = (*memory)->lend((*memory)->buffer(1));
  memory.value().reset();
  lent.data()[0] = std::byte{1};
  EXPECT_EQ(lent.size(), 3 * kSector);
  EXPECT_TRUE(HostMemory::create({}, *device).ok());
}

// What a device pinned before it refused the rest must not stay registered when the memory is gone.
TEST(HostMemory, IsUnpinnedWhereOnlyPartOfItWasPinned) {
  struct Refusing final : testing::ForwardingDevice {
    std::string pin(std::span<const std::span<std::byte>>) override { return "no more"; }
    void unpin(std::span<std::byte> memory) noexcept override { unpinned.push_back(memory.data()); }
    std::vector<std::byte*> unpinned;
  };
  Refusing device;
  auto memory = HostMemory::create(std::vector<std::size_t>{kSector}, device);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ((*memory)->pin_note(), "no more");
  std::byte* const at = (*memory)->buffer(0).data();
  memory.value().reset();
  EXPECT_EQ(device.unpinned, std::vector<std::byte*>{at});
}

}  // namespace
}  // namespace tierflow::swap
