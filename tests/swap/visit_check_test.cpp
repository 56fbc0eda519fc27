// Plans for a client whose order is its own: random clients' are proved, damaged ones are refused.
#include "swap/visit_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <utility>

#include "swap/arrange.h"

namespace tierflow::swap {
namespace {

struct Planned {
  std::unique_ptr<Layout> layout;
  Arrangement arrangement;
  int units_per_need = 1;
};

// Units of a few chunks, some frozen, some shared by two stages, some on demand of one stage or two; budgets from the
// smallest that works to enough.
Planned random_arrangement(std::minstd_rand& random) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  const int count = 2 + static_cast<int>(random() % 5);
  for (int unit = 0; unit < count; ++unit) {
    units.push_back({.name = "unit",
                     .groups = {{.trainable = random() % 5 != 0,
                                 .elements = kElementsPad * (1 + random() % 120),
                                 .state_bytes_element = 4}}});
    if (random() % 4 == 0)
      units.back().groups.push_back({.trainable = false, .elements = kElementsPad * (1 + random() % 60)});
    stages.push_back({.units = {unit}});
  }
  stages[random() % stages.size()].units.push_back(count);
  units.push_back({.name = "small", .groups = {{.elements = kElementsPad, .state_bytes_element = 4}}});
  stages.push_back({.units = {0}});
  const int on_demand = static_cast<int>(random() % 4);
  for (int i = 0; i < on_demand; ++i) {
    const int unit = static_cast<int>(units.size());
    units.push_back({.name = "expert",
                     .groups = {{.trainable = random() % 5 != 0,
                                 .elements = kElementsPad * (1 + random() % 60),
                                 .state_bytes_element = 4}}});
    stages.front().on_demand.push_back(unit);
    if (random() % 2 == 0) stages[1].on_demand.push_back(unit);
  }
  Planned planned;
  planned.layout = std::make_unique<Layout>(std::move(units), std::move(stages), kChunkQuantum);
  for (std::uint64_t kibibytes = 512;; kibibytes += 256) {
    ArrangeRequest request{.host_budget = (kibibytes << 10) + random() % (4 << 20),
                           .device_budget = (kibibytes << 10) + random() % (4 << 20),
                           .sums = true,
                           .units_per_need = 1 + static_cast<int>(random() % 2)};
    auto result = arrange(*planned.layout, request);
    if (!result.ok()) continue;
    planned.arrangement = std::move(result).value();
    planned.units_per_need = request.units_per_need;
    return planned;
  }
}

// A client of no habits: what it does next is drawn. Each plan goes through `damage` before it is checked.
class Client {
 public:
  Client(const Planned& planned, std::minstd_rand& random)
      : layout_(*planned.layout),
        planner_(layout_, planned.arrangement),
        checker_(layout_, planned.arrangement),
        units_per_need_(planned.units_per_need),
        random_(random) {}

  io::Error act(const std::function<void(Plan&)>& damage = {}) {
    const auto damaged = [&](Plan plan) {
      if (damage) damage(plan);
      return plan;
    };
    const int units = static_cast<int>(layout_.units().size());
    switch (random_() % 13) {
      case 0:
        if (io::Error error = checker_.close(damaged(planner_.close()))) return error;
        return owe_some(damaged);
      case 1: {
        const int unit = static_cast<int>(random_() % units);
        return checker_.apply_owed(damaged(planner_.apply_owed(unit)), unit);
      }
      case 2: {
        // A client that breaks off a step drops what is on the device as well.
        if (random_() % 2 == 0)
          if (io::Error error = checker_.close(damaged(planner_.close()))) return error;
        const int unit = static_cast<int>(random_() % units);
        if (random_() % 4 == 0) {
          planner_.drop(unit);
          checker_.drop(unit);
        } else if (random_() % 4 == 0 && !planner_.owes(unit)) {
          planner_.changed(unit);
          checker_.changed(unit);
        }
        return {};
      }
      case 3:
        for (int unit = 0; unit < units; ++unit)
          if (io::Error error = checker_.apply_owed(damaged(planner_.apply_owed(unit)), unit)) return error;
        return checker_.commit(damaged(planner_.commit()));
      default:
        return visit(damaged);
    }
  }

