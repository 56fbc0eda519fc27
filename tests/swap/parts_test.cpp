// Plans that are handed over in parts: the same tasks, the same proof, the same clock.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "swap/arrange.h"
#include "swap/check.h"
#include "swap/planner.h"
#include "swap/simulator.h"

namespace tierflow::swap {
namespace {

// Layers of 32 chunks, streamed; steps of some thousand tasks.
class PlanInParts : public ::testing::Test {
 protected:
  PlanInParts() : layout_(shapes(), stages(), kChunkQuantum) {
    arrangement_ = arrange(layout_, {.host_budget = 3 << 20, .device_budget = 64 << 20, .micro_batches = 100}).value();
    rates_.machine = {
        .disk_read = 1e9, .disk_write = 5e8, .upload = 8e9, .cast = 1e9, .measure = 1e9, .compute_on_cores = false};
    rates_.update = {{"a", 1e9}};
    rates_.stages.assign(kLayers, {.forward = 1e-3, .backward = 3e-3, .head = 4e-3});
  }
  static std::vector<UnitShape> shapes() {
    return std::vector<UnitShape>(
        kLayers,
        {.name = "unit", .groups = {{.elements = 32 * kChunkQuantum, .state_bytes_element = 4, .precision = "a"}}});
  }
  static std::vector<StageShape> stages() {
    std::vector<StageShape> stages;
    for (int unit = 0; unit < kLayers; ++unit) stages.push_back({.units = {unit}, .carry_bytes = kSector});
    return stages;
  }

  static constexpr int kLayers = 8;
  Layout layout_;
  Arrangement arrangement_;
  Rates rates_;
};

TEST_F(PlanInParts, HasTheTasksOfTheWhole) {
  Planner whole(layout_, arrangement_), parted(layout_, arrangement_);
  std::vector<Plan> parts;
  parted.stream_parts_to([&](const Plan& part) { parts.push_back(part); });
  for (const bool pending : {false, true}) {
    parts.clear();
    const Plan plan = whole.train_step(pending);
    parts.push_back(parted.train_step(pending));
    ASSERT_GT(parts.size(), 2U);
    std::size_t at = 0;
    for (const Plan& part : parts) {
      EXPECT_EQ(part.first_id, plan.first_id + at);
      for (const Task& task : part.tasks) {
        ASSERT_LT(at, plan.tasks.size());
        const Task& same = plan.tasks[at++];
        ASSERT_EQ(task.kind, same.kind) << at;
        ASSERT_EQ(task.chunk, same.chunk) << at;
        ASSERT_EQ(task.bytes, same.bytes) << at;
        ASSERT_EQ(task.device_offset, same.device_offset) << at;
        ASSERT_EQ(task.dependencies, same.dependencies) << at;
        if (task.kind != TaskKind::compute) continue;
        const Visit &visit = part.visits.at(task.visit), &of_same = plan.visits.at(same.visit);
        ASSERT_EQ(visit.stage, of_same.stage) << at;
        ASSERT_EQ(visit.weights, of_same.weights) << at;
        ASSERT_EQ(visit.gradients, of_same.gradients) << at;
        ASSERT_EQ(visit.fresh_gradient, of_same.fresh_gradient) << at;
      }
    }
    EXPECT_EQ(at, plan.tasks.size());
  }
}

// What is wrong with one part is not forgotten with the next.
TEST_F(PlanInParts, IsProvedAsAWhole) {
  for (int damaged = -1; damaged < 3; ++damaged) {
    Planner planner(layout_, arrangement_);
    PlanChecker checker(layout_, arrangement_);
    int number = 0;
    planner.stream_parts_to([&](Plan part) {
      if (number++ == damaged) part.tasks.back().dependencies = {part.first_id + part.tasks.size()};
      checker.play(part);
    });
    checker.begin_step(false, false);
    const io::Error error = checker.finish(planner.train_step(false));
    ASSERT_GT(number, 2);
    EXPECT_EQ(error.detail.find("depends on a later task") != std::string::npos, damaged != -1) << error.detail;
  }
}

TEST_F(PlanInParts, TakesAsLongOnAClockThatPlayedSomethingElse) {
  std::vector<double> seconds, computing;
  Simulator used(layout_, rates_);
  used.append(Planner(layout_, arrangement_).train_step(false));
  used.finish_updates(3e-3);  // in the middle
  used.restart();
  Simulator fresh(layout_, rates_);
  for (Simulator* simulator : {&used, &fresh}) {
    Planner planner(layout_, arrangement_);
    if (simulator == &used) planner.stream_parts_to([&](const Plan& part) { simulator->append(part); });
    for (int step = 0; step < 3; ++step) {
      simulator->append(planner.train_step(step > 0));
      simulator->finish_updates();
    }
    seconds.push_back(simulator->now());
    computing.push_back(simulator->computing());
    EXPECT_FALSE(simulator->take_records().empty());
  }
  EXPECT_EQ(seconds[0], seconds[1]);
  EXPECT_EQ(computing[0], computing[1]);
  EXPECT_NEAR(computing[0], 3 * 100 * (7 * 1e-3 + 4e-3 + 7 * 3e-3), 1e-9);
}

}  // namespace
}  // namespace tierflow::swap
