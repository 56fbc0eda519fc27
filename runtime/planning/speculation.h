#pragma once
// Decides when a step with clipping is speculative (swap/planner.h): if its plan is faster, if it writes at most a
// tenth more to storage than a staged step, and if the norm will probably not clip. A wrong guess costs about the time
// of a step, and changes no bit of the result. No torch here.
#include <array>
#include <string>

#include "runtime/planning/session_plan.h"

namespace tierflow {

inline constexpr int kNormsSeen = 8;           // steps of this process before the first speculative one
inline constexpr double kShareOfClip = 0.75;   // the norms must be at most this share of the clip
inline constexpr int kStepsAfterUndoing = 16;  // steps that are staged after an undone one

// The norms of the last steps. A resumed run begins without any.
class NormHistory {
 public:
  explicit NormHistory(double clip) : most_(kShareOfClip * clip) {}
  // A step ended: its norm before clipping; undone: it was speculative, and its norm clipped or was not finite.
  void add(double norm, bool undone);
  // Whether the next step will probably not clip.
  bool likely() const;

 private:
  const double most_;
  std::array<double, kNormsSeen> norms_{};  // round robin
  int seen_ = 0, wait_ = 0;
};

// Why every step of a run with clipping must be staged, whatever time a speculative one would take. The text fits one
// line. Empty: speculative steps are possible.
std::string why_staged(const SessionPlan& plan, const ModelSpec& spec);

}  // namespace tierflow
