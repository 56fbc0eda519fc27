#pragma once
// The steps of a session whose adapters are trained.
#include <vector>

#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {

inline constexpr int kSteps = 4;

struct Steps {
  std::vector<double> losses;
  std::vector<std::vector<float>> masters;
};

// Goes on up to that step: one that is committed beside the next one may be done again.
inline void train(Session& session, const SessionOptions& options, std::int64_t up_to, Steps& run) {
  while (session.steps() < up_to) {
    run.losses.resize(session.steps());
    run.losses.push_back(session.step(batches(options.micro_batches, static_cast<int>(session.steps())), 1e-2).loss);
  }
  run.masters = masters_of(session);
}

}  // namespace tierflow::testing
