#pragma once
// The summary of a training run: the last object of its log, and the lines that a user reads.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

#include "runtime/planning/prediction.h"
#include "runtime/program/options.h"
#include "runtime/program/plan_report.h"
#include "runtime/program/run_record.h"
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

// Where the run stands, and what a crash would cost it. resumed: it goes on.
void say_what_is_durable(const TrainOptions& options, const Session& session, std::int64_t steps, bool resumed,
                         TrainingLog& log);
// Of a folder that holds a text model and other parts: what becomes of these.
std::string result_of_text_model(const TrainOptions& options, const ModelSpec& spec);

// Of a run with --export-best: which model has the lowest held-out loss. result: the step and loss of the result, where
// it was evaluated.
void say_which_is_best(const TrainOptions& options, const RunRecord& record, bool exported,
                       std::optional<std::pair<std::int64_t, double>> result, TrainingLog& log);

void report(const RunSummary& run, const Session& session, TrainingLog& log);

}  // namespace tierflow
