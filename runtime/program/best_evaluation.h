#pragma once
#include <cmath>
#include <cstdint>

namespace tierflow {

// The best of a run's evaluations, and how many in a row were no better, as transformers' EarlyStoppingCallback counts.
struct BestEvaluation {
  double loss = NAN;       // NaN before the first that is finite
  std::int64_t step = 0;   // 0: none
  std::int64_t since = 0;  // evaluations in a row that were not lower by more than the threshold

  // Whether it is the best so far.
  bool take(std::int64_t at_step, double found, double threshold) {
    const double least = std::isfinite(loss) ? loss : INFINITY;
    since = found < least - threshold ? 0 : since + 1;
    if (!(found < least)) return false;
    loss = found;
    step = at_step;
    return true;
  }
};

}  // namespace tierflow
