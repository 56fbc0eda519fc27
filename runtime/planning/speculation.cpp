#include "runtime/planning/speculation.h"

#include <algorithm>

#include "runtime/base/machine.h"
#include "runtime/spec/adapters.h"

namespace tierflow {

namespace {
constexpr std::uint64_t kMoreWritten = 10;  // of this many parts one more: what a drive's wear is worth
}

void NormHistory::add(double norm, bool undone) {
  norms_[static_cast<std::size_t>(seen_ % kNormsSeen)] = norm;
  seen_ = seen_ == 2 * kNormsSeen - 1 ? kNormsSeen : seen_ + 1;
  wait_ = undone ? kStepsAfterUndoing : std::max(0, wait_ - 1);
}

bool NormHistory::likely() const {
  // A norm that is no number is not small.
  return wait_ == 0 && seen_ >= kNormsSeen && std::ranges::all_of(norms_, [&](double norm) { return norm <= most_; });
}

std::string why_staged(const SessionPlan& plan, const ModelSpec& spec) {
  if (plan.commit_every == 0)
    return "no second copy of the state is kept to which a step could go back (--storage, --durability)";
  if (begins_with_gradient(spec) || window_steps(spec) != 0) return "its method takes gradients ahead of steps";
  // A speculative step commits what it begins with, and writes no gradients.
  const WriteCost& writes = plan.writes;
  if (plan.commit_every != 1 && writes.commit > writes.gradients + writes.step() / kMoreWritten)
    return "speculative steps would write " + human_bytes(writes.commit) +
           " of what RAM and the device hold to storage, staged ones write " + human_bytes(writes.gradients) +
           " of gradients";
  return {};
}

}  // namespace tierflow
