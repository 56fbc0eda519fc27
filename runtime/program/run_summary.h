#pragma once
// What a training run came to: the last object of its log, and the lines that a user reads.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>

#include "runtime/planning/prediction.h"
#include "runtime/program/plan_report.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

struct RunSummary {
  std::int64_t steps = 0;
  double last_loss = NAN, held_out_before = NAN, held_out_after = NAN;  // NaN: there is none
  std::optional<Prediction> prediction;
  PredictedMemory predicted_memory;
  bool evaluated = false;
  bool usable = true;         // false: the loss is not finite, and nothing is written
  std::filesystem::path out;  // empty: the result stays in the store
};

void report(const RunSummary& run, const Session& session, TrainingLog& log);

}  // namespace tierflow
