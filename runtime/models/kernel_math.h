#pragma once
// Arithmetic that the row kernels share. Included by their .cpp files alone.
#include <bit>
#include <cmath>
#include <cstdint>

// One version of a function for each instruction set, chosen when the program starts (sanitizers' start-up does not
// stand that).
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TIERFLOW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIERFLOW_CLONES
#endif

#define TIERFLOW_INLINE inline __attribute__((always_inline))

namespace tierflow::models::kernels {

// Independent partial sums, so that a reduction vectorises and its order is fixed on every instruction set.
constexpr std::int64_t kLanes = 32;

TIERFLOW_INLINE float wide(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Nearest, ties to even; a NaN stays one.
TIERFLOW_INLINE std::uint16_t narrow(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

// e^x within 2 ulp for x <= 88: 2^n times the Taylor polynomial of the rest, |rest| <= ln(2)/2; 0 below -87.3. A NaN
// stays one.
TIERFLOW_INLINE float exp_fast(float x) {
  constexpr float kLog2e = 1.44269504088896341F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.3F ? -87.3F : (x > 88.0F ? 88.0F : x);
  const float shifted = clamped * kLog2e + kShift;
  const float n = shifted - kShift;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kShift)) << 23;
  const float scaled = std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + exponent);
  return x < -87.3F ? 0.0F : (x != x ? x : scaled);
}

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
