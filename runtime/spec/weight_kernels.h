#pragma once
// The loops of weight_format.cpp, on vectors of the best instruction set that this processor has. Same bits on all.
#include <cstddef>
#include <cstdint>

namespace tierflow::weights {

// Whole blocks. False where a value is not finite; codes and absmax mean nothing then.
bool encode_nf4(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax);
bool encode_int8(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax);

inline constexpr std::size_t kMostBlocks = 64;  // of one call of decode_nf4
void decode_nf4(const std::uint8_t* codes, const float* absmax, std::size_t blocks, std::uint16_t* words);
// n elements of one scale.
void decode_int8(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words);
void decode_e4m3(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words);
// n elements, an even number, each with a scale of its own.
void decode_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t n, std::uint16_t* words);

}  // namespace tierflow::weights
