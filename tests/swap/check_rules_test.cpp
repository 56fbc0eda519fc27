// The rules of the proof of whole steps, one by one: the plan that breaks a rule, and the words that it is refused
// with.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "swap/arrange.h"
#include "swap/check.h"
#include "swap/planner.h"
#include "tests/swap/damaged_plan.h"

namespace tierflow::swap {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Embedding, two blocks and a head, of two chunks each.
Layout four_units() {
  const std::vector<UnitShape> units(
      4, {.name = "unit", .groups = {{.elements = 80 * 1024, .state_bytes_element = 4, .precision = "a"}}});
  std::vector<StageShape> stages{{.units = {0}, .backward_needs_weights = false}};
  for (int unit = 1; unit < 4; ++unit) stages.push_back({.units = {unit}, .carry_bytes = kSector});
  return {units, stages, kChunkQuantum};
}

std::size_t index_of(const Plan& plan, TaskKind kind, std::size_t from = 0) {
  const auto found = std::find_if(plan.tasks.begin() + static_cast<std::ptrdiff_t>(from), plan.tasks.end(),
                                  [kind](const Task& task) { return task.kind == kind; });
  if (found == plan.tasks.end()) throw std::logic_error(std::string("the plan has no ") + task_name(kind));
  return static_cast<std::size_t>(found - plan.tasks.begin());
}
Task& first(Plan& plan, TaskKind kind) {
  return plan.tasks[index_of(plan, kind)];
}

// So that nothing is wrong with the order.
void wait_for_all(Plan& plan, std::size_t at) {
  plan.tasks[at].dependencies.clear();
  for (TaskId id = 0; id < plan.first_id + at; ++id) plan.tasks[at].dependencies.push_back(id);
}

class CheckRules : public ::testing::Test {
 protected:
  Arrangement arranged(ArrangeRequest request) const {
    if (request.host_budget == 0) request.host_budget = 64 << 20;
    request.device_budget = 64 << 20;
    request.micro_batches = 2;
    return arrange(layout_, request).value();
  }
  // Of the last of so many steps, which was damaged.
  std::string said_of(const Arrangement& made, const std::function<void(Plan&)>& damage, int steps = 1) const {
    Planner planner(layout_, made);
    PlanChecker checker(layout_, made);
    for (int step = 1;; ++step) {
      Plan plan = planner.train_step(step > 1);
      if (step == steps) damage(plan);
      const io::Error error = checker.train_step(plan, step > 1);
      if (step == steps) return error.detail;
      EXPECT_FALSE(error) << error.message();
    }
  }

