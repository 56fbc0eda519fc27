#pragma once
// The numbers behind the codes of weight_format.h, and its arithmetic for one element. The kernels of every instruction
// set and device give the bits of these functions.
#include <bit>
#include <cstdint>

namespace tierflow::weights {

inline constexpr std::uint64_t kNf4Block = 64, kInt8Block = 256, kNestedBlock = 256, kFp8Tile = 128, kMxBlock = 32;
inline constexpr std::uint32_t kInfinity = 0x7f800000U, kMagnitude = 0x7fffffffU;  // bits of a float
inline constexpr std::uint16_t kNan = 0x7fc0;
inline constexpr float kSmallestDivisor = 1e-38F;  // bitsandbytes divides by no less

// A code is the number of `edges` below the value: the nearest entry, the lower one where two are as near.
template <int entries>
struct CodeMap {
  float at[entries] = {};
  float edges[entries - 1] = {};

  constexpr void find_edges() {
    for (int i = 0; i + 1 < entries; ++i) edges[i] = (at[i] + at[i + 1]) / 2;
  }
  constexpr std::uint8_t code(float value) const {
    int below = 0;
    for (int step = entries / 2; step > 0; step /= 2) below += static_cast<int>(edges[below + step - 1] < value) * step;
    return static_cast<std::uint8_t>(below);
  }
};

inline constexpr CodeMap<16> kNf4 = [] {
  CodeMap<16> map{.at = {-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F,
                         -0.28444138169288635F, -0.18477343022823334F, -0.09105003625154495F, 0.0F,
                         0.07958029955625534F, 0.16093020141124725F, 0.24611230194568634F, 0.33791524171829224F,
                         0.44070982933044434F, 0.5626170039176941F, 0.7229568362236023F, 1.0F}};
  map.find_edges();
  return map;
}();

// The signed dynamic map (Dettmers et al., 8-bit optimizers via block-wise quantization, 2022): in decade i of seven,
// the middles of 2^i equal cells of [0.1, 1] times 10^(i - 6), with both signs; and 0 and 1. The roundings are
// bitsandbytes': each end of a cell is counted from the nearer end of the decade and rounded once to a float.
inline constexpr CodeMap<256> kDynamic = [] {
  CodeMap<256> map;
  constexpr float kFactors[7] = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};
  int rank = 127;  // of zero
  for (int decade = 0; decade < 7; ++decade) {
    const int cells = 1 << decade;
    const double width = static_cast<double>((1.0F - 0.1F) / static_cast<float>(cells));
    const auto edge = [&](int i) {
      const bool nearer_first = i < (cells + 1) / 2;
      return static_cast<float>(nearer_first ? static_cast<double>(0.1F) + width * i : 1.0 - width * (cells - i));
    };
    for (int i = 0; i < cells; ++i) {
      const float middle = (edge(i) + edge(i + 1)) / 2 * kFactors[decade];
      ++rank;
      map.at[rank] = middle;
      map.at[254 - rank] = -middle;
    }
  }
  map.at[255] = 1;
  map.find_edges();
  return map;
}();

// To bf16, ties to even; any NaN becomes kNan.
inline constexpr std::uint16_t rounded(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & kMagnitude) > kInfinity) return kNan;
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

// To bf16, ties away from zero, as a store rounds the values of a folder; any NaN becomes kNan.
inline constexpr std::uint16_t rounded_away(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & kMagnitude) > kInfinity) return kNan;
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}

inline constexpr float e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fU, sign = (code & 0x80U) << 24;
  if (magnitude == 0x7fU) return std::bit_cast<float>(0x7fc00000U | sign);
  // The exponent moves from bias 7 to 127; below the smallest normal number 2^-6, eighths of that are left.
  const std::uint32_t bits = (magnitude << 20) + (120U << 23);
  const float value = magnitude < 8 ? std::bit_cast<float>(bits + (1U << 23)) - 0x1p-6F : std::bit_cast<float>(bits);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

// 2^(code - 127); infinity of 255.
inline constexpr float e8m0(std::uint8_t code) {
  return std::bit_cast<float>(code == 0 ? 1U << 22 : static_cast<std::uint32_t>(code) << 23);
}

// Of the low four bits: a sign, two bits of exponent, one of mantissa.
inline constexpr float e2m1(unsigned code) {
  constexpr float kMagnitudes[8] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const float magnitude = kMagnitudes[code & 7U];
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

}  // namespace tierflow::weights
