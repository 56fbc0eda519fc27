#pragma once
// FRONT DOOR of program. The commands that need LibTorch. They lie in the shared library libtierflow_train.so, which
// the program loads only for these commands.
#include "runtime/planning/profile.h"
#include "runtime/program/options.h"
#include "runtime/program/session_settings.h"

namespace tierflow {

// The exit code of a run that ended at --max-tb-written. Its state is committed or, without commits, its result is
// written.
inline constexpr int kStoppedAtLimit = 10;

// About the most seconds in which a plan measures a model's stages.
inline constexpr double kProfileSeconds = 60;

// The measurements that a plan lacks.
struct ProfileJob {
  const ModelSpec& spec;
  const SessionOptions& options;
  MachineProfile* machine = nullptr;  // where the result goes; null: not wanted
  ModelProfile* model = nullptr;      // the same for the model's stages
  double seconds = kProfileSeconds;   // for the model's stages: if they would take longer, narrower ones are measured
  Say say;                            // hears what is being measured
};

// Each prints progress and results, and writes what the options ask for. Returns the exit code. Throws Exception on
// failure, and leaves nothing half-written.
int run_train(const TrainOptions& options);
int run_eval(const EvalOptions& options);
int run_generate(const GenerateOptions& options);
int run_export(const ExportOptions& options);
int run_merge(const MergeOptions& options);
int run_profile(const ProfileJob& job);

}  // namespace tierflow

// The names under which the program finds the functions above in the library (train_entry.cpp).
extern "C" {
int tierflow_run_train(const tierflow::TrainOptions* options);
int tierflow_run_eval(const tierflow::EvalOptions* options);
int tierflow_run_generate(const tierflow::GenerateOptions* options);
int tierflow_run_export(const tierflow::ExportOptions* options);
int tierflow_run_merge(const tierflow::MergeOptions* options);
int tierflow_run_profile(const tierflow::ProfileJob* job);
}
