#include "runtime/program/learning_rate.h"

#include <algorithm>
#include <cmath>

namespace tierflow {

double learning_rate(const TrainOptions& options, std::int64_t step, std::int64_t steps) {
  const auto done = static_cast<double>(step), warmup = static_cast<double>(options.warmup);
  const double lr = highest_lr(options);
  if (done < warmup) return lr * done / warmup;
  if (options.lr_schedule == "constant") return lr;
  const double share = (done - warmup) / std::max(1.0, static_cast<double>(steps) - warmup);
  if (options.lr_schedule == "linear") return lr * std::max(0.0, 1.0 - share);
  return lr * 0.5 * (1.0 + std::cos(M_PI * std::min(1.0, share)));
}

}  // namespace tierflow
