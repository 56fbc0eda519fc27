// Who lies where in the device's rings, byte by byte.
#include "swap/device_rings.h"

#include <gtest/gtest.h>

#include <tuple>

#include "swap/arrange.h"
#include "swap/fetcher.h"

namespace tierflow::swap {
namespace {

TEST(GradientRing, IsFilledToItsLastByteBeforeItBeginsAgain) {
  GradientRing ring(1000, 100);
  EXPECT_EQ(ring.allocate(60), 1000U);
  EXPECT_EQ(ring.allocate(40), 1060U);
  EXPECT_EQ(ring.allocate(50), 1000U);
  EXPECT_EQ(ring.allocate(51), 1000U);
  EXPECT_EQ(ring.allocate(49), 1051U);
  EXPECT_EQ(ring.allocate(100), 1000U);
}

TEST(WeightRing, IsFilledToItsLastByteBeforeItBeginsAgain) {
  WeightRing ring(1000, 100);
  for (const auto& [unit, bytes, begin] : {std::tuple{0, 60, 1000}, {1, 40, 1060}, {2, 30, 1000}}) {
    ASSERT_EQ(ring.allocate(bytes), static_cast<std::uint64_t>(begin));
    ring.add(unit, begin, bytes);
    EXPECT_EQ(ring.find(unit), static_cast<std::uint64_t>(begin));
    ring.release(unit);
  }
  EXPECT_EQ(ring.find(0), kNowhere);  // unit 2 lies over it
  EXPECT_EQ(ring.find(1), 1060U);
  EXPECT_EQ(ring.allocate(101), kNowhere);
}

TEST(WeightRing, WhatIsHeldStaysWhereItIs) {
  WeightRing ring(0, 100);
  ring.add(7, ring.allocate(40), 40);
  EXPECT_TRUE(ring.hold(7));
  ring.release(7);
  EXPECT_EQ(ring.allocate(70), kNowhere);  // one hold is left
  EXPECT_EQ(ring.allocate(60), 40U);
  ring.add(8, 40, 60);
  EXPECT_EQ(ring.allocate(1), kNowhere);
  ring.release(7, 2);  // more than there are
  ring.release(9);     // of a unit that is not there
  EXPECT_TRUE(ring.hold(7));
  ring.release(7);
  EXPECT_EQ(ring.allocate(40), 0U);
  EXPECT_FALSE(ring.hold(7));  // forgotten, its room was given away
  ring.invalidate(8);
  EXPECT_EQ(ring.find(8), kNowhere);
  EXPECT_EQ(ring.allocate(60), 40U);
  ring.add(3, 40, 60);
  ring.clear();
  EXPECT_EQ(ring.find(3), kNowhere);
  EXPECT_EQ(ring.allocate(10), 0U);
}

TEST(WeightRing, WhatHasAPlaceBehindItStays) {
  WeightRing ring(0, 100);
  ring.add(1, 100, 50);
  ring.release(1);
  EXPECT_EQ(ring.allocate(101), kNowhere);
  EXPECT_EQ(ring.allocate(100), 0U);
  ring.clear();
  EXPECT_EQ(ring.find(1), 100U);
  EXPECT_TRUE(ring.hold(1));
  ring.invalidate(1);
  EXPECT_EQ(ring.find(1), kNowhere);
}

// Regions that touch do not overlap.
TEST(WeightRing, ANeighbourIsNotInTheWay) {
  WeightRing ring(0, 100);
  ring.add(1, ring.allocate(30), 30);
  ring.add(2, ring.allocate(40), 40);
  ring.add(3, ring.allocate(30), 30);
  ring.release(2);
  EXPECT_EQ(ring.allocate(40), kNowhere);  // only the end and the beginning are tried
  ring.release(1);
  EXPECT_EQ(ring.allocate(30), 0U);
  EXPECT_EQ(ring.allocate(40), 30U);
  EXPECT_EQ(ring.find(3), 70U);
}

// What it held meanwhile is free again.
TEST(Fetches, OneThatFindsNoRoomHoldsNothing) {
  const std::vector<UnitShape> units(5, {.name = "unit", .groups = {{.trainable = false, .elements = 4096}}});
  const Layout layout(units, {{.units = {0}}, {.units = {0, 1}}, {.units = {2}}, {.units = {3, 4}}}, kChunkQuantum);
  Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .storage = false, .train = false}).value();
  arrangement.weight_ring = 2 * layout.unit_word_bytes(0);
  arrangement.word_places.clear();
  TaskEmitter emitter(layout, arrangement);
  Fetcher fetcher(layout, arrangement, emitter);
  const auto fetch = [&](int stage) {
    Visit visit{.stage = stage, .pass = Pass::evaluate};
    return fetcher.fetch(visit, /*forced=*/false);
  };
  EXPECT_TRUE(fetch(0));
  EXPECT_TRUE(fetch(2));
  EXPECT_FALSE(fetch(1));  // for its second unit
  fetcher.release({0, 2});
  EXPECT_TRUE(fetch(3));
}

}  // namespace
}  // namespace tierflow::swap
