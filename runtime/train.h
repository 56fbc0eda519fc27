#pragma once
// The commands that need LibTorch. They live in the shared library tierflow_train, which the program loads when one is
// asked for.
#include "runtime/options.h"

namespace tierflow {

// Print progress and results, write what the options ask for. Return the exit code; throw Exception on failure, leaving
// nothing half-written behind.
// The exit code of a run that ended at --max-tb-written, its result written.
inline constexpr int kStoppedAtLimit = 10;

int run_train(const TrainOptions& options);
int run_eval(const EvalOptions& options);
int run_export(const ExportOptions& options);

}  // namespace tierflow

// The names under which the program finds them (train_entry.cpp).
extern "C" {
int tierflow_run_train(const tierflow::TrainOptions* options);
int tierflow_run_eval(const tierflow::EvalOptions* options);
int tierflow_run_export(const tierflow::ExportOptions* options);
}
