#pragma once
// The evaluations of a training run on its held-out sequences: it evaluates, keeps models as checkpoints, and says
// which model is the best.
#include <cstdint>

#include "runtime/base/progress.h"
#include "runtime/program/preference_run.h"
#include "runtime/program/run_common.h"
#include "runtime/program/run_record.h"
#include "runtime/program/run_result.h"
#include "runtime/program/run_summary.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

class HeldOut {
 public:
  // All outlive this. What is found goes into record and summary. Throws Exception (kind usage) if options need
  // held-out sequences and there are none.
  HeldOut(const TrainOptions& options, const Dataset& data, const PreferenceRun& preference, RunResult& result,
          TrainingLog& log, RunRecord& record, RunSummary& summary);

  // Continues with the record that came with the session's state, if there is one.
  void recall(const Session& session);
  // The record goes with the session's next commit.
  void remember(Session& session);
  // Sets `loss` if there are sequences to evaluate. Before the first step a signal ends it: it then throws Stopped.
  void evaluate(Session& session, std::int64_t step, double& loss);
  // After step `step`: evaluates and keeps the model, where that is due and was not done before. begun: the step of the
  // state with which this process began.
  void between_steps(Session& session, std::int64_t step, std::int64_t begun);
  // Whether it may write a model after `step`.
  bool may_write(std::int64_t step) const;
  // Whether the last evaluation was of the model after `step`.
  bool evaluated(std::int64_t step) const { return evaluated_at_ == step; }
  bool stops_early() const;
  // Call it after the last evaluation. usable: there is a result.
  void say_best(std::int64_t step, bool usable) const;

 private:
  std::int64_t sequences() const;  // in an evaluation
  Evaluation evaluate_sequences(Session& session, std::int64_t count, const Progress& progress) const;

  const TrainOptions& options_;
  const Dataset& data_;
  const PreferenceRun& preference_;
  RunResult& result_;
  TrainingLog& log_;
  RunRecord& record_;
  RunSummary& summary_;
  std::int64_t evaluated_at_ =
      0;  // the step of the last evaluation, those at the beginning and end of the run included
};

}  // namespace tierflow
