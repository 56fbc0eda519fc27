// Which units on demand stay: decisions by how much they were used, and by their numbers where that is equal.
#include "swap/unit_use.h"

#include <gtest/gtest.h>

#include "swap/device_rings.h"

namespace tierflow::swap {
namespace {

// A stage with six units on demand, and one after it with two others.
Layout layout() {
  const std::vector<UnitShape> units(10, {.name = "unit", .groups = {{.trainable = false, .elements = 4096}}});
  return {units, {{.units = {0}, .on_demand = {1, 2, 3, 4, 5, 6}}, {.units = {7}, .on_demand = {8, 9}}}, kChunkQuantum};
}

TEST(UnitUse, OfLongAgoCountsLittle) {
  const Layout shapes = layout();
  UnitUse use(shapes);
  EXPECT_TRUE(use.of(1) == 0 && use.of(2) == 0);
  for (int visit = 0; visit < 3; ++visit) use.count(0, {1});
  use.count(0, {2});
  EXPECT_GT(use.of(1), use.of(2));
  const std::uint64_t before = use.of(1);
  use.count(1, {8});  // of another stage
  EXPECT_EQ(use.of(1), before);
  for (int visit = 0; visit < 20; ++visit) use.count(0, {3});
  use.count(0, {2});
  EXPECT_LT(use.of(1), use.of(2));
}

TEST(UnitCache, KeepsWhatIsWorthMost) {
  const Layout shapes = layout();
  Arrangement arrangement;
  arrangement.cached_units = 2;
  UnitCache cache(shapes, arrangement);
  std::vector<std::uint64_t> worth = {0, 5, 3, 3, 4, 0, 9};
  const auto worth_of = [&](int unit) { return worth[unit]; };
  EXPECT_EQ(cache.find(1), -1);
  EXPECT_EQ(cache.admit(5, worth_of), 0);  // worth nothing, but there is room
  EXPECT_EQ(cache.admit(1, worth_of), 1);
  EXPECT_EQ(cache.admit(2, worth_of), 0);
  EXPECT_EQ(cache.find(5), -1);
  EXPECT_EQ(cache.find(2), 0);
  EXPECT_EQ(cache.admit(3, worth_of), -1);  // as much as that of what is there
  EXPECT_EQ(cache.admit(4, worth_of), 0);
  worth[1] = 4;
  EXPECT_EQ(cache.admit(6, worth_of), 0);  // of two equal ones the higher number gives way
  EXPECT_EQ(cache.find(1), 1);
  cache.drop(6);
  cache.drop(6);
  EXPECT_EQ(cache.find(6), -1);
  EXPECT_EQ(cache.admit(5, worth_of), 0);
  arrangement.cached_units = 0;
  EXPECT_EQ(UnitCache(shapes, arrangement).admit(1, worth_of), -1);
}

class UsedRing : public ::testing::Test {
 protected:
  int place_of(int unit, std::uint64_t bytes = 40) {
    gone_.clear();
    const std::uint64_t begin = ring_.allocate(bytes, use_, gone_);
    if (begin == kNowhere) return -1;
    ring_.add(unit, begin, bytes);
    ring_.release(unit);
    return static_cast<int>(begin);
  }

  const Layout layout_ = layout();
  UnitUse use_{layout_};
  WeightRing ring_{1000, 120};
  std::vector<int> gone_;
};

TEST_F(UsedRing, WhatIsUsedLeastGivesWay) {
  use_.count(0, {1, 2});
  use_.count(0, {1, 3});
  EXPECT_EQ(place_of(1), 1000);
  EXPECT_EQ(place_of(2), 1040);
  EXPECT_EQ(place_of(3), 1080);
  EXPECT_TRUE(gone_.empty());
  EXPECT_EQ(place_of(4), 1040);  // 2 is used less than 1
  EXPECT_EQ(gone_, std::vector{2});
  EXPECT_EQ(ring_.find(2), kNowhere);
  EXPECT_EQ(place_of(5), 1080);  // 4 came last
  EXPECT_EQ(gone_, std::vector{3});
  EXPECT_EQ(place_of(6), 1040);  // now 5 did
  EXPECT_EQ(gone_, std::vector{4});
  EXPECT_EQ(ring_.find(1), 1000U);
  ring_.hold(5);
  EXPECT_EQ(place_of(2, 80), 1000);  // there is no other such room
  EXPECT_EQ(gone_, (std::vector{1, 6}));
  EXPECT_EQ(place_of(3, 81), -1);
}

TEST_F(UsedRing, OfEqualUseTheHighestNumberGivesWay) {
  for (const int unit : {3, 1, 2}) place_of(unit);
  EXPECT_EQ(place_of(4), 1000);
  EXPECT_EQ(gone_, std::vector{3});
  EXPECT_EQ(place_of(5), 1080);
  EXPECT_EQ(gone_, std::vector{2});
  EXPECT_EQ(ring_.find(1), 1040U);
}

}  // namespace
}  // namespace tierflow::swap
