#pragma once
// Measures how much of the processors other programs take.
#include <chrono>

namespace tierflow {

class LoadMeter {
 public:
  LoadMeter();  // starts now
  // Cores that other programs have taken since then, on average; 0 if the system does not say.
  double other_cores() const;

 private:
  const std::chrono::steady_clock::time_point started_;
  const double busy_, own_;  // processor seconds of everything, and of this process
};

}  // namespace tierflow
