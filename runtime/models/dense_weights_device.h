#pragma once
// dequantise() of a whole tensor on a CUDA device, enqueued and not waited for: the same bits.
#include <cstddef>
#include <cstdint>

#include "runtime/spec/weight_format.h"

namespace tierflow::models {

// `stream`: a cudaStream_t of the device, whose memory `stored` and `words` point to; 4 divides the address of the
// first and 16 that of the second. What CUDA refuses, and every call in a build without it, throws Exception
// (environment).
void dense_on_device(WeightFormat format, const WeightLayout& layout, const std::byte* stored, std::uint16_t* words,
                     int device, void* stream);

}  // namespace tierflow::models
