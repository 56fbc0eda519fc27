// Speculative steps of a session: when there is one, whether it stands, and how it is undone (swap/planner.h).
#include <algorithm>

#include "runtime/session/session_impl.h"

namespace tierflow {

const char* clipping_name(Clipping clipping) {
  static constexpr const char* kNames[] = {"none", "staged", "speculative", "undone"};
  return kNames[static_cast<int>(clipping)];
}

bool Session::Impl::next_is_likely_not_to_clip() const {
  return norms && (options.speculation == Speculation::always || norms->likely());
}

double Session::Impl::clip_scale(double norm) const {
  return options.clip && norm > 0 ? std::min(1.0, *options.clip / (norm + 1e-6)) : 1.0;
}

// Its updates took the scale to be one, as a staged one's would be: rounded to what an update takes.
bool Session::Impl::stands(const OptimizerWork& work) const {
  if (work.skips_updates() && work.updated_at_once() == 0) return true;
  return !out_of_memory && work.finite() && static_cast<float>(clip_scale(work.gradient_norm())) == 1.0F;
}

// What it began with is the newest durable generation by now.
void Session::Impl::undo() {
  throw_if(executor().drain());
  throw_if(store->go_back());
  executor().append(planner->undo(), nullptr);
  throw_if(executor().drain());
}

}  // namespace tierflow
