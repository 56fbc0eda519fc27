#pragma once
// The learning rate of each step, as transformers.get_scheduler has it.
#include <cstdint>
#include <string>

namespace tierflow {

struct Schedule {
  double lr = 1e-5;  // the highest
  std::string kind =
      "constant";           // after the warmup: "constant", or "linear" or "cosine", which fall to 0 in the last step
  std::int64_t warmup = 0;  // steps in which it rises linearly from 0
  std::int64_t steps = 0;   // of the whole run; "constant" does not need it

  // The learning rate of the step that follows `done` steps.
  double after(std::int64_t done) const;
};

// Throws Exception (kind usage) for what is no number, 0 or more.
void check_learning_rate(double lr);
// Throws Exception (kind usage) for such a learning rate, another kind, a warmup or steps below 0, and if the number of
// steps is needed and missing.
void check_schedule(const Schedule& schedule);

}  // namespace tierflow
