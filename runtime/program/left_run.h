#pragma once
// Finds what an earlier process left of this command's run: its result, or a state to resume from.
#include "runtime/planning/left_store.h"
#include "runtime/program/options.h"
#include "runtime/program/training_log.h"

namespace tierflow {

struct LeftRun {
  LeftStore store;
  Folders elsewhere;      // the folders in which the state lies, if it has to be moved
  bool finished = false;  // --out has the result of this command, or of one like it: there is nothing to do
};

// Looks, and ends what that process began: a move of the state, the removal of the state of a run whose result is whole
// or that ended before its first commit. Where the result is whole, a state of any other run stays. Says what it does.
// Throws Exception if what it finds is neither a result nor a state to resume from; of kind usage where --out holds the
// result of a run that is not this one, or of this one without --storage or with --fresh.
LeftRun find_left_run(const TrainOptions& options, TrainingLog& log);

}  // namespace tierflow
