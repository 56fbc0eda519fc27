#pragma once
// How much of the processors other programs take while something is measured.
#include <chrono>

namespace tierflow {

class LoadMeter {
 public:
  LoadMeter();  // starts now
  // Cores that others took since then, on average; 0 where the system does not say.
  double other_cores() const;

 private:
  const std::chrono::steady_clock::time_point started_;
  const double busy_, own_;  // processor seconds of everything, and of this process
};

}  // namespace tierflow
