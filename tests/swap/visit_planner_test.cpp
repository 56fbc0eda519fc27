// A client whose order is its own: random visits over a toy of integers, compared with the plain loop, under small
// budgets, delays and poison.
#include "swap/visit_planner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "tests/swap/visit_toy.h"

namespace tierflow::swap {
namespace {

struct Case {
  std::uint64_t host = 0, device = 0, chaos = 0;
  bool random_order = false;
  bool breaks_off = false;  // steps, at every visit
  bool async = false;       // computation is enqueued, and the client goes on
};

class VisitPlannerTest : public ::testing::TestWithParam<Case> {
 protected:
  VisitPlannerTest()
      : folder_(std::filesystem::current_path() / ("visit-test-" + std::to_string(::getpid()))),
        layout_(units(), {{.units = {0}}, {.units = {1}}, {.units = {2, 4}}, {.units = {3}}, {.units = {0}}},
                kChunkQuantum) {
    std::filesystem::create_directories(folder_);
  }
  ~VisitPlannerTest() override { std::filesystem::remove_all(folder_); }

  static std::vector<UnitShape> units() {
    std::vector<UnitShape> shapes;
    for (std::uint64_t elements : {150, 180, 200, 170, 2})
      shapes.push_back({.name = "unit" + std::to_string(shapes.size()),
                        .groups = {{.elements = elements * 1024, .state_bytes_element = 4, .precision = "a"}}});
    shapes[3].groups[0].trainable = false;
    shapes[1].groups.push_back({.trainable = false, .elements = 64 * 1024});
    return shapes;
  }

  std::filesystem::path folder_;
  Layout layout_;
};

TEST_P(VisitPlannerTest, AnyOrderHasTheBitsOfThePlainLoop) {
  const Case& budgets = GetParam();
  auto arrangement =
      arrange(layout_, {.host_budget = budgets.host, .device_budget = budgets.device, .storage = true, .sums = true});
  ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
  auto device = open_cpu_device({.chaos_seed = budgets.chaos, .async_compute = budgets.async});
  auto store = Store::create({.volume = {.folders = {folder_}, .allow_buffered = true, .allow_any_filesystem = true},
                              .scratch = {.gradient_sums = true}},
                             layout_);
  ASSERT_TRUE(store.ok()) << store.error().message();
  auto executor = Executor::create(*device, store.value().get(), layout_, *arrangement, {.chaos_seed = budgets.chaos});
  ASSERT_TRUE(executor.ok());
  std::vector<std::vector<std::uint16_t>> words;
  std::vector<std::vector<std::byte>> state;
  std::vector<std::vector<float>> sums(layout_.units().size());
  for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit) {
    words.emplace_back(layout_.unit_elements(unit));
    state.emplace_back(layout_.unit_elements(unit));
    for (std::uint64_t i = 0; i < words.back().size(); ++i) words.back()[i] = word_at(unit, i);
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = layout_.first_chunk(unit) + chunk.index;
      ASSERT_FALSE((*executor)->access(ExtentKind::hi, id, true, [&](std::span<std::byte> bytes) {
        std::copy_n(words.back().begin() + chunk.first, chunk.elements, reinterpret_cast<std::uint16_t*>(bytes.data()));
      }));
      if (!chunk.trainable) continue;
      ASSERT_FALSE((*executor)->access(ExtentKind::state, id, true, [](std::span<std::byte> bytes) {
        std::fill(bytes.begin(), bytes.end(), std::byte{0});
      }));
    }
  }

