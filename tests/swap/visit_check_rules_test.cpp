// The rules of the proof of single visits, one by one: the plan that breaks a rule, and the words that it is refused
// with.
#include <gmock/gmock.h>

#include <algorithm>
#include <utility>

#include "swap/arrange.h"
#include "swap/visit_check.h"
#include "tests/swap/damaged_plan.h"

namespace tierflow::swap {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Another task at the end, behind all others.
Plan with(Plan plan, Task task) {
  task.dependencies.clear();
  for (std::size_t at = 0; at < plan.tasks.size(); ++at) task.dependencies.push_back(plan.first_id + at);
  plan.tasks.push_back(std::move(task));
  return plan;
}

// Two stages with a unit of two chunks each, which stream; the first one may need a unit on demand.
class VisitRules : public ::testing::Test {
 protected:
  VisitRules()
      : layout_(
            std::vector<UnitShape>(3, {.name = "unit", .groups = {{.elements = 80 * 1024, .state_bytes_element = 4}}}),
            {{.units = {0}, .on_demand = {2}}, {.units = {1}}}, kChunkQuantum),
        arrangement_(
            arrange(layout_, {.host_budget = (4 * 128 + 256) << 10, .device_budget = 8 << 20, .sums = true}).value()) {}

  static VisitRequest backward(int stage = 1, bool stays = false) {
    return {.stage = stage, .pass = Pass::backward, .gradients = {true}, .gradients_stay = stays};
  }
  static VisitRequest forward(int stage = 1) { return {.stage = stage, .gradients = {false}}; }
  void plays(const VisitRequest& request) {
    const io::Error error = checker_.visit(planner_.visit(request), request);
    ASSERT_FALSE(error) << error.message();
  }
  // The second unit owes the update of so many visits' gradient.
  void owes(int visits) {
    for (int visit = 0; visit < visits; ++visit) ASSERT_NO_FATAL_FAILURE(plays(backward()));
    ASSERT_FALSE(checker_.owe(planner_.owe({1}), {1}));
  }
  std::string said_of(const Plan& plan, const VisitRequest& request) { return checker_.visit(plan, request).detail; }

