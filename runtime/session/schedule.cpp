#include "runtime/session/schedule.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/exception.h"

namespace tierflow {

double Schedule::after(std::int64_t done) const {
  const auto at = static_cast<double>(done), rising = static_cast<double>(warmup);
  if (at < rising) return lr * at / rising;
  if (kind == "constant") return lr;
  const double share = (at - rising) / std::max(1.0, static_cast<double>(steps) - rising);
  if (kind == "linear") return lr * std::max(0.0, 1.0 - share);
  return lr * 0.5 * (1.0 + std::cos(M_PI * std::min(1.0, share)));
}

void check_learning_rate(double lr) {
  if (!(lr >= 0) || !std::isfinite(lr)) fail_usage("a learning rate is a number, 0 or more, not " + std::to_string(lr));
}

void check_schedule(const Schedule& schedule) {
  check_learning_rate(schedule.lr);
  if (schedule.kind != "constant" && schedule.kind != "linear" && schedule.kind != "cosine")
    fail_usage("the schedule \"" + schedule.kind + "\" is none of constant, linear, cosine");
  if (schedule.steps < 0) fail_usage("a run has 0 steps or more");
  if (schedule.warmup < 0) fail_usage("a warmup has 0 steps or more");
  if (schedule.kind != "constant" && schedule.steps < 1)
    fail_usage("the schedule \"" + schedule.kind + "\" asks for the steps of the whole run");
}

}  // namespace tierflow
