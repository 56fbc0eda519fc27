// The calls that read or write a stream once and need no instruction set of their own.
#include <algorithm>

#include "optim/kernels.h"

namespace tierflow::optim {

bool all_within(const std::uint16_t* gradient, std::size_t n, float scale) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, gradient[i] & 0x7fffU);
  return within(largest, scale);
}

void split_master(const float* master, std::uint16_t* hi, std::uint16_t* lo, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t bits = bits_of(master[i]);
    hi[i] = hi_of(bits);
    lo[i] = lo_of(bits);
  }
}

void join_master(const std::uint16_t* hi, const std::uint16_t* lo, float* master, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) master[i] = float_of(joined(hi[i], lo[i]));
}

}  // namespace tierflow::optim
