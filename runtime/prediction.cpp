#include "runtime/prediction.h"

#include <algorithm>

#include "swap/planner.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const SessionPlan& plan, const MachineProfile& machine,
                     const ModelProfile& model) {
  return {.machine = machine.rates,
          .update = machine.update,
          .device_update = machine.device_update,
          .stages = model.seconds(spec, plan.arrangement.keeps)};
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

UpdateChoice choose_updates(const ModelSpec& spec, SessionOptions options, const MachineProfile& machine,
                            const ModelProfile& model) {
  constexpr double kWorthwhile = 0.98;
  const auto predicted = [&](double deferred, double on_device) {
    options.deferred_share = deferred;
    options.device_update_share = on_device;
    const SessionPlan plan = plan_session(spec, options, model.needs(spec));
    return predict(plan, rates_of(spec, plan, machine, model));
  };
  const Prediction plain = predicted(0, 0);
  UpdateChoice choice{.step_seconds = plain.step_seconds, .step_seconds_plain = plain.step_seconds};
  const double computing = plain.step.busy_seconds[static_cast<int>(swap::Lane::compute)];
  if (computing > kWorthwhile * plain.step_seconds) return choice;
  const std::vector<double> deferred = options.clip ? std::vector{0.0} : std::vector{0.0, 0.25, 0.5, 0.75, 1.0},
                            on_device = machine.device_update.empty() ? std::vector{0.0} : std::vector{0.0, 0.5, 1.0};
  for (const double device_share : on_device)
    for (const double deferred_share : deferred) {
      if (deferred_share == 0 && device_share == 0) continue;
      const double seconds = predicted(deferred_share, device_share).step_seconds;
      if (seconds >= kWorthwhile * choice.step_seconds) continue;
      choice.deferred_share = deferred_share;
      choice.device_share = device_share;
      choice.step_seconds = seconds;
    }
  return choice;
}

}  // namespace tierflow