 private:
  template <class Damaged>
  io::Error owe_some(const Damaged& damaged) {
    std::vector<int> owed;
    for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit)
      if (planner_.gradients_of(unit) != 0 && random_() % 4 != 0) owed.push_back(unit);
    return checker_.owe(damaged(planner_.owe(owed)), owed);
  }
  template <class Damaged>
  io::Error visit(const Damaged& damaged) {
    VisitRequest request{.stage = static_cast<int>(random_() % layout_.stages().size()),
                         .pass = random_() % 2 == 0 ? Pass::forward : Pass::backward};
    if (random_() % 3 != 0) request.stage = next_++ % static_cast<int>(layout_.stages().size());
    for (const int unit : layout_.stages()[request.stage].units)
      request.gradients.push_back(request.pass == Pass::backward && layout_.gradient_bytes(unit) != 0);
    request.gradients_stay = request.pass == Pass::backward && random_() % 3 == 0;
    if (io::Error error = checker_.visit(damaged(planner_.visit(request)), request)) return error;
    const std::vector<int>& on_demand = layout_.stages()[request.stage].on_demand;
    for (int need = static_cast<int>(random_() % 4); need > 0 && !on_demand.empty(); --need) {
      NeedRequest named;
      for (int i = static_cast<int>(random_() % units_per_need_); i >= 0; --i)
        if (const int unit = on_demand[random_() % on_demand.size()];
            std::ranges::find(named.units, unit) == named.units.end())
          named.units.push_back(unit);
      for (const int unit : named.units)
        named.gradients.push_back(request.pass == Pass::backward && layout_.gradient_bytes(unit) != 0 &&
                                  random_() % 4 != 0);
      if (io::Error error = checker_.need(damaged(planner_.need(named).value()), named)) return error;
    }
    return {};
  }

  const Layout& layout_;
  VisitPlanner planner_;
  VisitChecker checker_;
  const int units_per_need_;
  std::minstd_rand& random_;
  int next_ = 0;
};

TEST(VisitChecker, ProvesThousandsOfPlansOfRandomClients) {
  std::minstd_rand random(13);
  for (int round = 0; round < 1000; ++round) {
    const Planned planned = random_arrangement(random);
    Client client(planned, random);
    for (int act = 0; act < 60; ++act) {
      const io::Error error = client.act();
      ASSERT_FALSE(error) << "round " << round << " act " << act << ": " << error.message();
    }
  }
}

// Damages the first suitable task after a while; counts in how many runs that is noticed, then or later.
int noticed_in(TaskKind kind, const std::function<bool(Task&)>& damage, int runs, unsigned seed = 17,
               const std::function<bool(const Planned&, const Plan&, const Task&)>& suits = {}) {
  std::minstd_rand random(seed);
  int found = 0;
  for (int tried = 0; tried < runs;) {
    const Planned planned = random_arrangement(random);
    Client client(planned, random);
    bool done = false, error = false;
    for (int act = 0; act < 120 && !error; ++act)
      error = static_cast<bool>(client.act([&](Plan& plan) {
        for (Task& task : plan.tasks)
          if (!done && act > 20 && task.kind == kind && (!suits || suits(planned, plan, task))) done = damage(task);
      }));
    if (!done && error) return -1;  // of a plan that nobody damaged
    if (!done) continue;
    ++tried;
    found += error ? 1 : 0;
  }
  return found;
}

bool forget(Task& task) {
  return !std::exchange(task.dependencies, {}).empty();
}
bool rename_chunk(Task& task) {
  task.chunk = task.chunk == 0 ? 1 : 0;
  return true;
}

TEST(VisitCheckerControl, NoticesAMissingDependency) {
  for (const TaskKind kind :
       {TaskKind::compute, TaskKind::accumulate, TaskKind::update, TaskKind::download_gradient, TaskKind::commit})
    EXPECT_EQ(noticed_in(kind, forget, 10), 10) << task_name(kind);
}
TEST(VisitCheckerControl, NoticesACommitAheadOfAnUpdate) {
  std::minstd_rand random(19);
  for (int round = 0; round < 10; ++round) {
    const Planned planned = random_arrangement(random);
    const Layout& layout = *planned.layout;
    const int last = static_cast<int>(layout.stages().size()) - 2;  // has the unit that is always trained
    VisitPlanner planner(layout, planned.arrangement);
    VisitChecker checker(layout, planned.arrangement);
    std::vector<int> owed;
    for (int stage = 0; stage <= last; ++stage) {
      VisitRequest request{.stage = stage, .pass = Pass::backward};
      for (const int unit : layout.stages()[stage].units) {
        request.gradients.push_back(layout.gradient_bytes(unit) != 0);
        if (request.gradients.back()) owed.push_back(unit);
      }
      ASSERT_FALSE(checker.visit(planner.visit(request), request));
    }
    ASSERT_FALSE(checker.close(planner.close()));
    ASSERT_FALSE(checker.owe(planner.owe(owed), owed));
    ASSERT_TRUE(std::ranges::any_of(owed, [&](int unit) { return planner.owes(unit); }));
    EXPECT_TRUE(checker.commit(planner.commit()));
  }
}
TEST(VisitCheckerControl, NoticesAnotherChunk) {
  for (const TaskKind kind : {TaskKind::upload_hi, TaskKind::accumulate, TaskKind::update, TaskKind::measure})
    EXPECT_EQ(noticed_in(kind, rename_chunk, 10), 10) << task_name(kind);
}
TEST(VisitCheckerControl, NoticesAComputationThatIsNotOfItsVisit) {
  const auto rename = [](Task& task) {
    task.pass = task.pass == Pass::forward ? Pass::backward : Pass::forward;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::compute, rename, 10), 10);
}
TEST(VisitCheckerControl, NoticesASumTakenForAGradient) {
  EXPECT_EQ(noticed_in(
                TaskKind::accumulate,
                [](Task& task) {
                  task.first_sum = !task.first_sum;
                  return true;
                },
                10),
            10);
  EXPECT_EQ(
      noticed_in(
          TaskKind::update,
          [](Task& task) { return std::exchange(task.gradient_low, HostRef{}).where != HostRef::Where::none; }, 10),
      10);
}
TEST(VisitCheckerControl, NoticesAGradientThatIsNotAdded) {
  const auto leave_out = [](Task& task) {
    task.kind = TaskKind::measure;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::accumulate, leave_out, 10), 10);
  EXPECT_EQ(noticed_in(TaskKind::update, leave_out, 10), 10);
}
// The same of the tasks that a need has for its own units.
int noticed_in_needs(TaskKind kind, const std::function<bool(Task&)>& damage, int runs) {
  return noticed_in(kind, damage, runs, 23, [](const Planned& planned, const Plan& plan, const Task& task) {
    if (plan.visits.empty()) return false;
    const std::vector<int>& needed = plan.visits.front().needed;
    return !needed.empty() &&
           (task.kind == TaskKind::compute ||
            (task.chunk >= 0 && std::ranges::find(needed, planned.layout->chunks()[task.chunk].unit) != needed.end()));
  });
}

