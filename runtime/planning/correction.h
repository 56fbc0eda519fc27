#pragma once
// What a run's steps say of the profile that predicted them. No torch here.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "runtime/planning/prediction.h"

namespace tierflow {

struct StepShown {
  double seconds = 0;
  std::array<double, swap::kLanes> busy_seconds{};  // of each lane
};

struct Verdict {
  // The profile with which the plan would have been predicted to take what it took.
  std::optional<Profile> corrected;
  std::string line;  // for the user; empty where the prediction stands
};

// The profile stands where the prediction is within a sixth of the median step, and where the steps can be trusted less
// than the profile: they lie far apart, or other programs took more of the cores (`other_cores`) than while it was
// measured. Else rates of whole lanes change, so that each lane takes what it took. Needs a few steps.
Verdict judge(const ModelSpec& spec, const SessionPlan& plan, const Profile& profile,
              const std::vector<StepShown>& steps, double other_cores);

}  // namespace tierflow
