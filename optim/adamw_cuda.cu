// A warp a block: eight elements a lane, read and written sixteen bytes at a time; the block's absmax is a reduction
// over the warp, so nothing but the state crosses the memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "optim/adamw_device.h"
#include "optim/update_lanes.h"

namespace tierflow::optim {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksAProcessor = 16;
constexpr unsigned kWholeWarp = 0xffffffffU;

struct UpdateWarp {
  template <class Work>
  __device__ void each(Work work) {
    work(own);
  }
  template <class Number>
  __device__ std::uint32_t largest(Number number) {
    return __reduce_max_sync(kWholeWarp, number(static_cast<int>(threadIdx.x % kUpdateLanes), own));
  }
  LaneBlock own;
};

// Half a warp a partial sum.
struct SumHalfWarp {
  template <class Number>
  __device__ std::uint32_t largest(Number number) {
    return __reduce_max_sync(mask(), number(static_cast<int>(threadIdx.x % kSumLanes), own));
  }
  __device__ void fold(int apart) {
    own.sum += __shfl_down_sync(mask(), own.sum, static_cast<unsigned>(apart), kSumLanes);
  }
  __device__ static unsigned mask() { return 0xffffU << (threadIdx.x % 32 / kSumLanes * kSumLanes); }
  LaneSum own;
};

__device__ std::size_t thread_number() {
  return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ std::size_t threads() {
  return std::size_t{gridDim.x} * blockDim.x;
}

template <Rule R>
__global__ __launch_bounds__(kThreads) void update(Update u, bool all_or_none, DeviceReport* report) {
  const std::size_t blocks = (u.n + kBlock - 1) / kBlock;
  const bool drops = all_or_none && !within(report->largest_gradient, u.k.scale);
  unsigned skipped = 0;  // by one thread: 64 bits would spill
  for (std::size_t block = thread_number() / kUpdateLanes; block < blocks; block += threads() / kUpdateLanes) {
    UpdateWarp lanes;
    if (drops) {
      lanes.own.begin(u, block, static_cast<int>(threadIdx.x % kUpdateLanes));
      lanes.own.copy(u);
    } else if (update_block_in_lanes<R>(lanes, u, block)) {
      continue;
    }
    skipped += static_cast<unsigned>(lanes.own.count());
  }
  static_assert(sizeof(unsigned long long) == sizeof(report->skipped));
  if (skipped != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(&report->skipped), static_cast<unsigned long long>(skipped));
}

__global__ __launch_bounds__(kThreads) void look_through(const std::uint16_t* gradient, std::size_t n,
                                                         DeviceReport* report) {
  std::uint32_t largest = 0;
  for (std::size_t i = thread_number(); i < n; i += threads()) {
    const std::uint32_t magnitude = gradient[i] & 0x7fffU;
    largest = largest < magnitude ? magnitude : largest;
  }
  largest = __reduce_max_sync(kWholeWarp, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&report->largest_gradient, largest);
}

__global__ __launch_bounds__(kThreads) void sum_squares(const std::uint16_t* gradient, std::size_t n, double* sums,
                                                        std::uint32_t* not_finite) {
  const std::size_t segments = (n + kNormSegment - 1) / kNormSegment;
  for (std::size_t segment = thread_number() / kSumLanes; segment < segments; segment += threads() / kSumLanes) {
    SumHalfWarp lanes;
    const std::size_t first = segment * kNormSegment, left = n - first;
    const bool finite = sum_segment_in_lanes(lanes, gradient + first, left < kNormSegment ? left : kNormSegment);
    if (threadIdx.x % kSumLanes != 0) continue;
    sums[segment] = lanes.own.sum;
    if (!finite) *not_finite = 1;  // every writer writes the same
  }
}

__global__ __launch_bounds__(kThreads) void split(const float* master, std::uint16_t* hi, std::uint16_t* lo,
                                                  std::size_t n) {
  for (std::size_t i = thread_number(); i < n; i += threads()) {
    hi[i] = hi_of(bits_of(master[i]));
    lo[i] = lo_of(bits_of(master[i]));
  }
}

__global__ __launch_bounds__(kThreads) void join(const std::uint16_t* hi, const std::uint16_t* lo, float* master,
                                                 std::size_t n) {
  for (std::size_t i = thread_number(); i < n; i += threads()) master[i] = float_of(joined(hi[i], lo[i]));
}

void require(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("optim: the CUDA device: ") + cudaGetErrorString(status));
}

// The calling thread's current device is the stream's, until the end.
class OnDevice {
 public:
  explicit OnDevice(const CudaStream& on) {
    require(cudaGetDevice(&before_));
    if (before_ != on.device) require(cudaSetDevice(on.device));
    other_ = before_ != on.device;
  }
  ~OnDevice() {
    if (other_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool other_ = false;
};

// Enough thread blocks for `wanted` threads, no more than keep the device busy.
unsigned grid(std::size_t wanted, const CudaStream& on) {
  int processors = 1;
  require(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, on.device));
  const std::size_t most = std::size_t{kBlocksAProcessor} * static_cast<std::size_t>(processors);
  return static_cast<unsigned>(std::clamp<std::size_t>((wanted + kThreads - 1) / kThreads, 1, most));
}

cudaStream_t stream_of(const CudaStream& on) {
  return static_cast<cudaStream_t>(on.stream);
}

template <class... Parameters>
void launch(const CudaStream& on, void (*kernel)(Parameters...), unsigned blocks,
            std::type_identity_t<Parameters>... arguments) {
  void* pointers[] = {&arguments...};
  require(cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), pointers, 0, stream_of(on)));
}

}  // namespace

