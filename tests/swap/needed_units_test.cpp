// Which units on demand are still on the device when they are needed again.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "swap/arrange.h"
#include "swap/visit_planner.h"

namespace tierflow::swap {
namespace {

// A stage with five units on demand, as many of which have room on the device as a test says.
class NeededUnits : public ::testing::Test {
 protected:
  void has_room_for(int units) {
    arrangement_ =
        arrange(layout_, {.host_budget = 8 << 20, .device_budget = 8 << 20, .storage = false, .train = false}).value();
    arrangement_.needed_ring = static_cast<std::uint64_t>(units) * layout_.unit_word_bytes(1);
    planner_ = std::make_unique<VisitPlanner>(layout_, arrangement_);
    visit();
  }
  void visit() { planner_->visit({.pass = Pass::evaluate, .gradients = {false}}); }
  // Whether it has to come.
  bool comes(int unit) {
    const auto plan = planner_->need({.units = {unit}, .gradients = {false}});
    EXPECT_TRUE(plan.ok());
    return std::ranges::count(Plan(plan.value()).tasks, TaskKind::upload_hi, &Task::kind) != 0;
  }

  const Layout layout_{std::vector<UnitShape>(6, {.name = "unit", .groups = {{.trainable = false, .elements = 4096}}}),
                       {{.units = {0}, .on_demand = {1, 2, 3, 4, 5}}},
                       kChunkQuantum};
  Arrangement arrangement_;
  std::unique_ptr<VisitPlanner> planner_;
};

TEST_F(NeededUnits, GiveWayBehindTheirPart) {
  has_room_for(2);
  for (const int unit : {1, 2, 3}) EXPECT_TRUE(comes(unit));
  EXPECT_FALSE(comes(2));
}
TEST_F(NeededUnits, StayUntilTheirPartIfItIsKnown) {
  has_room_for(2);
  EXPECT_TRUE(comes(1));
  visit();
  planner_->will_need({1, 2, 3});
  for (const int unit : {2, 3}) EXPECT_TRUE(comes(unit));
  EXPECT_FALSE(comes(1));
}
TEST_F(NeededUnits, GiveWayBehindThePartThatWasKnown) {
  has_room_for(2);
  for (const int unit : {1, 2}) EXPECT_TRUE(comes(unit));
  visit();
  planner_->will_need({1, 2});
  for (const int unit : {1, 2}) EXPECT_FALSE(comes(unit));
  EXPECT_TRUE(comes(3));
  EXPECT_FALSE(comes(2));
}
TEST_F(NeededUnits, GiveWayWhereTheVisitEndedWithoutTheirPart) {
  has_room_for(2);
  EXPECT_TRUE(comes(1));
  planner_->will_need({1});
  visit();
  for (const int unit : {2, 3}) EXPECT_TRUE(comes(unit));
  EXPECT_FALSE(comes(2));
}
TEST_F(NeededUnits, OfWhichItIsKnownAreUsed) {
  has_room_for(3);
  planner_->will_need({2});
  for (const int unit : {1, 2, 3, 4}) EXPECT_TRUE(comes(unit));
  EXPECT_FALSE(comes(2));
}

// The first unit is used most and stays on the device: its slot in RAM is for those that leave.
TEST_F(NeededUnits, WhatStaysOnTheDeviceGivesItsSlotAway) {
  has_room_for(3);
  arrangement_.hi_resident.assign(layout_.chunks().size(), false);
  arrangement_.word_buffers = 2;
  arrangement_.cached_units = 1;
  planner_ = std::make_unique<VisitPlanner>(layout_, arrangement_);
  for (int i = 0; i < 5; ++i) planner_->count_use(0, {1});
  planner_->count_use(0, {1, 2, 3, 4});
  visit();
  const auto is_read = [&](int unit) {
    const auto plan = planner_->need({.units = {unit}, .gradients = {false}});
    EXPECT_TRUE(plan.ok());
    return std::ranges::count(Plan(plan.value()).tasks, TaskKind::read_hi, &Task::kind) != 0;
  };
  for (const int unit : {1, 2, 3, 4, 2, 3}) EXPECT_TRUE(is_read(unit)) << unit;
  EXPECT_FALSE(is_read(4));
  EXPECT_FALSE(comes(1));
}

// A unit comes from its slot in RAM, unless something else wrote its words since.
TEST_F(NeededUnits, ComeFromStorageAgainWhereTheyChanged) {
  has_room_for(1);
  arrangement_.hi_resident.assign(layout_.chunks().size(), false);
  arrangement_.word_buffers = 2;
  arrangement_.cached_units = 5;
  planner_ = std::make_unique<VisitPlanner>(layout_, arrangement_);
  visit();
  const auto is_read = [&](int unit) {
    planner_->count_use(0, {unit});
    const auto plan = planner_->need({.units = {unit}, .gradients = {false}});
    EXPECT_TRUE(plan.ok());
    return std::ranges::count(Plan(plan.value()).tasks, TaskKind::read_hi, &Task::kind) != 0;
  };
  for (const int unit : {1, 2, 3}) EXPECT_TRUE(is_read(unit));
  EXPECT_FALSE(is_read(2));
  planner_->changed(3);
  EXPECT_TRUE(is_read(3));
  EXPECT_FALSE(is_read(1));
}

}  // namespace
}  // namespace tierflow::swap
