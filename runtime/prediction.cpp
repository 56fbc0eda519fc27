#include "runtime/prediction.h"

#include <algorithm>

#include "swap/planner.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const SessionPlan& plan, const MachineProfile& machine,
                     const ModelProfile& model) {
  return {.machine = machine.rates, .update = machine.update, .stages = model.seconds(spec, plan.arrangement.keeps)};
}

Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps) {
  swap::Planner planner(*plan.layout, plan.arrangement);
  swap::Simulator simulator(*plan.layout, plan.arrangement.deferred, rates);
  Prediction prediction;
  bool pending = false;
  for (int step = 0; step < steps; ++step) {
    const double begin = simulator.now();
    const swap::Plan tasks = planner.train_step(pending);
    if (step + 1 == steps)
      for (const swap::Task& task : tasks.tasks) prediction.bytes[static_cast<int>(task.lane)] += task.bytes;
    simulator.append(tasks);
    simulator.finish_updates();
    pending = plan.defers();
    prediction.step_seconds = simulator.now() - begin;
    std::vector<swap::TaskRecord> records = simulator.take_records();
    prediction.records.insert(prediction.records.end(), records.begin(), records.end());
    if (step + 1 < steps) continue;
    for (swap::TaskRecord& record : records)
      record.begin = std::max(record.begin, begin);  // the step before left writes
    prediction.step = swap::summarise(records);
  }
  return prediction;
}

DeferredChoice choose_deferred_share(const ModelSpec& spec, SessionOptions options, const MachineProfile& machine,
                                     const ModelProfile& model) {
  constexpr double kShares[] = {0.25, 0.5, 0.75, 1.0};
  constexpr double kWorthwhile = 0.98;
  const auto predicted = [&](double share) {
    options.deferred_share = share;
    const SessionPlan plan = plan_session(spec, options, model.needs(spec));
    return predict(plan, rates_of(spec, plan, machine, model));
  };
  const Prediction at_once = predicted(0);
  DeferredChoice choice{.step_seconds = at_once.step_seconds, .step_seconds_at_once = at_once.step_seconds};
  const double computing = at_once.step.busy_seconds[static_cast<int>(swap::Lane::compute)];
  if (computing > kWorthwhile * at_once.step_seconds) return choice;
  for (const double share : kShares)
    if (const double seconds = predicted(share).step_seconds;
        seconds < std::min(choice.step_seconds, kWorthwhile * at_once.step_seconds)) {
      choice.share = share;
      choice.step_seconds = seconds;
    }
  return choice;
}

}  // namespace tierflow
