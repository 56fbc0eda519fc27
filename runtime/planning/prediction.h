#pragma once
// What a session's plan will take: its tasks on the simulator's clock, at measured rates. No torch here.
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

// Seconds that the drives take at least for a training step after the first, however its tasks come: a plan that need
// not be played to know that it is slow. It leaves out some of what the step reads.
double least_on_drives(const SessionPlan& plan, const swap::MachineRates& machine);

struct Prediction {
  double step_seconds = 0;                          // of a warmed-up step: others ran before it
  swap::Summary step;                               // of that step's tasks
  std::array<std::uint64_t, swap::kLanes> bytes{};  // that each lane moves in that step
  // And those of them that are saved for items: each micro-batch has its own.
  std::array<std::uint64_t, swap::kLanes> item_bytes{};
  std::vector<swap::TaskRecord> records;  // of the run's first `steps`, from predict() alone
};

// Choices of a session that change no bit (see SessionOptions), and what they gain.
struct Placement {
  SessionPlan plan;  // with these choices
  Prediction prediction;
  // No swaps, only mandatory deferral, no update on the device but of state that stays there.
  double step_seconds_without_swaps = 0;
  double step_seconds_plain_updates = 0;  // the same with the swaps of `plan`
  // Where it clips: a speculative step, as others come before and after it; nothing where there can be none. The
  // prediction is of staged steps.
  std::optional<double> step_seconds_speculative;
  std::string staged_because;  // why no step is speculative; empty where some may be, and where nothing clips
};
// Sets in `options` how many micro-batches of blocks swap their activations; then, without clipping, which share of the
// updates is deferred; and, where its rate was measured, which share runs on the device; with clipping, whether steps
// are speculative where they are likely not to clip. It takes the fastest of a few choices on the simulator's clock.
// Because they cost traffic and room, a swap must gain a hundredth of a step's time, the others a fiftieth. Former
// values in `options` do not matter. Where a state is gone on with, options.chunk_elements is its cut and becomes the
// one that it then has. Throws Exception where the budgets are too small.
Placement choose_placement(const ModelSpec& spec, SessionOptions& options, const Profile& profile);

// A step without clipping, where `options` clip: with the swaps that they have, and updates placed anew. Nothing where
// the budgets are too small for it.
std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions options, const Profile& profile);

// Seconds of a pass forward alone over plan.evaluated_at_once micro-batches, one of many: what the reference of
// preference pairs takes before the first step.
double forward_seconds(const SessionPlan& plan, const swap::Rates& rates);

// The first `steps` steps of a run (at least 2), the last of which counts.
Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps = 4);

}  // namespace tierflow