  static constexpr std::uint64_t kStreams = 512 << 10;  // of host memory: buffers alone
  const Layout layout_ = four_units();
};

TEST_F(CheckRules, EveryChunkIsUpdatedAndMeasured) {
  EXPECT_THAT(said_of(arranged({.staged = false}), [](Plan& plan) { plan = cut(std::move(plan), TaskKind::update); }),
              HasSubstr("was updated 0 times"));
  EXPECT_THAT(said_of(arranged({.staged = true}), [](Plan& plan) { plan = cut(std::move(plan), TaskKind::measure); }),
              HasSubstr("was measured 0 times"));
}

TEST_F(CheckRules, ACommitIsOneThatWasAskedFor) {
  const Arrangement made = arranged({});
  Planner planner(layout_, made);
  PlanChecker checker(layout_, made);
  EXPECT_THAT(checker.train_step(planner.train_step(false, /*commits=*/true), false).detail,
              HasSubstr("it commits 1 times"));
}

TEST_F(CheckRules, AGradientIsStoredBehindItsMeasurement) {
  const Arrangement made = arranged({.host_budget = kStreams});
  const auto exchange = [](Plan& plan) { store_before_measuring(plan, index_of(plan, TaskKind::write_gradient)); };
  EXPECT_THAT(said_of(made, exchange), HasSubstr("the gradient has not been measured"));
  const auto rush = [](Plan& plan) {
    const std::size_t write = index_of(plan, TaskKind::write_gradient);
    EXPECT_EQ(std::erase(plan.tasks[write].dependencies, plan.first_id + write - 1), 1U);
  };
  EXPECT_THAT(said_of(made, rush), HasSubstr("does not wait for task"));
}

TEST_F(CheckRules, AnItemMovesWholeThroughASlot) {
  const Arrangement made = arranged({.swapped_bytes = {0, 8192, 8192, 0}, .swap_to_storage = 4});
  EXPECT_THAT(said_of(made, [](Plan& plan) { first(plan, TaskKind::write_activations).bytes -= kSector; }),
              HasSubstr("moves another number of bytes"));
  const auto without = [](Plan& plan) {
    for (Task& task : plan.tasks)
      if (task.kind == TaskKind::compute && task.pass == Pass::backward && task.device_offset != kNowhere) {
        task.device_offset = kNowhere;
        return;
      }
    FAIL() << "nothing is read from a slot";
  };
  EXPECT_THAT(said_of(made, without), HasSubstr("has no slot for its item"));
}

TEST_F(CheckRules, AVisitHasWeightsAndAPlaceForGradients) {
  const Arrangement made = arranged({});
  EXPECT_THAT(said_of(made, [](Plan& plan) { plan.visits.front().weights[0] = kNowhere; }),
              HasSubstr("the visit has no weights"));
  EXPECT_THAT(said_of(made, [](Plan& plan) { plan.visits.back().gradients[0] = kNowhere; }),
              HasSubstr("the visit has no place for the gradient of unit 0"));
}

TEST_F(CheckRules, ADeviceUpdateHasOneOfTheSlots) {
  const Arrangement made = arranged({.update_scratch = 4 * kSector, .state_on_device = true});
  const std::uint64_t begin = made.update_slots_begin();
  ASSERT_EQ(made.update_slots.bytes, 4 * kSector);
  const auto with = [&](std::uint64_t Task::*place, std::uint64_t at) {
    return said_of(made, [&](Plan& plan) { first(plan, TaskKind::keep_gradient).*place = at; });
  };
  EXPECT_EQ(with(&Task::slot, begin), "");
  for (const std::uint64_t at : {begin - made.update_slots.bytes, begin + kSector, made.update_slots_end(), kNowhere})
    EXPECT_THAT(with(&Task::slot, at), HasSubstr("has no slot, no sum or no place for it")) << at - begin;
  for (std::uint64_t Task::*place : {&Task::sum, &Task::held_gradient})
    EXPECT_THAT(with(place, kNowhere), HasSubstr("has no slot, no sum or no place for it"));
}

// Who comes next waits for who had the slot before, for its scratch too.
TEST_F(CheckRules, ASlotIsOneUpdatesAtATime) {
  const Arrangement made = arranged({.update_scratch = 4 * kSector, .state_on_device = true});
  Planner planner(layout_, made);
  std::vector<std::pair<TaskId, std::uint64_t>> had;  // whom, and which slot
  for (int step = 1; step <= 2; ++step) {
    const TaskKind kind = step == 1 ? TaskKind::keep_gradient : TaskKind::update_on_device;
    const std::vector<std::pair<TaskId, std::uint64_t>> before = had;
    const auto rush = [&](Plan& plan) {
      had = before;
      for (std::size_t at = 0; at < plan.tasks.size(); ++at) {
        Task& task = plan.tasks[at];
        if (task.slot == kNowhere) continue;
        const auto last =
            std::find_if(had.rbegin(), had.rend(), [&](const auto& one) { return one.second == task.slot; });
        if (task.kind == kind && last != had.rend() && std::erase(task.dependencies, last->first) != 0) return;
        had.emplace_back(plan.first_id + at, task.slot);
      }
      FAIL() << "no slot comes round";
    };
    EXPECT_THAT(said_of(made, rush, step), HasSubstr("which writes the same bytes")) << task_name(kind);
    Plan plan = planner.train_step(step > 1);
    had = before;
    for (std::size_t at = 0; at < plan.tasks.size(); ++at)
      if (plan.tasks[at].slot != kNowhere) had.emplace_back(plan.first_id + at, plan.tasks[at].slot);
  }
}

TEST_F(CheckRules, AnUpdateIsOfItsOwnWordsStateAndGradient) {
  const Arrangement made = arranged({.host_budget = kStreams});
  for (const auto& [kind, what] : {std::pair{TaskKind::read_hi, "the words does not hold what it needs"},
                                   {TaskKind::read_state, "the state does not hold what it needs"},
                                   {TaskKind::read_gradient, "the gradient does not hold what it needs"}}) {
    const auto exchange = [&, of = kind](Plan& plan) {
      const std::size_t read = index_of(plan, of);
      ASSERT_EQ(plan.tasks[read].chunk, 0);
      plan.tasks[read].chunk = 1;
      wait_for_all(plan, read);
    };
    EXPECT_THAT(said_of(made, exchange, 2), AllOf(HasSubstr("(update"), HasSubstr(what)));
  }
}

TEST_F(CheckRules, ABackwardFindsItsOwnItem) {
  const Arrangement made = arranged({.swapped_bytes = {0, 8192, 8192, 0}, .swap_to_host = 4});
  const auto exchange = [&](Plan& plan) {
    std::size_t of[2];
    for (std::size_t at = 0, found = 0; found < 2; ++at)
      if (const Task& task = plan.tasks.at(at);
          task.kind == TaskKind::compute && task.pass == Pass::backward && task.device_offset != kNowhere)
        of[found++] = at;
    ASSERT_NE(plan.tasks[of[0]].device_offset, plan.tasks[of[1]].device_offset);
    plan.tasks[of[0]].device_offset = plan.tasks[of[1]].device_offset;
    wait_for_all(plan, of[0]);
  };
  EXPECT_THAT(said_of(made, exchange), AllOf(HasSubstr("(compute"), HasSubstr("does not hold what it needs")));
}

TEST_F(CheckRules, WhatTheDeviceRoundsIsTheUnitsSum) {
  for (const auto& [kind, request] :
       {std::pair{TaskKind::keep_gradient, ArrangeRequest{.state_on_device = true}},
        {TaskKind::update_on_device, ArrangeRequest{.staged = false, .device_update_share = 1}}}) {
    const Arrangement made = arranged(request);
    const auto elsewhere = [&, of = kind](Plan& plan) {
      const std::size_t at = index_of(plan, of);
      plan.tasks[at].sum = 0;  // where weights lie
      wait_for_all(plan, at);
    };
    EXPECT_THAT(said_of(made, elsewhere),
                AllOf(HasSubstr(task_name(kind)), HasSubstr("reads device memory that nothing has written")));
  }
}

TEST_F(CheckRules, AComputationIsOfAVisitThatThereIs) {
  for (const int visit : {-1, 1000})
    EXPECT_THAT(said_of(arranged({}), [visit](Plan& plan) { first(plan, TaskKind::compute).visit = visit; }),
                HasSubstr("belongs to no visit"));
}

TEST_F(CheckRules, ATaskNamesAChunkThatThereIs) {
  for (const int chunk : {-1, static_cast<int>(layout_.chunks().size())})
    EXPECT_THAT(said_of(arranged({}), [chunk](Plan& plan) { first(plan, TaskKind::upload_hi).chunk = chunk; }),
                HasSubstr("names no chunk"));
}

TEST_F(CheckRules, OnlyASpeculativeStepIsUndone) {
  const Arrangement made = arranged({});
  Planner planner(layout_, made);
  PlanChecker checker(layout_, made);
  ASSERT_FALSE(checker.train_step(planner.train_step(false, /*commits=*/true), false, /*commits=*/true));
  EXPECT_THAT(checker.undo(planner.undo()).detail, HasSubstr("undoes a step that was not speculative"));
}

// After a step that used all sparse chunks but one.
class CatchingUp : public ::testing::Test {
 protected:
  CatchingUp()
      : layout_({{.name = "embedding",
                  .groups =
                      {{.elements = kElementsPad, .state_bytes_element = 4},
                       {.elements = 4 * kSparseQuantum, .state_bytes_element = 4, .sparse_elements = kSparseQuantum}}},
                 {.name = "head", .groups = {{.elements = kElementsPad, .state_bytes_element = 4}}}},
                {{.units = {0}, .backward_needs_weights = false}, {.units = {1}, .carry_bytes = kSector}},
                kChunkQuantum),
        made_(arrange(layout_, {.host_budget = 64 << 20, .device_budget = 64 << 20, .staged = false}).value()),
        missed_(layout_.sparse_chunks()[1]) {
    but_one_.used = all_but(missed_);
    EXPECT_FALSE(checker_.train_step(planner_.train_step(false, false, Updates::as_arranged, but_one_), false, false,
                                     Updates::as_arranged, but_one_));
  }
  std::vector<bool> all_but(int chunk) const {
    std::vector<bool> used(layout_.chunks().size(), true);
    used[chunk] = false;
    return used;
  }
  // Of a flush: nothing is used, and the one catches up, or not.
  SparseChunks flushed(bool catches_up) const {
    const std::vector<bool> none(layout_.chunks().size(), false);
    SparseChunks sparse{.used = none, .missed = none, .waiting = none};
    sparse.missed[missed_] = catches_up;
    return sparse;
  }

