#pragma once
// Makes bits that look random of any number: the last step of SplitMix64 (Steele, Lea, Flood 2014).
#include <cstdint>

namespace tierflow {

constexpr std::uint64_t mix_bits(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace tierflow
