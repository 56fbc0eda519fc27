#pragma once
// Arithmetic of the formats, element by element, for host and device: the dynamic 8-bit code, the hi/lo master, bf16,
// the rounding generator. Everything else in this folder (vector kernels, a device kernel) must give the bits that
// these functions give. Only IEEE operations are used (fma, multiply, divide), round to nearest even, subnormal numbers
// kept.
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TIERFLOW_HD __host__ __device__ inline
#define TIERFLOW_LANES __device__ inline  // what lanes do together: on the device where there is one, else on the host
#else
#define TIERFLOW_HD inline
#define TIERFLOW_LANES inline
#endif

namespace tierflow::optim {

TIERFLOW_HD std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TIERFLOW_HD float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The master's halves. hi = top half rounded to nearest, ties up in bits. The pair (hi, lo) is a bijection of all 2^32
// patterns (arithmetic modulo 2^32). A float that rounds beyond the largest bf16 gets hi = infinity. NaN patterns with
// the top payload bits and a high low half (0x7fff8000 and up), which no arithmetic produces, wrap: joining restores
// them, but hi alone reads as a zero.

TIERFLOW_HD std::uint16_t hi_of(std::uint32_t bits) {
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}
TIERFLOW_HD std::uint16_t lo_of(std::uint32_t bits) {
  return static_cast<std::uint16_t>(bits & 0xffffU);
}
TIERFLOW_HD std::uint32_t joined(std::uint16_t hi, std::uint16_t lo) {
  return ((static_cast<std::uint32_t>(hi) - (lo >> 15)) << 16) | lo;
}

TIERFLOW_HD float widened(std::uint16_t bf16) {
  return float_of(static_cast<std::uint32_t>(bf16) << 16);
}

// The hi rule for a number that stands alone: as hi_of, but every NaN stays a NaN (quiet, sign kept).
TIERFLOW_HD std::uint16_t narrowed(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return hi_of(bits);
}

// Stochastic rounding, by a counter-based generator: the value depends only on (key, step, element). The 32-bit stage
// is Wellons' two-round xor-multiply permutation "lowbias32" with a second key between its rounds; keys come from the
// splitmix64 finalizer (Steele, Lea, Flood 2014).

struct RoundingKey {
  std::uint32_t before = 0, between = 0;
};

TIERFLOW_HD std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The key of the 2^32 elements that share `element >> 32`.
TIERFLOW_HD RoundingKey rounding_key(std::uint64_t key, std::uint64_t step, std::uint64_t element) {
  const std::uint64_t k = mixed(mixed(mixed(key) ^ step) ^ (element >> 32));
  return {static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(k >> 32)};
}

// 16 random bits of the element whose low 32 index bits are `element`.
TIERFLOW_HD std::uint32_t rounding_bits(RoundingKey key, std::uint32_t element) {
  std::uint32_t x = element ^ key.before;
  x = (x ^ (x >> 16)) * 0x7feb352dU ^ key.between;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x >> 16;
}

// bf16 neighbour of `value` away from zero with probability equal to the fraction cut off. NaN stays NaN, infinity
// stays itself.
TIERFLOW_HD std::uint16_t stochastically_narrowed(float value, std::uint32_t random16) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7f800000U) == 0x7f800000U) return narrowed(value);
  return static_cast<std::uint16_t>((bits + random16) >> 16);
}

// The dynamic 8-bit code of Dettmers et al. 2022 (8-bit optimizers via block-wise quantization), as bitsandbytes stores
// it: 256 numbers in ascending order. [0.1, 1) in each of the seven decades i = 0 (times 1e-6) .. 6 (times 1) is cut in
// 2^i (signed) or 2^(i+1) (unsigned) equal cells, and the middle of each cell is a code's value; 0 and 1 complete the
// map. Signed: code 127 is 0, 127 + p and 127 - p are plus and minus the p-th magnitude, 255 is 1, and there is no -1.
// Unsigned: code c is the c-th magnitude, 255 is 1.
//
// With "mark" q = 2p + 1 (signed) or 2c + 3 (unsigned), the binary exponent of q names the decade and its fraction f
// the place in the decade: the magnitude is 10^(i-7) (1 + 9 f).

inline constexpr int kZeroCodeSigned = 127;
inline constexpr float kSmallestAbsmax = 0x1p-96F;  // a block whose absmax is below holds zeros

// Power-of-ten factor of the decade of a mark: exponent 0 is zero, `kTopExponent` is one.
TIERFLOW_HD float decade_factor(int i) {
  switch (i) {
    case 0:
      return 1e-7F;
    case 1:
      return 1e-6F;
    case 2:
      return 1e-5F;
    case 3:
      return 1e-4F;
    case 4:
      return 1e-3F;
    case 5:
      return 1e-2F;
    case 6:
      return 1e-1F;
    case 7:
      return 1.0F;
    default:
      return 0.0F;
  }
}

