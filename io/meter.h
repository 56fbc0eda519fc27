#pragma once
// Counts what one drive did. Not thread-safe: the volume guards it.
#include <chrono>

#include "io/engine.h"
#include "io/histogram.h"
#include "io/volume.h"

namespace tierflow::io {

class Meter {
 public:
  explicit Meter(std::filesystem::path directory) { sums_.directory = std::move(directory); }

  void start();  // a read or write went to the kernel
  void end(const Outcome& outcome);
  DriveStats stats() const;

 private:
  using Clock = Engine::Clock;

  DriveStats sums_;
  Histogram read_, write_, flush_;
  std::chrono::nanoseconds waited_{0};  // of all reads and writes together
  Clock::time_point busy_since_;
};

}  // namespace tierflow::io