  VisitPlanner planner(layout_, *arrangement);
  const auto work = std::make_shared<Work>();
  std::minstd_rand random(7);
  int count = 0;
  const auto visit = [&](int stage, Pass pass, bool keep = false) {
    const auto& stage_units = layout_.stages()[stage].units;
    std::vector<bool> wanted;
    for (int unit : stage_units) wanted.push_back(pass == Pass::backward && layout_.gradient_bytes(unit) != 0);
    (*executor)->append(planner.visit({.stage = stage, .pass = pass, .gradients = wanted, .gradients_stay = keep}),
                        work);
    auto entered = (*executor)->enter(stage, pass, 0);
    ASSERT_TRUE(entered.ok()) << entered.error().message();
    ++count;
    device->enqueue(StreamId::compute, [&, at = *entered, visit = *entered->visit, wanted, number = count](auto&) {
      for (std::size_t position = 0; position < stage_units.size(); ++position) {
        const int unit = stage_units[position];
        const auto* seen = reinterpret_cast<const std::uint16_t*>(at.arena + visit.weights[position]);
        ASSERT_TRUE(std::equal(words[unit].begin(), words[unit].end(), seen)) << "stale weights of unit " << unit;
        if (!wanted[position]) continue;
        auto* sum = reinterpret_cast<float*>(at.arena + visit.gradients[position]);
        auto& expected = sums[unit];
        const bool first = expected.empty();
        if (first) expected.assign(layout_.gradient_bytes(unit) / 4, 0.0F);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          // The device's sum starts at what a visit brings, which bf16 holds exactly.
          const float brings = value_of(rounded(gradient_at(words[unit][i], number, i)), 0);
          sum[i] = visit.fresh_gradient[position] ? brings : sum[i] + brings;
          expected[i] += brings;
        }
      }
    });
    ASSERT_FALSE((*executor)->leave());
  };
  const auto computed = [&] { ASSERT_FALSE(device->synchronize(device->record(StreamId::compute))); };
  const auto step = [&] {
    computed();
    std::vector<int> owed;
    for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit) {
      if (planner.gradients_of(unit) == 0) continue;
      owed.push_back(unit);
      for (std::size_t i = 0; i < sums[unit].size(); ++i) apply(words[unit][i], rounded(sums[unit][i]), state[unit][i]);
      sums[unit].clear();
    }
    ASSERT_FALSE((*executor)->finish_updates());
    (*executor)->append(planner.owe(owed), work);
  };
  const int stages = static_cast<int>(layout_.stages().size());
  const auto drop_all = [&] {
    computed();
    for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit) {
      planner.drop(unit);
      EXPECT_EQ(planner.gradients_of(unit), 0);
      sums[unit].clear();
    }
  };
  // A step of which `visits` happen, each for several micro-batches in a row, and then the client gives up: after the
  // last one's first or second micro-batch, whose gradient stays on the device.
  const auto break_off = [&](int visits, int micro_batches) {
    for (int stage = 0; stage < stages; ++stage) visit(stage, Pass::forward);
    for (int i = 0; i < visits; ++i) {
      const int stage = stages - 1 - i;
      for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch)
        visit(stage, Pass::backward, i + 1 == visits || micro_batch + 1 < micro_batches);
    }
    const auto& last = layout_.stages()[stages - visits].units;
    EXPECT_GE(planner.gradients_of(last.front()), layout_.gradient_bytes(last.front()) != 0 ? 1 : 0);
    drop_all();
    EXPECT_FALSE(planner.has_open_gradients());
  };
  for (int round = 0; round < 4; ++round) {
    for (int visits = 1; budgets.breaks_off && visits <= stages; ++visits) {
      break_off(visits, 1 + round % 2);
      // The first visit of the step that follows is sometimes the one that was broken off.
      if (visits % 2 == 0) visit(stages - visits, Pass::backward);
      if (HasFatalFailure()) return;
    }
    if (budgets.breaks_off && round % 2 == 1) drop_all();
    for (int pass = 0; pass < 3; ++pass) {
      if (budgets.random_order) {
        for (int i = 0; i < 12; ++i)
          visit(static_cast<int>(random() % stages), random() % 2 == 0 ? Pass::forward : Pass::backward);
        continue;
      }
      for (int stage = 0; stage < stages; ++stage) visit(stage, Pass::forward);
      for (int stage = stages - 1; stage >= 0; --stage) visit(stage, Pass::backward);
    }
    if (round == 2) {  // dropped gradients leave no trace
      drop_all();
      visit(1, Pass::backward, /*keep=*/true);
      visit(1, Pass::backward, /*keep=*/false);
      EXPECT_EQ(planner.gradients_of(1), 1);
    }
    step();
  }
  for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit)
    (*executor)->append(planner.apply_owed(unit), work);
  ASSERT_FALSE((*executor)->drain());
  for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit)
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = layout_.first_chunk(unit) + chunk.index;
      ASSERT_FALSE((*executor)->access(ExtentKind::hi, id, false, [&](std::span<std::byte> bytes) {
        EXPECT_TRUE(std::equal(words[unit].begin() + chunk.first, words[unit].begin() + chunk.first + chunk.elements,
                               reinterpret_cast<const std::uint16_t*>(bytes.data())))
            << "unit " << unit;
      }));
    }
  if (budgets.random_order) {
    EXPECT_GT(planner.departures(), 20U);
  } else if (!budgets.breaks_off) {
    EXPECT_LE(planner.departures(), 2U);  // around the two visits that repeat one
  }
  executor->reset();
  store.value()->remove_files();
}