// Magnitude of mark `q` times absmax: (9 g - 8) * (10^(i-7) * absmax) with g = 1 + f, each product rounded once; 9 g -
// 8 is exact.
template <bool Signed>
TIERFLOW_HD float magnitude_of_mark(int q, float absmax) {
  const std::uint32_t bits = bits_of(static_cast<float>(q));
  const int decade = static_cast<int>(bits >> 23) - 127 - (Signed ? 1 : 2);
  const float g = float_of((bits & 0x7fffffU) | 0x3f800000U);
  return ::fmaf(9.0F, g, -8.0F) * (decade_factor(decade) * absmax);
}

template <bool Signed>
TIERFLOW_HD float decoded(std::uint8_t code, float absmax) {
  if constexpr (Signed) {
    const int p = code - kZeroCodeSigned;
    const int q = p < 0 ? 1 - 2 * p : 1 + 2 * p;
    const float magnitude = magnitude_of_mark<true>(q < 256 ? q : 256, absmax);
    return p < 0 ? -magnitude : magnitude;
  } else {
    const int q = 2 * code + 3;
    return magnitude_of_mark<false>(q < 512 ? q : 512, absmax);
  }
}

// THE RULE for the nearest code. x = |value| * (1 / absmax), both operations rounded. Decade i begins at edge(i), the
// float nearest to the midpoint between the last value of decade i-1 and the first of decade i (edge(0): between 0 and
// the first value; edge(7): between the last value and 1). A number on an edge belongs above it. Within decade i the
// rank is floor(fma(x, slope(i), offset(i))), not more than the last rank of the decade: the cell that x lies in, and
// cells are the nearest-value regions. So ties go to the larger magnitude, and each boundary is within 2^-15 of a cell
// of the exact midpoint. The signed map has magnitudes 0..128, the unsigned map 0..255; a negative number never gets
// 128.
template <bool Signed>
struct Cells {
  static constexpr double kCells0 = Signed ? 1.0 : 2.0;  // cells of decade 0
  static constexpr int kTop = Signed ? 128 : 255;
  static constexpr int kShift = Signed ? 0 : 1;  // ranks of decade 0 begin at 1 in both maps

  TIERFLOW_HD static constexpr double power_of_ten(int exponent) {
    double power = 1;
    for (int i = 0; i < (exponent < 0 ? -exponent : exponent); ++i) power *= 10;
    return exponent < 0 ? 1 / power : power;
  }
  TIERFLOW_HD static constexpr double cells(int i) { return kCells0 * static_cast<double>(1 << i); }
  TIERFLOW_HD static constexpr float edge(int i) {
    if (i == 0) return static_cast<float>(0.5e-6 * (0.1 + 0.45 / kCells0));
    if (i == 7) return static_cast<float>(1 - 0.225 / cells(6));
    return static_cast<float>((1 + 0.9 / cells(i - 1)) / power_of_ten(7 - i));
  }
  TIERFLOW_HD static constexpr float slope(int i) { return static_cast<float>(cells(i) * power_of_ten(6 - i) / 0.9); }
  TIERFLOW_HD static constexpr float offset(int i) { return static_cast<float>(cells(i) * 8 / 9 - kShift); }
  TIERFLOW_HD static constexpr float last(int i) {
    return static_cast<float>(2 * cells(i) - 1 - kShift);
  }  // the rank of the last cell
};

template <bool Signed>
TIERFLOW_HD int rank_of(float x) {
  using C = Cells<Signed>;
  constexpr float edges[8] = {C::edge(0), C::edge(1), C::edge(2), C::edge(3),
                              C::edge(4), C::edge(5), C::edge(6), C::edge(7)};
  constexpr float slopes[7] = {C::slope(0), C::slope(1), C::slope(2), C::slope(3),
                               C::slope(4), C::slope(5), C::slope(6)};
  constexpr float offsets[7] = {C::offset(0), C::offset(1), C::offset(2), C::offset(3),
                                C::offset(4), C::offset(5), C::offset(6)};
  constexpr float lasts[7] = {C::last(0), C::last(1), C::last(2), C::last(3), C::last(4), C::last(5), C::last(6)};
  if (x < edges[0]) return 0;
  if (x >= edges[7]) return C::kTop;
  float slope = slopes[0], offset = offsets[0], last = lasts[0];
  for (int i = 1; i < 7; ++i) {  // selections, not indices: a device keeps these numbers in its instructions
    slope = x >= edges[i] ? slopes[i] : slope;
    offset = x >= edges[i] ? offsets[i] : offset;
    last = x >= edges[i] ? lasts[i] : last;
  }
  const float line = ::fmaf(x, slope, offset);
  return static_cast<int>(line < last ? line : last);
}

// 1 / absmax, or 0 for a block of zeros.
TIERFLOW_HD float inverse_absmax(float absmax) {
  return absmax < kSmallestAbsmax ? 0.0F : 1.0F / absmax;
}

template <bool Signed>
TIERFLOW_HD std::uint8_t encoded(float value, float inverse) {
  const int rank = rank_of<Signed>(::fabsf(value) * inverse);
  if constexpr (Signed) {
    const int code = value < 0 ? kZeroCodeSigned - rank : kZeroCodeSigned + rank;
    return static_cast<std::uint8_t>(code < 0 ? 0 : code);
  } else {
    return static_cast<std::uint8_t>(rank);
  }
}

}  // namespace tierflow::optim
