// The cut of units into chunks, and what frozen groups leave out.
#include "swap/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "swap/store.h"

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kTrained = 5 * kElementsPad, kFrozen = 40 * kElementsPad;

UnitShape partly_frozen() {
  return {.name = "a",
          .groups = {{.elements = kTrained, .state_bytes_element = 4, .state_bytes_block = 8},
                     {.trainable = false, .elements = kFrozen, .state_bytes_element = 4}}};
}

TEST(Layout, FrozenGroupsHaveNoStateAndNoGradient) {
  const Layout layout({partly_frozen(), {.name = "b", .groups = {{.trainable = false, .elements = kFrozen}}}},
                      {{.units = {0}}, {.units = {1}}}, kChunkQuantum);
  EXPECT_EQ(layout.unit_elements(0), kTrained + kFrozen);
  EXPECT_EQ(layout.gradient_bytes(0), 4 * kTrained);
  EXPECT_EQ(layout.gradient_bytes(1), 0U);
  EXPECT_EQ(layout.trainable_chunks_of(0).size(), 1U);
  EXPECT_TRUE(layout.trainable_chunks_of(1).empty());
  for (const Chunk& chunk : layout.chunks()) EXPECT_EQ(chunk.state_bytes != 0, chunk.trainable);
}

TEST(Layout, MoreStateIsCutFiner) {
  const auto cut = [](std::uint32_t of_element, std::uint32_t of_block) {
    const GroupShape group{
        .elements = 8 * kChunkQuantum, .state_bytes_element = of_element, .state_bytes_block = of_block};
    const Layout layout({{.name = "a", .groups = {group}}}, {{.units = {0}}}, 4 * kChunkQuantum);
    return layout.chunks().front().elements / kChunkQuantum;
  };
  EXPECT_EQ(cut(4, 0), 4U);
  EXPECT_EQ(cut(4, 8), 4U);
  EXPECT_EQ(cut(4, 9), 3U);
  EXPECT_EQ(cut(8, 8), 2U);
  EXPECT_EQ(cut(100, 0), 1U);
}

TEST(Layout, WhatIsTrainableComesFirst) {
  UnitShape turned = partly_frozen();
  std::swap(turned.groups[0], turned.groups[1]);
  EXPECT_THROW(Layout({turned}, {{.units = {0}}}, kChunkQuantum), std::logic_error);
}

TEST(Layout, SparseGroupsAreCutAsTheySay) {
  const auto cut = [](std::uint64_t part, bool twice = false, bool frozen = false) {
    std::vector<StageShape> stages{{.units = {0}}};
    if (twice) stages.push_back({.units = {0}});
    return Layout({{.name = "a",
                    .groups = {{.elements = kElementsPad, .state_bytes_element = 4},
                               {.trainable = !frozen,
                                .elements = 3 * kChunkQuantum - kElementsPad,
                                .state_bytes_element = 10,
                                .sparse_elements = part}}}},
                  stages, 2 * kChunkQuantum);
  };
  for (const std::uint64_t part : {kSparseQuantum, 3 * kSparseQuantum, kChunkQuantum}) {
    const Layout layout = cut(part);
    EXPECT_EQ(layout.sparse_elements(), part);
    const std::span<const Chunk> all = layout.chunks_of(0);
    EXPECT_EQ(layout.sparse_chunks().size(), all.size() - 1);
    for (std::size_t i = 1; i < all.size(); ++i) {
      EXPECT_TRUE(all[i].sparse);
      EXPECT_EQ(all[i].first, kElementsPad + (i - 1) * part);
      EXPECT_EQ(all[i].elements, std::min(part, 3 * kChunkQuantum - all[i].first));
    }
  }
  EXPECT_EQ(cut(0).sparse_elements(), 0U);
  for (const std::uint64_t part : {kSparseQuantum - kElementsPad, kSparseQuantum + 1, kChunkQuantum + kSparseQuantum})
    EXPECT_THROW(cut(part), std::logic_error);
  EXPECT_THROW(cut(kSparseQuantum, /*twice=*/true), std::logic_error);
  EXPECT_THROW(cut(kSparseQuantum, false, /*frozen=*/true), std::logic_error);
}

// Of frozen chunks, storage has the words alone: neither state nor gradients nor their sums.
TEST(Layout, StorageHasOnlyTheWordsOfFrozenChunks) {
  const auto bytes = [](bool frozen, bool gradients) {
    std::vector<UnitShape> units{partly_frozen()};
    if (!frozen) units[0].groups.pop_back();
    const Layout layout(units, {{.units = {0}}}, kChunkQuantum);
    return Store::bytes_needed({.scratch = {.gradients = gradients, .gradient_sums = gradients}}, layout);
  };
  EXPECT_EQ(bytes(true, true) - bytes(false, true), bytes(true, false) - bytes(false, false));
  EXPECT_LT(bytes(true, true) - bytes(false, true), 2 * kFrozen + 2 * kSector);
}

}  // namespace
}  // namespace tierflow::swap
