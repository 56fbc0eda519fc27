#pragma once
// FRONT DOOR of program. The commands that need LibTorch. They live in the shared library tierflow_train, which the
// program loads when one is asked for.
#include "runtime/planning/profile.h"
#include "runtime/program/options.h"
#include "runtime/program/session_settings.h"

namespace tierflow {

// The exit code of a run that ended at --max-tb-written: its state is committed or, without commits, its result
// written.
inline constexpr int kStoppedAtLimit = 10;

// What a plan takes at most, about, to measure a model's stages.
inline constexpr double kProfileSeconds = 60;

// Measurements that a plan lacks.
struct ProfileJob {
  const ModelSpec& spec;
  const SessionOptions& options;
  MachineProfile* machine = nullptr;  // where they go; null: not asked for
  ModelProfile* model = nullptr;
  double seconds = kProfileSeconds;  // for the model's stages: larger ones are scaled
  Say say;                           // what is being measured
};

// Print progress and results, write what the options ask for. Return the exit code; throw Exception on failure, leaving
// nothing half-written behind.
int run_train(const TrainOptions& options);
int run_eval(const EvalOptions& options);
int run_generate(const GenerateOptions& options);
int run_export(const ExportOptions& options);
int run_merge(const MergeOptions& options);
int run_profile(const ProfileJob& job);

}  // namespace tierflow

// The names under which the program finds them (train_entry.cpp).
extern "C" {
int tierflow_run_train(const tierflow::TrainOptions* options);
int tierflow_run_eval(const tierflow::EvalOptions* options);
int tierflow_run_generate(const tierflow::GenerateOptions* options);
int tierflow_run_export(const tierflow::ExportOptions* options);
int tierflow_run_merge(const tierflow::MergeOptions* options);
int tierflow_run_profile(const tierflow::ProfileJob* job);
}
