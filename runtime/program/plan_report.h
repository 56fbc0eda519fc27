#pragma once
// A plan with its prediction as one JSON object, and as a table of the same numbers.
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "runtime/planning/machine_model.h"
#include "runtime/planning/prediction.h"
#include "runtime/program/options.h"

namespace tierflow {

// What tuning takes: bytes, of a step but for the state.
struct TuningCost {
  std::uint64_t state = 0, read = 0, written = 0, gradients = 0;
};

struct PlannedRun {
  const TrainOptions& options;
  const ModelSpec& spec;
  const SessionOptions& session;
  const Profile& profile;
  const Placement& placement;
  const MachineModel* modelled = nullptr;  // the machine that the profile was computed from; null: it was measured here
  std::optional<TuningCost> full;          // of full tuning, where gradients are projected and the budgets allow it
  // Of a pass over the pairs before the first step, where the loss takes its reference from one.
  std::optional<double> reference_pairs_per_second;
  std::optional<double> step_seconds_unclipped;  // of the same run with --clip none, where it clips and that works
};

// The most memory that the run is expected to use.
struct PredictedMemory {
  std::uint64_t device = 0, host = 0, process = 0;  // process: device too where that is the CPU
};
TuningCost tuning_cost(const SessionPlan& plan, const Prediction& prediction);
PredictedMemory predicted_memory(const SessionPlan& plan, const SessionOptions& session, const ModelSpec& spec,
                                 const ModelProfile& model);

// Of a run that clips, as Placement has it: what its steps take, and when they are speculative or why all are staged.
std::string speculation_text(double staged_seconds, std::optional<double> speculative_seconds,
                             const std::string& staged_because, std::int64_t tokens);

// "0.054 tokens/s", "37 tokens/s": two digits below ten, whole ones above.
std::string speed_text(double tokens_per_second);

nlohmann::ordered_json plan_json(const PlannedRun& run);
std::string plan_text(const nlohmann::ordered_json& plan);

}  // namespace tierflow
