#pragma once
// What a session's plan will take: its tasks on the simulator's clock, at measured rates. No torch here.
#include <array>
#include <cstdint>
#include <vector>

#include "runtime/planning/profile.h"
#include "runtime/planning/session_plan.h"
#include "swap/simulator.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const Profile& profile);

struct Prediction {
  double step_seconds = 0;                          // of a step in the middle of a run
  swap::Summary step;                               // of that step's tasks
  std::array<std::uint64_t, swap::kLanes> bytes{};  // that each lane moves in it
  std::vector<swap::TaskRecord> records;            // of the run's first `steps`
};

// What a session may do without changing a bit, and what that gains: see SessionOptions.
struct Placement {
  SessionPlan plan;  // with all of it
  Prediction prediction;
  double step_seconds_without_swaps = 0;  // nothing swapped, no update deferred that need not be, none on the device
  double step_seconds_plain_updates = 0;  // swapped as with all of it, updates as without
};
// Sets how many micro-batches of blocks swap their activations, then, without clipping, which share of the updates is
// deferred, and which runs on the device, where its rate was measured: the fastest of a few on the simulator's clock. A
// swap has to gain a hundredth of a step's time, the others a fiftieth, for they cost traffic and room. What `options`
// had of them does not matter. Throws Exception where the budgets are too small.
Placement choose_placement(const ModelSpec& spec, SessionOptions& options, const Profile& profile);

// The first `steps` steps of a run (at least 2), the last of which counts.
Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps = 4);

}  // namespace tierflow
