#pragma once
// Limits for the numbers of a config.json: far above any known model, and far below the point where a product of two
// overflows.
#include <cstdint>

namespace tierflow::limits {

inline constexpr std::int64_t hidden = 1 << 20;
inline constexpr std::int64_t intermediate = 1 << 23;
inline constexpr std::int64_t layers = 4096;
inline constexpr std::int64_t heads = 1 << 16;
inline constexpr std::int64_t experts = 1 << 13;
inline constexpr std::int64_t experts_of_all_layers = 1 << 17;
inline constexpr std::int64_t vocab = 1 << 26;
inline constexpr std::int64_t positions = 1 << 28;
inline constexpr std::int64_t parameters = std::int64_t{1} << 44;

}  // namespace tierflow::limits
