#pragma once
// What only a run with a preference loss has: pairs, and the log-probability of every answer under the reference, which
// is the model before the first step (with --adapter, with those adapters). If the reference is the base, steps compute
// them (LossRule::base_is_reference). Else they are computed once, in a pass over all pairs, and kept beside the state
// (reference_file.h), so that a resumed run has the same ones although its weights have changed.
#include <functional>
#include <string>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/models/layered_model.h"
#include "runtime/program/options.h"
#include "runtime/program/run_common.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"
#include "runtime/spec/loss_rule.h"

namespace tierflow {

class PreferenceRun {
 public:
  // data outlives this.
  PreferenceRun(const TrainOptions& options, const Dataset& data, bool base_is_reference);

  // Takes from the host's budget what the reference of all pairs needs, where it is computed before the first step.
  void set_aside(SessionOptions& session, const Say& say) const;
  // If the rule needs a reference: computes it, or takes that of the resumed state. Called before the first step or
  // evaluation. identity: of the run. Throws Exception (kind corruption) if the state has steps and its reference is
  // missing, damaged or another run's, Exception (kind numeric) if the reference is not finite, and Stopped. Whatever
  // ends the pass early discards the store.
  void set_reference(Session& session, const std::string& identity, TrainingLog& log);
  // As micro_batch() in data_batches.h, with the reference where one was set.
  MicroBatch batch(Sequences which, std::int64_t first, std::int64_t rows) const;
  // Over the first `rows` held-out sequences.
  PairTotals evaluate(Session& session, std::int64_t rows, const Progress& progress) const;

 private:
  std::vector<double> computed_reference(Session& session, TrainingLog& log) const;
  using Scored = std::function<void(std::int64_t first, const MicroBatch& batch, const HeadScores& scores)>;
  void score(Session& session, Sequences which, std::int64_t rows, const Scored& use,
             const Progress& progress = {}) const;

  const TrainOptions& options_;
  const Dataset& data_;
  const LossRule rule_;
  const std::int64_t rows_;        // of a micro-batch
  std::vector<double> reference_;  // by the number of the sequence
};

}  // namespace tierflow