TEST(VisitCheckerControl, NoticesANeedThatIsNotWaitedFor) {
  for (const TaskKind kind : {TaskKind::compute, TaskKind::update, TaskKind::download_gradient})
    EXPECT_EQ(noticed_in_needs(kind, forget, 10), 10) << task_name(kind);
}
TEST(VisitCheckerControl, NoticesAnUpdateThatANeedForgets) {
  const auto leave_out = [](Task& task) {
    task = {.kind = TaskKind::measure,
            .lane = Lane::update,
            .chunk = task.chunk,
            .gradient = task.gradient,
            .dependencies = task.dependencies};
    return true;
  };
  EXPECT_EQ(noticed_in_needs(TaskKind::update, leave_out, 10), 10);
}
TEST(VisitCheckerControl, NoticesAStaleCopyOfANeededUnit) {
  std::minstd_rand random(29);
  for (int tried = 0; tried < 20;) {
    const Planned planned = random_arrangement(random);
    const Layout& layout = *planned.layout;
    const StageShape& stage = layout.stages().front();
    if (stage.on_demand.empty()) continue;
    ++tried;
    VisitPlanner planner(layout, planned.arrangement);
    VisitChecker checker(layout, planned.arrangement);
    const VisitRequest visit{.gradients = std::vector<bool>(stage.units.size(), false)};
    const NeedRequest need{.units = {stage.on_demand.front()}, .gradients = {false}};
    ASSERT_FALSE(checker.visit(planner.visit(visit), visit));
    ASSERT_FALSE(checker.need(planner.need(need).value(), need));
    ASSERT_FALSE(checker.need(planner.need(need).value(), need));
    checker.changed(need.units.front());  // the planner is not told
    EXPECT_TRUE(checker.need(planner.need(need).value(), need));
  }
}
TEST(VisitCheckerControl, NoticesUnitsThatWereNotNeeded) {
  std::minstd_rand random(31);
  for (int tried = 0; tried < 20;) {
    const Planned planned = random_arrangement(random);
    const StageShape& stage = planned.layout->stages().front();
    if (stage.on_demand.size() < 2) continue;
    ++tried;
    VisitPlanner planner(*planned.layout, planned.arrangement);
    VisitChecker checker(*planned.layout, planned.arrangement);
    const VisitRequest visit{.gradients = std::vector<bool>(stage.units.size(), false)};
    ASSERT_FALSE(checker.visit(planner.visit(visit), visit));
    const Plan plan = planner.need({.units = {stage.on_demand[0]}, .gradients = {false}}).value();
    const io::Error error = checker.need(plan, {.units = {stage.on_demand[1]}, .gradients = {false}});
    EXPECT_NE(error.message().find("does not have the units that are needed"), std::string::npos) << error.message();
  }
}

// Weights from before the step: what the client changed in between is not seen.
TEST(VisitCheckerControl, NoticesStaleWeights) {
  std::minstd_rand random(19);
  int noticed = 0, tried = 0;
  while (tried < 20) {
    const Planned planned = random_arrangement(random);
    const Layout& layout = *planned.layout;
    if (layout.gradient_bytes(1) == 0) continue;
    VisitPlanner planner(layout, planned.arrangement);
    VisitChecker checker(layout, planned.arrangement);
    const VisitRequest request{
        .stage = 1, .pass = Pass::backward, .gradients = std::vector<bool>(layout.stages()[1].units.size(), true)};
    ASSERT_FALSE(checker.visit(planner.visit(request), request));
    ++tried;
    checker.changed(1);  // the planner is not told
    noticed += checker.visit(planner.visit(request), request) ? 1 : 0;
  }
  EXPECT_EQ(noticed, tried);
}

}  // namespace
}  // namespace tierflow::swap
