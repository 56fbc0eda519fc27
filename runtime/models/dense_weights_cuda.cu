// A thread widens eight elements, which it writes as sixteen bytes.
#include <cuda_runtime.h>

#include <string>

#include "runtime/base/exception.h"
#include "runtime/models/dense_weights_device.h"
#include "runtime/spec/weight_codes.h"

namespace tierflow::models {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kEach = 8;  // elements

// Not __constant__: that memory answers a warp with one address at a time.
__device__ const weights::CodeMap<16> nf4_map = weights::kNf4;
__device__ const weights::CodeMap<256> dynamic_map = weights::kDynamic;

// The arithmetic of weight_codes.h.
__device__ std::uint16_t rounded(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & weights::kMagnitude) > weights::kInfinity) return weights::kNan;
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

__device__ std::uint16_t rounded_away(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & weights::kMagnitude) > weights::kInfinity) return weights::kNan;
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}

__device__ float e4m3(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7fU, sign = (code & 0x80U) << 24;
  if (magnitude == 0x7fU) return __uint_as_float(0x7fc00000U | sign);
  const std::uint32_t bits = (magnitude << 20) + (120U << 23);
  const float small = __fsub_rn(__uint_as_float(bits + (1U << 23)), 0x1p-6F);
  return __uint_as_float(__float_as_uint(magnitude < 8 ? small : __uint_as_float(bits)) | sign);
}

__device__ float e8m0(std::uint32_t code) {
  return __uint_as_float(code == 0 ? 1U << 22 : code << 23);
}

__device__ float e2m1(std::uint32_t code) {
  const std::uint32_t magnitude = code & 7U, bits = (magnitude << 22) + (126U << 23);
  const float small = __fsub_rn(__uint_as_float(bits + (1U << 23)), 1.0F);
  return __uint_as_float(__float_as_uint(magnitude < 2 ? small : __uint_as_float(bits)) | (code & 8U) << 28);
}

struct Stored {
  const std::byte* bytes;
  WeightLayout at;

  __device__ std::uint32_t word(std::uint64_t at_byte) const {
    return *reinterpret_cast<const std::uint32_t*>(bytes + at_byte);
  }
  __device__ float number(std::uint64_t section, std::uint64_t index) const {
    return __uint_as_float(word(section + 4 * index));
  }
};

// `first` is a multiple of kEach. Codes beyond the end are padding, and what becomes of them is not written. All lanes
// of a warp come here together: of the codes of nf4, each lane holds the number of one.
template <WeightFormat format>
__device__ void widen(const Stored& stored, std::uint64_t first, float (&values)[kEach]) {
  const WeightLayout& at = stored.at;
  if constexpr (format == WeightFormat::nf4 || format == WeightFormat::nf4_double) {
    const std::uint64_t block = first / weights::kNf4Block;
    float absmax;
    if constexpr (format == WeightFormat::nf4) {
      absmax = stored.number(at.scales, block);
    } else {
      const auto q = static_cast<std::uint8_t>(stored.bytes[at.scales + block]);
      const float nested = stored.number(at.nested, block / weights::kNestedBlock);
      absmax = __fadd_rn(__fmul_rn(dynamic_map.at[q], nested), stored.number(at.offset, 0));
    }
    const std::uint32_t codes = stored.word(first / 2);
    const float own = nf4_map.at[threadIdx.x % 16];
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) {
      const unsigned shift = i / 2 * 8 + (i % 2 == 0 ? 4 : 0);  // the first of two is the upper half
      values[i] = __fmul_rn(__shfl_sync(0xffffffffU, own, static_cast<int>(codes >> shift & 15U)), absmax);
    }
  } else if constexpr (format == WeightFormat::int8) {
    const float scale = __fdiv_rn(stored.number(at.scales, first / weights::kInt8Block), 127.0F);
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) {
      const auto code = static_cast<std::int8_t>(stored.bytes[first + i]);
      values[i] = __fmul_rn(static_cast<float>(code), scale);
    }
  } else if constexpr (format == WeightFormat::mxfp4) {
    const std::uint32_t codes = stored.word(first / 2);
    std::uint64_t row = first / at.columns, column = first % at.columns;
#pragma unroll  // so that the values are registers
    for (unsigned i = 0; i < kEach; ++i) {
      if (first + i >= at.elements) continue;
      const auto scale =
          static_cast<std::uint8_t>(stored.bytes[at.scales + row / weights::kMxBlock * at.columns + column]);
      values[i] = __fmul_rn(e2m1(codes >> 4 * i & 15U), e8m0(scale));
      if (++column == at.columns) {
        column = 0;
        ++row;
      }
    }
  } else {
    const std::uint64_t rows = format == WeightFormat::fp8 ? weights::kFp8Tile : 1;  // of what has one scale
    const std::uint64_t columns = format == WeightFormat::fp8 ? weights::kFp8Tile : at.columns;
    const std::uint64_t across = (at.columns + columns - 1) / columns;
    std::uint64_t row = first / at.columns, column = first % at.columns;
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) {
      if (first + i >= at.elements) continue;
      const float scale = stored.number(at.scales, row / rows * across + column / columns);
      values[i] = __fmul_rn(e4m3(static_cast<std::uint8_t>(stored.bytes[first + i])), scale);
      if (++column == at.columns) {
        column = 0;
        ++row;
      }
    }
  }
}

