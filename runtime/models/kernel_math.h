#pragma once
// What the CPU's row kernels share besides their arithmetic (row_math.h). Only their .cpp files include it.
#include <cstdint>

#include "runtime/models/row_math.h"

// One version of a function for each instruction set, chosen when the program starts (sanitizers' start-up does not
// stand that).
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TIERFLOW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIERFLOW_CLONES
#endif

namespace tierflow::models::kernels {

template <class Term>
TIERFLOW_INLINE float sum_lanes(std::int64_t n, Term term) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  }
  for (std::int64_t j = 0; i < n; ++i, ++j) lanes[j] += term(i);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

}  // namespace tierflow::models::kernels
