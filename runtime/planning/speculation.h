#pragma once
// When a step that clips is speculative (swap/planner.h): where its plan is faster, storage is written at most a tenth
// more than by a staged step, and the norm is not likely to clip. A wrong guess costs about a step, and never a bit of
// the result. No torch here.
#include <array>
#include <string>

#include "runtime/planning/session_plan.h"

namespace tierflow {

inline constexpr int kNormsSeen = 8;           // of a run's steps, before the first speculative one
inline constexpr double kShareOfClip = 0.75;   // all of them are at most so much of the clip
inline constexpr int kStepsAfterUndoing = 16;  // that are staged

// The norms of the last steps. A run that goes on begins without any.
class NormHistory {
 public:
  explicit NormHistory(double clip) : most_(kShareOfClip * clip) {}
  // A step ended: its norm before clipping; undone: it was speculative, and its norm clipped or was not finite.
  void add(double norm, bool undone);
  // Whether the next step is likely not to clip.
  bool likely() const;

 private:
  const double most_;
  std::array<double, kNormsSeen> norms_{};  // round robin
  int seen_ = 0, wait_ = 0;
};

// Why every step of a run that clips is staged, whatever a speculative one would take: one line's worth of text. Empty:
// it need not be.
std::string why_staged(const SessionPlan& plan, const ModelSpec& spec);

}  // namespace tierflow
