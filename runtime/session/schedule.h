#pragma once
// The learning rate of each step.
#include <cstdint>
#include <string>

namespace tierflow {

struct Schedule {
  double lr = 1e-5;               // the highest
  std::string kind = "constant";  // behind the warmup: "constant", or "linear" or "cosine" to 0 in the last step
  std::int64_t warmup = 0;        // steps in which it rises from 0 in a line
  std::int64_t steps = 0;         // of the whole run; "constant" does not ask

  // Of the step that comes after so many.
  double after(std::int64_t done) const;
};

// Throws Exception (kind usage) for another kind, a warmup below 0, and a run whose steps are asked for and not known.
void check_schedule(const Schedule& schedule);

}  // namespace tierflow
