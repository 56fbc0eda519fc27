#pragma once
// Literals for sizes in bytes: 24_GiB.
#include <cstdint>

namespace tierflow {

inline namespace literals {
constexpr std::uint64_t operator""_KiB(unsigned long long n) {
  return n << 10;
}
constexpr std::uint64_t operator""_MiB(unsigned long long n) {
  return n << 20;
}
constexpr std::uint64_t operator""_GiB(unsigned long long n) {
  return n << 30;
}
constexpr std::uint64_t operator""_TiB(unsigned long long n) {
  return n << 40;
}
}  // namespace literals

}  // namespace tierflow
