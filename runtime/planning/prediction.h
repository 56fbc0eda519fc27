#pragma once
// Predicts the time of a session's plan: its tasks on the simulator's clock, at measured rates. No torch here.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/planning/profile.h"
#include "runtime/planning/session_plan.h"
#include "swap/simulator.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const Profile& profile);

// The least seconds that the drives take for a training step after the first, in whatever order its tasks run. So a
// slow plan can be ruled out without playing it. It is a lower bound: it leaves out some of what the step reads.
double least_on_drives(const SessionPlan& plan, const swap::MachineRates& machine);

struct Prediction {
  double step_seconds = 0;                          // of a warmed-up step: others ran before it
  swap::Summary step;                               // of that step's tasks
  std::array<std::uint64_t, swap::kLanes> bytes{};  // that each lane moves in that step
  // The part of these bytes that is saved for items, and so grows with the number of micro-batches.
  std::array<std::uint64_t, swap::kLanes> item_bytes{};
  std::vector<swap::TaskRecord> records;  // of the run's first `steps`, from predict() alone
};

// Choices of a session that change no bit (see SessionOptions), and what they gain.
struct Placement {
  SessionPlan plan;  // with these choices
  Prediction prediction;
  // No swaps, only mandatory deferral, no update on the device except of state that stays there.
  double step_seconds_without_swaps = 0;
  double step_seconds_plain_updates = 0;  // the same with the swaps of `plan`
  // With clipping: a speculative step between others; nothing if there can be none. `prediction` is of staged steps.
  std::optional<double> step_seconds_speculative;
  std::string staged_because;  // why no step is speculative; empty if some may be, and without clipping
};
// Sets in `options` how many micro-batches of blocks swap their activations; then, without clipping, which share of the
// updates is deferred; and, where its rate was measured, which share runs on the device; with clipping, whether steps
// are speculative where they are likely not to clip. It takes the fastest of a few choices on the simulator's clock.
// Because they cost traffic and room, a swap must gain a hundredth of a step's time, the others a fiftieth. Former
// values in `options` do not matter. When a state is resumed, options.chunk_elements is the chunk size that it has, and
// becomes the one that it gets. Throws Exception if the budgets are too small.
Placement choose_placement(const ModelSpec& spec, SessionOptions& options, const Profile& profile);

// For options with clipping: a step without clipping, with the same swaps, and updates placed anew. Nothing if the
// budgets are too small for it.
std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions options, const Profile& profile);

// Seconds of one of many forward passes over plan.evaluated_at_once micro-batches. The reference of preference pairs
// takes such passes before the first step.
double forward_seconds(const SessionPlan& plan, const swap::Rates& rates);

// The first `steps` steps of a run (at least 2), the last of which counts.
Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps = 4);

}  // namespace tierflow
