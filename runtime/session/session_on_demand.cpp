// Evaluation passes of a mixture that fetch the experts which have tokens.
#include <algorithm>
#include <set>

#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

// From so many choices for each expert of a layer on, about all of them have tokens (98% where each is as likely).
constexpr std::int64_t kChoicesThatTakeAll = 4;

}  // namespace

// Then all come as they would without a router, ahead of their use.
bool Session::Impl::needs_all_experts(const std::vector<Shared>& shared) const {
  std::int64_t tokens = 0;
  for (const Shared& each : shared) tokens += each.ids.numel();
  const ExpertsSpec& experts = model->spec().config.experts;
  return tokens * experts.per_token >= kChoicesThatTakeAll * experts.count;
}

void Session::Impl::plan_visit(int stage, std::size_t micro_batches) {
  const std::size_t units = plan.layout->stages()[stage].units.size();
  executor().append(visits->visit({.stage = stage,
                                   .pass = swap::Pass::evaluate,
                                   .gradients = std::vector<bool>(units, false),
                                   .micro_batches = static_cast<int>(micro_batches)}),
                    nullptr);
}

void Session::Impl::plan_need(int unit) {
  swap::Plan part = value_or_throw(visits->need({.units = {unit}, .gradients = {false}}));
  const auto has = [&](swap::TaskKind kind) { return std::ranges::count(part.tasks, kind, &swap::Task::kind) != 0; };
  ++expert_use.needed;
  expert_use.fetched += has(swap::TaskKind::upload_hi) ? 1 : 0;
  expert_use.read += has(swap::TaskKind::read_hi) ? 1 : 0;
  executor().append(std::move(part), nullptr);
}

void Session::Impl::evaluate_on_demand(const std::vector<Shared>& shared, const std::function<void()>& before_each) {
  const int last = static_cast<int>(plan.layout->stages().size()) - 1;
  const int rows = static_cast<int>(shared.size());
  const bool all = needs_all_experts(shared);
  int planned = 0;  // stages, ahead of their computation so that no link waits
  const auto plan_ahead = [&](int stage) {
    for (; all && planned <= std::min(stage + swap::kLookahead, last); ++planned) {
      plan_visit(planned, shared.size());
      for (const int unit : plan.layout->stages()[planned].on_demand) plan_need(unit);
    }
  };
  carries.assign(shared.size(), {});
  for (int stage = 0; stage < last; ++stage) {
    plan_ahead(stage);
    if (!all) plan_visit(stage, shared.size());
    if (!plan.layout->stages()[stage].on_demand.empty()) {
      compute_in_parts(stage, shared, all, before_each);
      continue;
    }
    for (int row = 0; row < rows; ++row) {
      if (before_each) before_each();
      const swap::Entered entered = enter(stage, swap::Pass::evaluate, row);
      compute(true, [&] { carries[row] = model->forward(stage, weights(entered), carries[row], shared[row], false); });
      leave();
    }
  }
  plan_ahead(last);
  if (!all) plan_visit(last, shared.size());
}

// planned: the parts of all experts are; else those of the experts that have tokens, when it is known which.
void Session::Impl::compute_in_parts(int stage, const std::vector<Shared>& shared, bool planned,
                                     const std::function<void()>& before_each) {
  const std::vector<int>& on_demand = plan.layout->stages()[stage].on_demand;
  const int rows = static_cast<int>(shared.size());
  std::vector<std::unique_ptr<StageInParts>> parts(shared.size());
  std::set<int> chosen;
  for (int row = 0; row < rows; ++row) {
    if (before_each) before_each();
    const swap::Entered entered = enter(stage, swap::Pass::evaluate, row);
    compute(true, [&] {
      parts[row] = model->begin(stage, weights(entered), carries[row], shared[row]);
      for (const int position : parts[row]->needed()) chosen.insert(position);
    });
    leave();
    carries[row].clear();  // its parts hold what they take of it
  }
  expert_use.all += on_demand.size();
  expert_use.chosen += chosen.size();
  std::vector<int> units;
  for (const int position : chosen) units.push_back(on_demand[position]);
  if (planned)
    visits->count_use(stage, units);
  else
    visits->will_need(units);
  std::vector<int> computed(chosen.begin(), chosen.end());
  if (planned) {
    computed.clear();
    for (int position = 0; position < static_cast<int>(on_demand.size()); ++position) computed.push_back(position);
  } else {
    for (const int unit : units) plan_need(unit);
  }
  for (const int position : computed)
    for (int row = 0; row < rows; ++row) {
      const swap::Entered entered = enter(stage, swap::Pass::evaluate, row);
      compute(true, [&] {
        if (!chosen.contains(position)) return;
        if (dense.empty())
          dense = models::dense_weights(model->spec().units, entered.visit->needed, state->needed_weights(entered));
        parts[row]->add(position, dense);
      });
      leave();
    }
  for (int row = 0; row < rows; ++row) {
    compute(true, [&] { carries[row] = parts[row]->finish(); });
    parts[row].reset();
  }
}

}  // namespace tierflow