  const Layout layout_;
  const Arrangement arrangement_;
  VisitPlanner planner_{layout_, arrangement_};
  VisitChecker checker_{layout_, arrangement_};
};

TEST_F(VisitRules, OwedIsAGradientThatHasLeftTheDevice) {
  EXPECT_THAT(checker_.owe({}, {1}).detail, HasSubstr("unit 1 has no gradient that could be owed"));
  ASSERT_NO_FATAL_FAILURE(plays(backward(1, /*stays=*/true)));
  EXPECT_THAT(checker_.owe({}, {1}).detail, HasSubstr("unit 1 has no gradient that could be owed"));
}

TEST_F(VisitRules, AnOwedUpdateIsApplied) {
  ASSERT_NO_FATAL_FAILURE(owes(1));
  Plan plan = planner_.apply_owed(1);
  plan.tasks.clear();
  EXPECT_THAT(checker_.apply_owed(plan, 1).detail, HasSubstr("unit 1 still owes its update"));
}
TEST_F(VisitRules, AnOwedUpdateIsOfAllChunks) {
  ASSERT_NO_FATAL_FAILURE(owes(1));
  EXPECT_THAT(checker_.apply_owed(cut(planner_.apply_owed(1), TaskKind::update), 1).detail,
              HasSubstr("updates a part of unit 1"));
}
TEST_F(VisitRules, AnOwedUpdateIsAppliedOnce) {
  ASSERT_NO_FATAL_FAILURE(owes(1));
  const Plan plan = planner_.apply_owed(1);
  EXPECT_THAT(checker_.apply_owed(with(plan, plan.tasks[last_of(plan, TaskKind::update)]), 1).detail,
              HasSubstr("no update is owed"));
}
TEST_F(VisitRules, AGradientOfOneVisitIsNoSum) {
  ASSERT_NO_FATAL_FAILURE(owes(1));
  Plan plan = planner_.apply_owed(1);
  Task& update = plan.tasks[last_of(plan, TaskKind::update)];
  update.gradient_low = update.gradient;
  EXPECT_THAT(checker_.apply_owed(plan, 1).detail, HasSubstr("takes a bf16 gradient for a sum, or a sum for one"));
}
// It is rounded in place.
TEST_F(VisitRules, ASumIsGoneBehindItsUpdate) {
  ASSERT_NO_FATAL_FAILURE(owes(2));
  const Plan plan = planner_.apply_owed(1);
  Task write = plan.tasks[last_of(plan, TaskKind::update)];
  write.kind = TaskKind::write_gradient;
  EXPECT_THAT(checker_.apply_owed(with(plan, write), 1).detail,
              AllOf(HasSubstr("(write_gradient"), HasSubstr("does not hold what it needs")));
}
TEST_F(VisitRules, ACopyIsOfTheChunkThatItNames) {
  ASSERT_NO_FATAL_FAILURE(owes(1));
  Plan plan = planner_.apply_owed(1);
  plan.tasks[last_of(plan, TaskKind::read_gradient)].chunk = 0;  // which has none
  EXPECT_THAT(checker_.apply_owed(plan, 1).detail,
              AllOf(HasSubstr("(read_gradient"), HasSubstr("storage does not hold what it needs")));
}

TEST_F(VisitRules, AGradientIsStoredAsThatOfItsOwnChunk) {
  Plan plan = planner_.visit(backward());
  Task& write = plan.tasks[last_of(plan, TaskKind::write_gradient)];
  ASSERT_EQ(write.chunk, 3);
  write.chunk = 2;  // which was measured too
  EXPECT_THAT(said_of(plan, backward()),
              AllOf(HasSubstr("(write_gradient"), HasSubstr("the host buffer does not hold what it needs")));
}
// The third visit's gradient is added to the fp32 sum of two, in high and low words.
TEST_F(VisitRules, ASumIsMadeOfItsParts) {
  for (const auto& [place, what] : {std::pair{&Task::incoming, "the gradient to add does not hold"},
                                    {&Task::gradient, "the sum does not hold"},
                                    {&Task::gradient_low, "its low words does not hold"}}) {
    VisitPlanner planner(layout_, arrangement_);
    VisitChecker checker(layout_, arrangement_);
    for (int visit = 0; visit < 2; ++visit) ASSERT_FALSE(checker.visit(planner.visit(backward()), backward()));
    Plan plan = planner.visit(backward());
    Task& sum = plan.tasks[last_of(plan, TaskKind::accumulate)];
    sum.*place = place == &Task::incoming ? sum.gradient : sum.incoming;
    EXPECT_THAT(checker.visit(plan, backward()).detail, AllOf(HasSubstr("(accumulate"), HasSubstr(what)));
  }
}
TEST_F(VisitRules, AnUpdateTakesTheLowWordsOfItsSum) {
  ASSERT_NO_FATAL_FAILURE(owes(2));
  Plan plan = planner_.apply_owed(1);
  Task& update = plan.tasks[last_of(plan, TaskKind::update)];
  update.gradient_low = update.gradient;
  EXPECT_THAT(checker_.apply_owed(plan, 1).detail, HasSubstr("its low words does not hold what it needs"));
}

TEST_F(VisitRules, AVisitHasTheWeightsOfItsUnitsAndNoOthers) {
  Plan plan = planner_.visit(forward());
  Visit& visit = plan.visits.front();
  visit.weights.push_back(visit.weights.front());
  EXPECT_THAT(said_of(plan, forward()), HasSubstr("does not have the units that are needed"));
}

TEST_F(VisitRules, ACommitCommits) {
  Plan plan = planner_.commit();
  plan.tasks.clear();
  EXPECT_THAT(checker_.commit(plan).detail, HasSubstr("it commits 0 times"));
}

TEST_F(VisitRules, EachMicroBatchIsComputedInItsTurn) {
  VisitRequest two = forward();
  two.micro_batches = 2;
  Plan plan = planner_.visit(two);
  const std::size_t last = last_of(plan, TaskKind::compute);
  std::swap(plan.tasks[last].micro_batch, plan.tasks[last - 1].micro_batch);
  EXPECT_THAT(said_of(plan, two), HasSubstr("is not the next micro-batch's"));
}
TEST_F(VisitRules, AVisitComputes) {
  EXPECT_THAT(said_of(cut(planner_.visit(forward()), TaskKind::compute), forward()),
              HasSubstr("computes 0 micro-batches"));
}
TEST_F(VisitRules, AVisitIsOfTheStageThatWasAskedFor) {
  EXPECT_THAT(said_of(planner_.visit(forward(0)), forward(1)), HasSubstr("is not the visit asked for"));
}
TEST_F(VisitRules, AVisitIsOfThePassThatWasAskedFor) {
  VisitRequest evaluates = forward();
  evaluates.pass = Pass::evaluate;
  EXPECT_THAT(said_of(planner_.visit(forward()), evaluates), HasSubstr("is not the visit asked for"));
}
TEST_F(VisitRules, AVisitUpdatesOnTheHostAlone) {
  const Plan plan = planner_.visit(forward());
  Task down = plan.tasks[last_of(plan, TaskKind::upload_hi)];
  down.kind = TaskKind::download_hi;
  EXPECT_THAT(said_of(with(plan, down), forward()), HasSubstr("is of no kind that a visit has"));
}

TEST_F(VisitRules, AGradientLeavesUnlessItIsToStay) {
  EXPECT_THAT(said_of(planner_.visit(backward(1, /*stays=*/true)), backward()),
              HasSubstr("leaves a gradient of unit 1 on the device"));
}
// The first stage's stays until its visit ends, for the units that the visit may need; no longer.
TEST_F(VisitRules, AGradientStaysForAnotherVisitIfItIsToStay) {
  EXPECT_EQ(said_of(planner_.visit(backward(0, /*stays=*/true)), backward(0)), "");
  EXPECT_THAT(said_of(planner_.visit(backward(0, /*stays=*/true)), backward(0)),
              HasSubstr("adds to a gradient that was not to stay"));
}
TEST_F(VisitRules, AGradientThatStaysIsAddedTo) {
  ASSERT_NO_FATAL_FAILURE(plays(backward(1, /*stays=*/true)));
  Plan plan = planner_.visit(backward());
  plan.visits.front().fresh_gradient[0] = true;
  EXPECT_THAT(said_of(plan, backward()), HasSubstr("starts a gradient afresh while one has not left the device"));
}
TEST_F(VisitRules, AGradientLeavesOnce) {
  const Plan plan = planner_.visit(backward());
  EXPECT_THAT(said_of(with(plan, plan.tasks[last_of(plan, TaskKind::download_gradient)]), backward()),
              HasSubstr("takes a gradient for a second time"));
}
TEST_F(VisitRules, AGradientIsStoredBehindItsMeasurement) {
  Plan plan = planner_.visit(backward());
  ASSERT_NO_FATAL_FAILURE(store_before_measuring(plan, last_of(plan, TaskKind::write_gradient)));
  EXPECT_THAT(said_of(plan, backward()), HasSubstr("the gradient has not been measured"));
}
TEST_F(VisitRules, ASumIsStoredWithItsLowWords) {
  for (const TaskKind lost : {TaskKind::write_gradient_low, TaskKind::write_gradient}) {
    VisitPlanner planner(layout_, arrangement_);
    VisitChecker checker(layout_, arrangement_);
    ASSERT_FALSE(checker.visit(planner.visit(backward()), backward()));
    EXPECT_THAT(checker.visit(cut(planner.visit(backward()), lost), backward()).detail,
                HasSubstr("the gradient of chunk 3 is not where it belongs"));
  }
}

}  // namespace
}  // namespace tierflow::swap
