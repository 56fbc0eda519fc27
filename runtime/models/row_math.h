#pragma once
// The arithmetic of the row kernels, element by element, for host and device: one source, so that the kernels of a CUDA
// device (row_lanes.h) have the bits of the CPU's (kernels.cpp). IEEE operations alone, each rounded once, in the order
// written here. bf16 travels as std::uint16_t.
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TIERFLOW_INLINE __host__ __device__ __forceinline__
#else
#define TIERFLOW_INLINE inline __attribute__((always_inline))
#endif

namespace tierflow::models::kernels {

// Independent partial sums, so that a reduction vectorises and its order is fixed on every instruction set; the lanes
// of a warp.
constexpr std::int64_t kLanes = 32;
// Exponentials add up in fp32 within this many, in double from one such stretch to the next.
constexpr std::int64_t kStretch = 4096;

TIERFLOW_INLINE float wide(std::uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

// Nearest, ties to even; a NaN stays one.
TIERFLOW_INLINE std::uint16_t narrow(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
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
  const std::uint32_t exponent =
      (__builtin_bit_cast(std::uint32_t, shifted) - __builtin_bit_cast(std::uint32_t, kShift)) << 23;
  const float scaled = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, p) + exponent);
  return x < -87.3F ? 0.0F : (x != x ? x : scaled);
}

TIERFLOW_INLINE std::uint16_t sum_of(std::uint16_t a, std::uint16_t b) {
  return narrow(wide(a) + wide(b));
}

// 1 / sqrt(mean of squares + eps).
TIERFLOW_INLINE float rstd_of(float squares, std::int64_t n, float eps) {
  return 1.0F / ::sqrtf(squares / static_cast<float>(n) + eps);
}

// RMSNorm by RmsRule: its result, a token's share of the weight's gradient, and the gradient of x. `pull` is the term
// that all gradients of a row have in common.
template <bool RoundedFirst>
TIERFLOW_INLINE std::uint16_t normed(std::uint16_t x, std::uint16_t w, float r, float offset) {
  return RoundedFirst ? narrow(wide(w) * wide(narrow(wide(x) * r))) : narrow((offset + wide(w)) * (wide(x) * r));
}
template <bool RoundedFirst>
TIERFLOW_INLINE float weight_share(std::uint16_t d, std::uint16_t x, float r) {
  return wide(d) * (RoundedFirst ? wide(narrow(wide(x) * r)) : wide(x) * r);
}
TIERFLOW_INLINE float pulled(std::uint16_t d, std::uint16_t w, std::uint16_t x, float offset) {
  return wide(d) * (offset + wide(w)) * wide(x);
}
TIERFLOW_INLINE float pull_of(float dot, float r, std::int64_t n) {
  return dot * r * r / static_cast<float>(n);  // mean(d w xhat) * rstd
}
TIERFLOW_INLINE float norm_gradient(std::uint16_t d, std::uint16_t w, std::uint16_t x, float r, float pull,
                                    float offset) {
  return r * (wide(d) * (offset + wide(w)) - wide(x) * pull);
}

// A pair that turns by an angle; `turn` is its sine, with the sign of the direction.
struct RotatedPair {
  std::uint16_t low, high;
};
TIERFLOW_INLINE RotatedPair rotated(std::uint16_t low, std::uint16_t high, float cos, float turn) {
  const float a = wide(low), b = wide(high);
  return {narrow(a * cos - b * turn), narrow(b * cos + a * turn)};
}

TIERFLOW_INLINE std::uint16_t swiglu_of(std::uint16_t gate, std::uint16_t up) {
  const float g = wide(gate);
  return narrow(g / (1.0F + exp_fast(-g)) * wide(up));
}
struct GatedGradient {
  std::uint16_t gate, up, out;  // out: silu(gate) * up again
};
TIERFLOW_INLINE GatedGradient swiglu_gradient(std::uint16_t gate, std::uint16_t up, std::uint16_t d_out) {
  const float g = wide(gate), u = wide(up), d = wide(d_out);
  const float sigmoid = 1.0F / (1.0F + exp_fast(-g));
  const float silu = g * sigmoid;
  return {narrow(d * u * (sigmoid + silu * (1.0F - sigmoid))), narrow(d * silu), narrow(silu * u)};
}

// gelu(gate) * up of the approximation by a hyperbolic tangent, whose half is the logistic function of twice its
// argument. gelu(gate) is rounded before it multiplies, as torch's operations round it.
struct Gelu {
  float open, slope;  // gelu(x) = x * open, and its derivative
};
TIERFLOW_INLINE Gelu gelu_of(float x) {
  constexpr float kTwice = 1.59576912160573071F, kCubic = 0.044715F;  // 2 sqrt(2 / pi)
  const float square = x * x;
  const float closing = -kTwice * (x + kCubic * (square * x));
  const float open = closing > 87.0F ? 0.0F : 1.0F / (1.0F + exp_fast(closing));
  return {open, open + x * (open * (1.0F - open)) * (kTwice * (1.0F + 3.0F * kCubic * square))};
}
TIERFLOW_INLINE std::uint16_t geglu_of(std::uint16_t gate, std::uint16_t up) {
  const float g = wide(gate);
  return narrow(wide(narrow(g * gelu_of(g).open)) * wide(up));
}
TIERFLOW_INLINE GatedGradient geglu_gradient(std::uint16_t gate, std::uint16_t up, std::uint16_t d_out) {
  const float g = wide(gate), u = wide(up), d = wide(d_out);
  const Gelu gelu = gelu_of(g);
  const float active = wide(narrow(g * gelu.open));
  return {narrow(wide(narrow(d * u)) * gelu.slope), narrow(d * active), narrow(active * u)};
}

TIERFLOW_INLINE std::uint16_t softmax_share(std::uint16_t logit, float most, float factor) {
  return narrow(exp_fast(wide(logit) - most) * factor);
}
// Of a row with the largest logit `most` and the sum of exponentials `total`: the loss, and the label's gradient.
TIERFLOW_INLINE double loss_of(double total, float most, std::uint16_t at_label) {
  return ::log(total) + static_cast<double>(most) - static_cast<double>(wide(at_label));
}
TIERFLOW_INLINE std::uint16_t label_gradient(double loss, float scale) {
  return narrow(static_cast<float>((::exp(-loss) - 1.0) * static_cast<double>(scale)));
}
// The same from factors of softmax_gradient().
TIERFLOW_INLINE std::uint16_t label_gradient(std::uint16_t at_label, const double* factors) {
  const double share = ::exp(static_cast<double>(wide(at_label)) - factors[0]) * factors[1] - factors[2];
  return narrow(static_cast<float>(share));
}

}  // namespace tierflow::models::kernels
