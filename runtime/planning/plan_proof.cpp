#include <algorithm>
#include <stdexcept>

#include "runtime/base/exception.h"
#include "runtime/planning/session_plan.h"
#include "swap/check.h"
#include "swap/planner.h"
#include "swap/visit_check.h"
#include "swap/visit_planner.h"

namespace tierflow {
namespace {

void expect_right(const io::Error& wrong) {
  if (wrong) throw std::logic_error(wrong.message());
}

// Passes one after the other: with all units on demand, then with some of them.
void prove_on_demand(const SessionPlan& plan) {
  swap::VisitPlanner planner(*plan.layout, plan.arrangement);
  swap::VisitChecker checker(*plan.layout, plan.arrangement);
  const auto& stages = plan.layout->stages();
  for (const std::size_t every : {1, 3})
    for (int stage = 0; stage < static_cast<int>(stages.size()); ++stage) {
      const swap::VisitRequest visit{.stage = stage,
                                     .pass = swap::Pass::evaluate,
                                     .gradients = std::vector<bool>(stages[stage].units.size(), false),
                                     .micro_batches = plan.arrangement.micro_batches};
      expect_right(checker.visit(planner.visit(visit), visit));
      std::vector<int> needed;
      for (std::size_t i = 0; i < stages[stage].on_demand.size(); i += every)
        needed.push_back(stages[stage].on_demand[i]);
      planner.will_need(needed);
      for (const int unit : needed) {
        const swap::NeedRequest need{.units = {unit}, .gradients = {false}};
        expect_right(checker.need(value_or_throw(planner.need(need)), need));
      }
    }
}

}  // namespace

void prove(const SessionPlan& plan, bool train) {
  if (std::ranges::any_of(plan.layout->stages(), [](const auto& stage) { return !stage.on_demand.empty(); }))
    return prove_on_demand(plan);
  swap::Planner planner(*plan.layout, plan.arrangement);
  swap::PlanChecker checker(*plan.layout, plan.arrangement);
  planner.stream_parts_to([&](const swap::Plan& part) { checker.play(part); });
  bool pending = false;
  int steps = 0;  // that stand
  const auto prove_step = [&](bool commits, swap::Updates updates, bool again = false) {
    swap::SparseChunks sparse = expected_sparse_chunks(plan, steps++, pending);
    if (again) sparse.missed.assign(sparse.missed.size(), false);  // what was undone had caught up by then
    checker.begin_step(pending, commits, updates, sparse);
    expect_right(checker.finish(planner.train_step(pending, commits, updates, sparse)));
    pending = plan.defers() && updates == swap::Updates::as_arranged;
  };
  for (int step = 0; step < 3 && train; ++step)
    prove_step(plan.commit_every != 0 && step > 0, swap::Updates::as_arranged);
  // After a staged one and after another; what undoes it; what follows.
  for (int step = 0; step < 2 && plan.speculates; ++step) prove_step(true, swap::Updates::at_once);
  if (plan.speculates) {
    checker.begin_undo();
    expect_right(checker.finish(planner.undo()));
    --steps;
    prove_step(false, swap::Updates::as_arranged, /*again=*/true);
  }
  if (pending || (steps > 0 && !plan.layout->sparse_chunks().empty())) {
    swap::SparseChunks sparse = expected_sparse_chunks(plan, steps, pending);
    const swap::SparseChunks last = expected_sparse_chunks(plan, steps - 1, false);
    sparse.used.assign(sparse.used.size(), false);
    for (const int chunk : plan.layout->sparse_chunks()) sparse.missed[chunk] = !last.used[chunk];
    checker.begin_flush(pending, sparse);
    expect_right(checker.finish(planner.flush(pending, sparse)));
  }
  checker.begin_evaluation();
  expect_right(checker.finish(planner.evaluate(plan.evaluated_at_once, true)));
}

}  // namespace tierflow
