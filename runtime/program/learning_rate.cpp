#include "runtime/program/learning_rate.h"

#include "runtime/session/schedule.h"

namespace tierflow {

double learning_rate(const TrainOptions& options, std::int64_t step, std::int64_t steps) {
  return Schedule{.lr = highest_lr(options), .kind = options.lr_schedule, .warmup = options.warmup, .steps = steps}
      .after(step);
}

}  // namespace tierflow
