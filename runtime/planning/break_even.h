#pragma once
// How many tokens a step needs so that streaming hides behind computation. No torch here.
#include <cstdint>
#include <optional>

#include "runtime/planning/prediction.h"

namespace tierflow {

struct BreakEven {
  std::int64_t micro_batches = 1;         // the fewest with which no lane is busy for longer than compute
  swap::Lane last = swap::Lane::compute;  // the lane that is hidden last; compute if one micro-batch hides them all
};

// An estimate for other numbers of micro-batches of the same size than `plan` has: compute and what is saved for items
// grow with them, while weights, state and gradients move once a step. With another number the budgets may really swap
// other items. Nothing if each micro-batch keeps a link busy for longer than compute.
std::optional<BreakEven> break_even(const SessionPlan& plan, const Prediction& prediction, const swap::Rates& rates);

}  // namespace tierflow