INSTANTIATE_TEST_SUITE_P(
    Budgets, VisitPlannerTest,
    ::testing::Values(
        Case{.host = 64 << 20, .device = 64 << 20}, Case{.host = 3 << 20, .device = 2 << 20},
        Case{.host = 3 << 20, .device = 3 << 20, .random_order = true},
        Case{.host = 64 << 20, .device = 64 << 20, .breaks_off = true},
        Case{.host = 3 << 20, .device = 2 << 20, .chaos = 3, .breaks_off = true},
        Case{.host = 3 << 20, .device = 2 << 20, .async = true},
        Case{.host = 64 << 20, .device = 2 << 20, .chaos = 4, .async = true},
        Case{.host = 3 << 20, .device = 3 << 20, .chaos = 6, .random_order = true, .breaks_off = true, .async = true},
        Case{.host = 2 << 20, .device = 1300 << 10, .chaos = 5},
        Case{.host = 4 << 20, .device = 2 << 20, .chaos = 9, .random_order = true}));

// Units that share a stage: one is dropped, the other's gradient stays what it was.
TEST(VisitPlannerDrop, LeavesTheOtherUnitsOfTheStage) {
  std::vector<UnitShape> units;
  for (int unit = 0; unit < 3; ++unit)
    units.push_back({.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}});
  const Layout layout(std::move(units), {{.units = {0}}, {.units = {1, 2}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  for (const int dropped : {1, 2}) {
    VisitPlanner planner(layout, arrangement);
    const VisitRequest request{.stage = 1, .pass = Pass::backward, .gradients = {true, true}, .gradients_stay = true};
    planner.visit(request);
    EXPECT_TRUE(planner.has_open_gradients());
    EXPECT_EQ(planner.gradients_of(0), 0);
    planner.drop(0);  // has none
    planner.drop(dropped);
    EXPECT_TRUE(planner.has_open_gradients());
    EXPECT_EQ(planner.gradients_of(dropped), 0);
    EXPECT_EQ(planner.gradients_of(3 - dropped), 1);
    const Plan plan = planner.visit({.stage = 1, .pass = Pass::backward, .gradients = {true, true}});
    EXPECT_EQ(plan.visits.front().fresh_gradient, (std::vector<bool>{true, true}));
    EXPECT_EQ(planner.gradients_of(dropped), 1);
    EXPECT_EQ(planner.gradients_of(3 - dropped), 2);
    EXPECT_FALSE(planner.has_open_gradients());
  }
}

// The gradients that were kept leave ahead of a visit that wants others; the visit is still what was asked for.
TEST(VisitPlannerKeep, AVisitThatWantsOtherGradientsIsOfItsOwnPass) {
  std::vector<UnitShape> units;
  for (int unit = 0; unit < 2; ++unit)
    units.push_back({.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}});
  const Layout layout(std::move(units), {{.units = {0, 1}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  VisitPlanner planner(layout, arrangement);
  planner.visit({.stage = 0, .pass = Pass::head, .gradients = {true, true}, .gradients_stay = true});
  const Plan plan = planner.visit({.stage = 0, .pass = Pass::head, .gradients = {true, false}, .gradients_stay = true});
  const auto compute = std::ranges::find(plan.tasks, TaskKind::compute, &Task::kind);
  ASSERT_NE(compute, plan.tasks.end());
  EXPECT_EQ(compute->pass, Pass::head);
  EXPECT_EQ(planner.gradients_of(0), 2);
  EXPECT_EQ(planner.gradients_of(1), 1);
}

// Once the order is known, what the next stage lacks is on its way before it is asked for.
TEST(VisitPlannerPrefetch, ReadsAheadOfTheVisit) {
  constexpr int kStages = 6;
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < kStages; ++unit) {
    units.push_back({.name = "unit", .groups = {{.elements = 70 * 1024, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}});
  }
  const Layout layout(std::move(units), std::move(stages), kChunkQuantum);
  const std::uint64_t bytes = layout.gradient_bytes(0) / 2;  // of a unit's words
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 * bytes, .sums = true}).value();
  ASSERT_LT(arrangement.weight_ring, kStages * bytes);
  VisitPlanner planner(layout, arrangement);
  for (int visit = 0; visit < 4 * kStages; ++visit) {
    const Plan plan = planner.visit({.stage = visit % kStages, .gradients = {false}});
    if (visit < 2 * kStages) continue;
    int own = 0, next = 0;
    for (const Task& task : plan.tasks) {
      if (task.kind != TaskKind::upload_hi) continue;
      const int unit = layout.chunks()[task.chunk].unit;
      own += unit == visit % kStages ? 1 : 0;
      next += unit == visit % kStages ? 0 : 1;
    }
    EXPECT_EQ(own, 0) << visit;
    EXPECT_GT(next, 0) << visit;
  }
}

// A client that takes a step early or late has no other order because of it.
TEST(VisitPlannerHabits, AStepIsNoDeparture) {
  const std::vector<UnitShape> units(
      3, {.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}});
  const Layout layout(units, {{.units = {0}}, {.units = {1}}, {.units = {2}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  VisitPlanner planner(layout, arrangement);
  const auto visits = [&](const std::vector<int>& stages) {
    for (const int stage : stages) planner.visit({.stage = stage, .gradients = {false}});
  };
  for (int round = 0; round < 3; ++round) {
    visits({0, 1, 2});
    planner.owe({});
  }
  visits({0, 1, 2, 0});  // where the step came
  visits({1});
  planner.owe({});  // where the third stage came
  EXPECT_EQ(planner.departures(), 0U);
  visits({0, 2});
  EXPECT_EQ(planner.departures(), 1U);
}

// As a stage is visited for one micro-batch after the other, however many there are.
TEST(VisitPlannerHabits, VisitsOfOneStageInARowAreOne) {
  const std::vector<UnitShape> units(3, {.name = "unit", .groups = {{.trainable = false, .elements = 4096}}});
  const Layout layout(units, {{.units = {0}}, {.units = {1}}, {.units = {2}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .train = false}).value();
  VisitPlanner planner(layout, arrangement);
  for (const int stage : {0, 1, 2, 0, 0, 1, 2, 2, 2, 0, 1, 1, 2, 0, 0, 0, 1})
    planner.visit({.stage = stage, .pass = Pass::evaluate, .gradients = {false}});
  EXPECT_EQ(planner.departures(), 0U);
}

TEST(VisitPlannerPrefetch, FetchesAsManyVisitsAheadAsAStepDoes) {
  constexpr int kStages = 8;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < kStages; ++unit) stages.push_back({.units = {unit}});
  const Layout layout(
      std::vector<UnitShape>(kStages, {.name = "unit", .groups = {{.trainable = false, .elements = 4096}}}), stages,
      kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .train = false}).value();
  VisitPlanner planner(layout, arrangement);
  const auto visit = [&](int stage) {
    return planner.visit({.stage = stage, .pass = Pass::evaluate, .gradients = {false}});
  };
  for (int order = 0; order < 3 * kStages; ++order) visit(order % kStages);
  for (int unit = 0; unit < kStages; ++unit) planner.changed(unit);
  // The visits between are fetched already, and come again at their own time.
  std::vector<int> fetched;
  for (const Task& task : visit(0).tasks)
    if (task.kind == TaskKind::upload_hi) fetched.push_back(layout.chunks()[task.chunk].unit);
  EXPECT_EQ(fetched, (std::vector<int>{0, kLookahead}));
}

// What takes a gradient off the device serves the visit that made it, though another one comes.
TEST(VisitPlannerKeep, AGradientThatStayedLeavesAsItsOwnStages) {
  constexpr int kStages = 6;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < kStages; ++unit) stages.push_back({.units = {unit}});
  const Layout layout(
      std::vector<UnitShape>(
          kStages, {.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}}),
      stages, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  VisitPlanner planner(layout, arrangement);
  int taken = 0;
  for (int round = 0; round < 3; ++round) {  // from the second one on what comes next is fetched ahead
    planner.visit({.stage = 0, .pass = Pass::backward, .gradients = {true}, .gradients_stay = true});
    for (int stage = 1; stage < kStages; ++stage)
      for (const Task& task : planner.visit({.stage = stage, .gradients = {false}}).tasks) {
        if (task.kind != TaskKind::download_gradient && task.kind != TaskKind::measure) continue;
        ++taken;
        EXPECT_EQ(task.stage, 0);
        EXPECT_EQ(task.pass, Pass::backward);
      }
    planner.drop(0);
  }
  EXPECT_EQ(taken, 2 * 3);
}

// The weights that the first visit behind a step takes are on their way when the step ends.
TEST(VisitPlannerPrefetch, WhatFollowsAStepComesWithIt) {
  constexpr int kStages = 6;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < kStages; ++unit) stages.push_back({.units = {unit}});
  const Layout layout(
      std::vector<UnitShape>(
          kStages, {.name = "unit", .groups = {{.elements = 70 * 1024, .state_bytes_element = 4, .precision = "a"}}}),
      stages, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 * layout.unit_word_bytes(0), .sums = true}).value();
  VisitPlanner planner(layout, arrangement);
  for (int round = 0; round < 3; ++round) {
    for (int stage = 0; stage < kStages; ++stage)
      for (const Task& task : planner.visit({.stage = stage, .gradients = {false}}).tasks)
        if (task.kind == TaskKind::upload_hi) {
          EXPECT_GE(layout.chunks()[task.chunk].unit, stage) << "it would be stale when the step has been taken";
        }
    EXPECT_EQ(std::ranges::count(planner.owe({}).tasks, TaskKind::upload_hi, &Task::kind) != 0, round > 0) << round;
  }
}

}  // namespace
}  // namespace tierflow::swap