  const Layout layout_;
  const Arrangement made_;
  const int missed_;
  Planner planner_{layout_, made_};
  PlanChecker checker_{layout_, made_};
  SparseChunks but_one_;
};

TEST_F(CatchingUp, IsNotForgotten) {
  EXPECT_THAT(checker_.flush(planner_.flush(false, flushed(false)), false, flushed(true)).detail,
              HasSubstr("chunk " + std::to_string(missed_) + " has not what it missed"));
}
TEST_F(CatchingUp, IsForWhatTheStepUses) {
  SparseChunks told = but_one_;
  told.missed = flushed(true).missed;
  EXPECT_THAT(checker_
                  .train_step(planner_.train_step(false, false, Updates::as_arranged, told), false, false,
                              Updates::as_arranged, but_one_)
                  .detail,
              HasSubstr("catches up with what the chunk has not missed"));
}
TEST_F(CatchingUp, HappensOnce) {
  Plan plan = planner_.flush(false, flushed(true));
  Task again = first(plan, TaskKind::catch_up);
  again.dependencies.clear();
  for (std::size_t at = 0; at < plan.tasks.size(); ++at) again.dependencies.push_back(plan.first_id + at);
  plan.tasks.push_back(again);
  EXPECT_THAT(checker_.flush(plan, false, flushed(true)).detail, HasSubstr("the chunk has missed nothing"));
}

}  // namespace
}  // namespace tierflow::swap