template <WeightFormat format>
__global__ __launch_bounds__(kThreads) void widen_all(Stored stored, std::uint16_t* words) {
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  const std::uint64_t last = (stored.at.elements - 1) / kEach * kEach;
  constexpr bool kFp8 = format == WeightFormat::fp8 || format == WeightFormat::fp8_rows;
  const auto word = [](float value) { return kFp8 ? rounded_away(value) : rounded(value); };
  float values[kEach];
  widen<format>(stored, first < last ? first : last, values);
  if (first > last) return;
  if (first + kEach <= stored.at.elements) {
    std::uint32_t pairs[kEach / 2];
#pragma unroll
    for (unsigned i = 0; i < kEach / 2; ++i)
      pairs[i] = word(values[2 * i]) | static_cast<std::uint32_t>(word(values[2 * i + 1])) << 16;
    *reinterpret_cast<uint4*>(words + first) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i)
      if (first + i < stored.at.elements) words[first + i] = word(values[i]);
  }
}

void require(cudaError_t status) {
  if (status != cudaSuccess)
    throw Exception(io::Error{.kind = io::ErrorKind::environment,
                              .operation = "widen stored weights on the CUDA device",
                              .detail = cudaGetErrorString(status)});
}

template <WeightFormat format>
void launch(Stored stored, std::uint16_t* words, cudaStream_t on) {
  const auto grid = static_cast<unsigned>((stored.at.elements + kThreads * kEach - 1) / (kThreads * kEach));
  void* arguments[] = {&stored, &words};
  require(cudaLaunchKernel(&widen_all<format>, grid, kThreads, arguments, 0, on));
}

}  // namespace

void dense_on_device(WeightFormat format, const WeightLayout& layout, const std::byte* stored, std::uint16_t* words,
                     int device, void* stream) {
  if (layout.elements == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const Stored all{stored, layout};
  require(cudaSetDevice(device));
  switch (format) {
    case WeightFormat::fp32:
      throw Exception(io::ErrorKind::internal, "a weight stored as fp32 is dense as it is");
    case WeightFormat::bf16:
      require(cudaMemcpyAsync(words, stored, layout.elements * sizeof(*words), cudaMemcpyDeviceToDevice, on));
      break;
    case WeightFormat::int8:
      launch<WeightFormat::int8>(all, words, on);
      break;
    case WeightFormat::nf4:
      launch<WeightFormat::nf4>(all, words, on);
      break;
    case WeightFormat::nf4_double:
      launch<WeightFormat::nf4_double>(all, words, on);
      break;
    case WeightFormat::fp8:
      launch<WeightFormat::fp8>(all, words, on);
      break;
    case WeightFormat::fp8_rows:
      launch<WeightFormat::fp8_rows>(all, words, on);
      break;
    case WeightFormat::mxfp4:
      launch<WeightFormat::mxfp4>(all, words, on);
      break;
  }
}

}  // namespace tierflow::models
