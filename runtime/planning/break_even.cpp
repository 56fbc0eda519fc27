#include "runtime/planning/break_even.h"

#include <algorithm>
#include <cmath>

namespace tierflow {
namespace {

// A lane's seconds in a step: once a step, and for each micro-batch.
struct LaneTime {
  double once = 0, each = 0;
};

LaneTime time_of(swap::Lane lane, const Prediction& prediction, int micro_batches) {
  const auto at = static_cast<std::size_t>(lane);
  const double busy = prediction.step.busy_seconds[at], bytes = static_cast<double>(prediction.bytes[at]);
  const double items = bytes == 0 ? 0 : busy * static_cast<double>(prediction.item_bytes[at]) / bytes;
  return {busy - items, items / micro_batches};
}

// Zeroing the gradients, before the first micro-batch.
double filling(const swap::Layout& layout, double rate) {
  double bytes = 0;
  for (std::size_t unit = 0; unit < layout.units().size(); ++unit)
    bytes += static_cast<double>(layout.gradient_bytes(static_cast<int>(unit)));
  return rate > 0 ? bytes / rate : 0;
}

}  // namespace

std::optional<BreakEven> break_even(const SessionPlan& plan, const Prediction& prediction, const swap::Rates& rates) {
  const int micro_batches = plan.arrangement.micro_batches;
  const double computing = prediction.step.busy_seconds[static_cast<std::size_t>(swap::Lane::compute)];
  const double once = std::min(computing, filling(*plan.layout, rates.machine.fill));
  const LaneTime compute{once, (computing - once) / micro_batches};
  BreakEven found;
  for (int each = 0; each < swap::kLanes; ++each) {
    const auto lane = static_cast<swap::Lane>(each);
    const LaneTime time = time_of(lane, prediction, micro_batches);
    const double ahead = time.once - compute.once, caught_up = compute.each - time.each;
    if (lane == swap::Lane::compute || ahead + time.each <= compute.each) continue;
    if (caught_up <= 0) return std::nullopt;
    constexpr double kRounding = 1e-6;
    const auto needed = static_cast<std::int64_t>(std::ceil(ahead / caught_up - kRounding));
    if (needed > found.micro_batches) found = {needed, lane};
  }
  return found;
}

}  // namespace tierflow
