#pragma once
// How long a piece of work takes, from repeats of it.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "runtime/base/seconds.h"

namespace tierflow {

struct Repeats {
  std::size_t fewest = 3, most = 60;
  double seconds = 0.25;  // all of them together with what prepares them, where the numbers allow
};

struct Reading {
  double seconds = 0;  // the median
  double spread = 0;   // between the quartiles, as a share of the median
};

// Of a list that is not empty.
inline Reading reading_of(std::vector<double> runs) {
  std::sort(runs.begin(), runs.end());
  const double median = runs[runs.size() / 2];
  const double apart = runs[runs.size() * 3 / 4] - runs[runs.size() / 4];
  return {.seconds = median, .spread = median > 0 ? apart / median : 0};
}

// `prepare` runs before each piece of work and is not timed.
template <class Prepare, class Work>
Reading repeat(const Repeats& repeats, Prepare prepare, Work work) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point first = Clock::now();
  std::vector<double> runs;
  while (runs.size() < repeats.fewest || (runs.size() < repeats.most && seconds_since(first) < repeats.seconds)) {
    prepare();
    const Clock::time_point started = Clock::now();
    work();
    runs.push_back(seconds_since(started));
  }
  return reading_of(std::move(runs));
}

}  // namespace tierflow
