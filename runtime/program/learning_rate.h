#pragma once
// The schedules of --lr-schedule.
#include <cstdint>

#include "runtime/program/options.h"

namespace tierflow {

// Of step `step` of `steps`, from 0. The schedules of transformers.get_scheduler: linear warm-up from 0, then the named
// decay to 0 at the last step.
double learning_rate(const TrainOptions& options, std::int64_t step, std::int64_t steps);

}  // namespace tierflow
