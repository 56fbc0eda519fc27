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
  swap::Simulator simulator(*plan.layout, plan.arrangement.staged, rates);
  Prediction prediction;
  bool pending = false;
  for (int step = 0; step < steps; ++step) {
    const double begin = simulator.now();
    const swap::Plan tasks = planner.train_step(pending);
    if (step + 1 == steps)
      for (const swap::Task& task : tasks.tasks) prediction.bytes[static_cast<int>(task.lane)] += task.bytes;
    simulator.append(tasks);
    simulator.finish_updates();
    pending = plan.arrangement.staged;
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

}  // namespace tierflow
