#pragma once
// Time that has passed.
#include <chrono>

namespace tierflow {

inline double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace tierflow
