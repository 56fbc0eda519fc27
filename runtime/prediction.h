#pragma once
// What a session's plan will take: its tasks on the simulator's clock, at measured rates. No torch here.
#include <array>
#include <cstdint>
#include <vector>

#include "runtime/profile.h"
#include "runtime/session_plan.h"
#include "swap/simulator.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const SessionPlan& plan, const MachineProfile& machine,
                     const ModelProfile& model);

struct Prediction {
  double step_seconds = 0;                          // of a step in the middle of a run
  swap::Summary step;                               // of that step's tasks
  std::array<std::uint64_t, swap::kLanes> bytes{};  // that each lane moves in it
  std::vector<swap::TaskRecord> records;            // of the run's first `steps`
};

// Which share of the updates to defer, and a step's time with it and without.
struct DeferredChoice {
  double share = 0;
  double step_seconds = 0, step_seconds_at_once = 0;
};
// The fastest of a few shares on the simulator's clock; none where it would gain less than a fiftieth, for it costs
// traffic and room. `options` is of a run without clipping; its own share does not matter. Throws Exception where the
// budgets are too small.
DeferredChoice choose_deferred_share(const ModelSpec& spec, SessionOptions options, const MachineProfile& machine,
                                     const ModelProfile& model);

// The first `steps` steps of a run (at least 2), the last of which counts.
Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps = 4);

}  // namespace tierflow
