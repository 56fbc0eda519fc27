#pragma once
// Stands in for the CUDA runtime's header, so that a C++ compiler reads the .cu files: the calls, types and intrinsics
// that they use, with the meaning that NVIDIA's documentation gives them. What a kernel is, is a function that is
// called once for each thread. standin.h has what a test may ask of it.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // a stream runs one thread block after the other

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorUnknown = 999,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
inline const cudaStream_t cudaStreamLegacy = reinterpret_cast<cudaStream_t>(1);
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2,
                          cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;

struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem;
  int major, minor;
  int multiProcessorCount;
};
struct dim3 {
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned x, y, z;
};
struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

// The thread that a kernel is called for.
inline thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

inline std::uint32_t __float_as_uint(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
inline float __uint_as_float(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}

extern "C" {
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int device);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream);

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to);
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes);

namespace tierflow::testing::cuda {

// Of threads that run together (Settings::together): waits for all of the block; what each lane of `lanes` gave, which
// are lanes of the thread's warp and all say so.
void wait_for_block();
const std::array<std::uint64_t, 32>& exchange(std::uint64_t value, unsigned lanes);

// A kernel for each thread of a grid; `pointers` are those of its arguments that are pointers, and not null.
cudaError_t launch(std::function<void()> kernel, std::vector<const void*> pointers, dim3 grid, dim3 block,
                   cudaStream_t stream);

}  // namespace tierflow::testing::cuda

inline void __syncthreads() {
  tierflow::testing::cuda::wait_for_block();
}
// What the lane `of_lane(lane)` gave. Whole warps alone.
template <class T, class OfLane>
T tierflow_shuffled(unsigned lanes, T value, OfLane of_lane) {
  std::uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t given = tierflow::testing::cuda::exchange(bits, lanes)[of_lane(threadIdx.x % 32)];
  std::memcpy(&value, &given, sizeof(T));
  return value;
}
inline void __syncwarp() {
  tierflow::testing::cuda::exchange(0, 0xffffffffU);
}
template <class T>
T __shfl_sync(unsigned lanes, T value, int lane) {
  return tierflow_shuffled(lanes, value, [lane](unsigned) { return static_cast<unsigned>(lane); });
}
// Lanes whose partner is beyond their `width` lanes keep their own.
template <class T>
T __shfl_down_sync(unsigned lanes, T value, unsigned apart, unsigned width = 32) {
  return tierflow_shuffled(lanes, value,
                           [=](unsigned lane) { return lane % width + apart < width ? lane + apart : lane; });
}
inline unsigned __reduce_max_sync(unsigned lanes, unsigned value) {
  const auto& given = tierflow::testing::cuda::exchange(value, lanes);
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((lanes >> lane & 1U) != 0) value = std::max(value, static_cast<unsigned>(given[lane]));
  return value;
}
template <class T>
T atomicAdd(T* at, T value) {
  return std::atomic_ref(*at).fetch_add(value);
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const std::atomic_ref all(*at);
  unsigned before = all.load();
  while (before < value && !all.compare_exchange_weak(before, value)) {
  }
  return before;
}

// Arguments are copied before it returns, as CUDA does.
template <class... Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments...), dim3 grid, dim3 block, void** arguments, std::size_t,
                             cudaStream_t stream) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    std::tuple<Arguments...> copies(*static_cast<Arguments*>(arguments[I])...);
    std::vector<const void*> pointers;
    [[maybe_unused]] const auto pointer = [&](const auto& argument) {
      if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(argument)>>)
        if (argument != nullptr) pointers.push_back(argument);
    };
    (pointer(std::get<I>(copies)), ...);
    return tierflow::testing::cuda::launch([kernel, copies] { std::apply(kernel, copies); }, std::move(pointers), grid,
                                           block, stream);
  }
  (std::index_sequence_for<Arguments...>());
}
