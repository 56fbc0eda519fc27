#pragma once
// Corrects the profile that predicted a run's steps, by what these steps took. No torch here.
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
  // The profile with which the prediction would have been right.
  std::optional<Profile> corrected;
  std::string line;  // for the user; empty if the prediction was good enough
};

// The profile stays as it is if the prediction is within a sixth of the median step. It also stays if the steps can be
// trusted less than the profile: they vary much, or other programs took more of the cores (`other_cores`) than while
// the profile was measured. Otherwise the rates of whole lanes are changed until each lane's predicted time is the
// measured one. Needs a few steps.
Verdict judge(const ModelSpec& spec, const SessionPlan& plan, const Profile& profile,
              const std::vector<StepShown>& steps, double other_cores);

}  // namespace tierflow
