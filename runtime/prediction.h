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

// When and where to update, and a step's time with that and with all updates at once (where nothing clips) on the CPU.
struct UpdateChoice {
  double deferred_share = 0, device_share = 0;  // SessionOptions::deferred_share, device_update_share
  double step_seconds = 0, step_seconds_plain = 0;
};
// The fastest of a few shares on the simulator's clock. A larger one, which costs traffic and room, has to gain a
// fiftieth. Nothing is updated on a device whose rate was not measured. The shares in `options` do not matter. Throws
// Exception where the budgets are too small.
UpdateChoice choose_updates(const ModelSpec& spec, SessionOptions options, const MachineProfile& machine,
                            const ModelProfile& model);

// The first `steps` steps of a run (at least 2), the last of which counts.
Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps = 4);

}  // namespace tierflow
