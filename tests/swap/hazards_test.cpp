#include "swap/hazards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "swap/access.h"
#include "swap/arrange.h"
#include "swap/planner.h"
#include "swap/visit_planner.h"

namespace tierflow::swap {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Access device(std::uint64_t begin, std::uint64_t end, bool writes) {
  return {Space::device, begin, end, writes};
}
Access buffer(std::uint64_t index, bool writes) {
  return host_access({HostRef::Where::word_buffer, static_cast<int>(index)}, writes);
}

TEST(Hazards, ReadFollowsTheLastWrite) {
  HazardTracker tracker;
  EXPECT_THAT(tracker.add(0, Lane::update, {buffer(3, true)}), IsEmpty());
  EXPECT_THAT(tracker.add(1, Lane::update, {buffer(3, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(2, Lane::upload, {buffer(3, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(3, Lane::update, {buffer(4, false)}), IsEmpty());
}

TEST(Hazards, WriteFollowsWriteAndEveryReadSince) {
  HazardTracker tracker;
  tracker.add(0, Lane::update, {buffer(0, true)});
  tracker.add(1, Lane::update, {buffer(0, false)});
  tracker.add(2, Lane::upload, {buffer(0, false)});
  EXPECT_THAT(tracker.add(3, Lane::update, {buffer(0, true)}), ElementsAre(0, 1, 2));
  EXPECT_THAT(tracker.add(4, Lane::update, {buffer(0, false)}), ElementsAre(3));
}

TEST(Hazards, RangesMeetWhereTheyOverlap) {
  HazardTracker tracker;
  tracker.add(0, Lane::update, {device(0, 100, true)});
  tracker.add(1, Lane::update, {device(100, 200, true)});
  EXPECT_THAT(tracker.add(2, Lane::update, {device(50, 150, false)}), ElementsAre(0, 1));
  EXPECT_THAT(tracker.add(3, Lane::update, {device(0, 60, true)}), ElementsAre(0, 2));
  EXPECT_THAT(tracker.add(4, Lane::upload, {device(60, 100, false)}), ElementsAre(0));  // what task 3 left of task 0
  EXPECT_THAT(tracker.add(5, Lane::update, {device(120, 130, true)}), ElementsAre(1, 2));
  EXPECT_THAT(tracker.add(6, Lane::update, {device(0, 200, true)}), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(tracker.add(7, Lane::update, {device(199, 200, false)}), ElementsAre(6));
}

// A lane's reads of the same bytes are a chain: a write that waits for the last of them waits for all.
TEST(Hazards, AReadStandsForItsLanesReadsBefore) {
  HazardTracker tracker;
  tracker.add(0, Lane::upload, {device(0, 100, true)});
  EXPECT_THAT(tracker.add(1, Lane::compute, {device(0, 100, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(2, Lane::download, {device(20, 40, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(3, Lane::compute, {device(10, 30, false)}), ElementsAre(0, 1));
  EXPECT_THAT(tracker.add(4, Lane::update, {device(40, 60, true)}), ElementsAre(0, 1));  // what task 3 left of task 1
  EXPECT_THAT(tracker.add(5, Lane::update, {device(0, 10, true)}), ElementsAre(0, 1));
  EXPECT_THAT(tracker.add(6, Lane::update, {device(10, 30, true)}), ElementsAre(0, 2, 3));
}

TEST(Hazards, AReadOfABufferStandsForItsLanesReadsBefore) {
  HazardTracker tracker;
  tracker.add(0, Lane::upload, {buffer(0, true)});
  EXPECT_THAT(tracker.add(1, Lane::compute, {buffer(0, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(2, Lane::download, {buffer(0, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(3, Lane::compute, {buffer(0, false)}), ElementsAre(0, 1));
  EXPECT_THAT(tracker.add(4, Lane::update, {buffer(0, true)}), ElementsAre(0, 2, 3));
}

TEST(Hazards, RemembersRangesAndNotHowOftenTheyWereRead) {
  HazardTracker tracker;
  tracker.add(0, Lane::upload, {device(0, 1000, true), buffer(1, true)});
  const auto read_all = [&](TaskId from) {
    for (TaskId id = from; id < from + 300; ++id) {
      const Lane lane = id % 2 == 0 ? Lane::compute : Lane::download;
      tracker.add(id, lane, {device(id % 7 * 10, 500 + id % 5 * 100, false), buffer(id % 3, false)});
    }
    return tracker.records();
  };
  for (int round = 0; round < 20; ++round) EXPECT_LT(read_all(1 + 300 * round), 50U);
}

// Evaluations without end, over weights that stay on the device and over weights that are read each time: the last
// costs what the tenth did. Cost is what is remembered, which each access is compared with, and what tasks wait for.
Layout three_layers() {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 3; ++unit) {
    units.push_back({.name = "unit", .groups = {{.elements = 80 * 1024, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}, .carry_bytes = unit == 0 ? 0 : kSector});
  }
  return {units, stages, kChunkQuantum};
}

// Each of 10,000 rounds leaves as many records and waits for as many tasks as the tenth.
void expect_equal_rounds(const std::function<std::vector<Plan>()>& next_round) {
  HazardTracker tracker;
  std::size_t records = 0, dependencies = 0;
  for (int round = 0; round < 10'000; ++round) {
    std::size_t waits = 0;
    for (const Plan& plan : next_round()) {
      TaskId id = plan.first_id;
      for (const Task& task : plan.tasks) {
        ASSERT_EQ(tracker.add(id++, task.lane, task.accesses), task.dependencies);
        waits += task.dependencies.size();
      }
    }
    if (round == 10) {
      records = tracker.records();
      dependencies = waits;
    }
    if (round < 10) continue;
    ASSERT_LE(tracker.records(), records + 8) << round;
    ASSERT_LE(waits, dependencies + 8) << round;
  }
}

TEST(Hazards, TenThousandEvaluationsCostTheSameEach) {
  const Layout layout = three_layers();
  for (const std::uint64_t device_budget : {std::uint64_t{8} << 20, std::uint64_t{800} << 10}) {
    const Arrangement arrangement =
        arrange(layout, {.host_budget = 512 << 10, .device_budget = device_budget, .micro_batches = 1}).value();
    Planner planner(layout, arrangement);
    expect_equal_rounds([&] { return std::vector{planner.evaluate(1)}; });
  }
}

TEST(Hazards, TenThousandEvaluationsInTheClientsOrderCostTheSameEach) {
  const Layout layout = three_layers();
  for (const std::uint64_t device_budget : {std::uint64_t{8} << 20, std::uint64_t{1200} << 10}) {
    auto arrangement =
        arrange(layout, {.host_budget = 2 << 20, .device_budget = device_budget, .storage = true, .sums = true});
    ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
    VisitPlanner planner(layout, *arrangement);
    expect_equal_rounds([&] {
      std::vector<Plan> visits;
      for (int stage = 0; stage < 3; ++stage) visits.push_back(planner.visit({.stage = stage}));
      return visits;
    });
  }
}

// A layer without parameters has ranges of no bytes.
TEST(Hazards, NothingWaitsForNothing) {
  HazardTracker tracker;
  tracker.add(0, Lane::update, {device(0, 100, true)});
  EXPECT_THAT(tracker.add(1, Lane::compute, {device(50, 50, true)}), IsEmpty());
  EXPECT_THAT(tracker.add(2, Lane::update, {device(0, 100, true)}), ElementsAre(0));
}

TEST(Hazards, ATaskDoesNotWaitForItself) {
  HazardTracker tracker;
  EXPECT_THAT(tracker.add(0, Lane::update, {buffer(0, false), buffer(0, true)}), IsEmpty());
}

}  // namespace
}  // namespace tierflow::swap
