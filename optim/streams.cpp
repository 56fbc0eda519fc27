// The calls that read or write a stream once: norms, and the halves of the master.
#include <algorithm>

#include "optim/kernels.h"

namespace tierflow::optim {

bool gradient_norm_squared(const std::uint16_t* gradient, std::size_t n, double* sums) {
  const FloatEnvironment environment;
  bool finite = true;
  for (std::size_t first = 0; first < n; first += kNormSegment) {
    const std::size_t count = std::min(kNormSegment, n - first);
    double partial[16] = {};
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double g = widened(gradient[first + i]);
      partial[i % 16] += g * g;
      largest = std::max(largest, gradient[first + i] & 0x7fffU);
    }
    for (std::size_t apart = 8; apart > 0; apart /= 2)
      for (std::size_t i = 0; i < apart; ++i) partial[i] += partial[i + apart];
    sums[first / kNormSegment] = partial[0];
    finite = finite && largest < 0x7f80U;
  }
  return finite;
}

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