bool device_update_is_built() {
  return true;
}

void adamw_update_on_device(const AdamWParams& params, const std::uint16_t* gradient, const State& from,
                            const State& to, std::size_t n, DeviceReport* report, const CudaStream& on) {
  if (report == nullptr) throw std::invalid_argument("optim: an update on a device needs a report");
  const Update u = digested(params, gradient, from, to, n);
  const OnDevice current(on);
  const unsigned blocks = grid((n + kBlock - 1) / kBlock * kUpdateLanes, on);
  require(cudaMemsetAsync(report, 0, sizeof(*report), stream_of(on)));
  if (n == 0) return;
  const bool all_or_none = params.skip_call_if_not_finite;
  if (all_or_none) launch(on, look_through, blocks, gradient, n, report);
  switch (params.rule) {
    case Rule::adamw:
      launch(on, update<Rule::adamw>, blocks, u, all_or_none, report);
      break;
    case Rule::adam:
      launch(on, update<Rule::adam>, blocks, u, all_or_none, report);
      break;
    case Rule::lion:
      launch(on, update<Rule::lion>, blocks, u, all_or_none, report);
      break;
    case Rule::sgd:
      launch(on, update<Rule::sgd>, blocks, u, all_or_none, report);
  }
}

void gradient_norm_squared_on_device(const std::uint16_t* gradient, std::size_t n, double* sums,
                                     std::uint32_t* not_finite, const CudaStream& on) {
  if (n == 0) return;
  const OnDevice current(on);
  const unsigned blocks = grid((n + kNormSegment - 1) / kNormSegment * kSumLanes, on);
  launch(on, sum_squares, blocks, gradient, n, sums, not_finite);
}

void split_master_on_device(const float* master, std::uint16_t* hi, std::uint16_t* lo, std::size_t n,
                            const CudaStream& on) {
  if (n == 0) return;
  const OnDevice current(on);
  launch(on, split, grid(n, on), master, hi, lo, n);
}

void join_master_on_device(const std::uint16_t* hi, const std::uint16_t* lo, float* master, std::size_t n,
                           const CudaStream& on) {
  if (n == 0) return;
  const OnDevice current(on);
  launch(on, join, grid(n, on), hi, lo, master, n);
}

}  // namespace tierflow::optim
