// A warp a row where a row is one sum, a thread block where it is a vocabulary.
#include <cuda_runtime.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/models/row_kernels_device.h"
#include "runtime/models/row_lanes.h"

namespace tierflow::models::row_kernels {
namespace {

using kernels::Candidate;
using kernels::kLanes;
using Words = std::uint16_t*;
using ConstWords = const std::uint16_t*;

constexpr unsigned kThreads = 256, kWarps = kThreads / kLanes;
constexpr unsigned kWholeWarp = 0xffffffffU;

__device__ int lane_number() {
  return static_cast<int>(threadIdx.x % kLanes);
}
__device__ unsigned warp_number() {
  return threadIdx.x / kLanes;
}

// Lanes whose partners lie beyond the half add something too, which nobody reads.
__device__ float folded(float sum) {
  for (unsigned apart = kLanes / 2; apart > 0; apart /= 2) sum += __shfl_down_sync(kWholeWarp, sum, apart);
  return sum;
}

struct Warp {
  template <class Work>
  __device__ void each(Work work) {
    work(lane_number());
    __syncwarp();
  }
  template <class Partial>
  __device__ float sum(Partial partial) {
    return __shfl_sync(kWholeWarp, folded(partial(lane_number())), 0);
  }
};

struct TeamMemory {
  float sums[kWarps];
  Candidate candidates[kWarps];
};

struct Team {
  template <class Work>
  __device__ void each(Work work) {
    work(static_cast<int>(threadIdx.x), static_cast<int>(kThreads));
    __syncthreads();
  }
  template <class Share>
  __device__ Candidate best(Share share) {
    Candidate most = share(static_cast<int>(threadIdx.x), static_cast<int>(kThreads));
    for (unsigned apart = kLanes / 2; apart > 0; apart /= 2) {
      const Candidate other{__shfl_down_sync(kWholeWarp, most.value, apart),
                            __shfl_down_sync(kWholeWarp, most.column, apart)};
      if (kernels::better(other, most)) most = other;
    }
    if (lane_number() == 0) memory.candidates[warp_number()] = most;
    __syncthreads();
    most = memory.candidates[0];
    for (unsigned warp = 1; warp < kWarps; ++warp)
      if (kernels::better(memory.candidates[warp], most)) most = memory.candidates[warp];
    __syncthreads();
    return most;
  }
  template <class Partial>
  __device__ double sum_of_stretches(std::int64_t count, Partial partial) {
    double total = 0;
    for (std::int64_t first = 0; first < count; first += kWarps) {
      const std::int64_t stretch = first + warp_number();
      if (stretch < count) {
        const float sum = folded(partial(stretch, lane_number()));
        if (lane_number() == 0) memory.sums[warp_number()] = sum;
      }
      __syncthreads();
      for (unsigned warp = 0; warp < kWarps && first + warp < count; ++warp) total += memory.sums[warp];
      __syncthreads();
    }
    return total;
  }
  TeamMemory& memory;
};

__device__ std::int64_t thread_number() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ std::int64_t threads() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

template <bool RoundedFirst>
__global__ __launch_bounds__(kThreads) void norm_rows(ConstWords x, Words added, ConstWords w, Words out, float* rstd,
                                                      std::int64_t rows, std::int64_t n, float eps, float offset) {
  const std::int64_t row = thread_number() / kLanes;
  if (row >= rows) return;
  Warp warp;
  kernels::rms_norm_row<RoundedFirst>(warp, x + row * n, added == nullptr ? nullptr : added + row * n, w, out + row * n,
                                      rstd == nullptr ? nullptr : rstd + row, n, eps, offset);
}

__global__ __launch_bounds__(kThreads) void norm_rows_backward(ConstWords d_out, ConstWords x, const float* rstd,
                                                               ConstWords w, ConstWords residual, Words d_x,
                                                               std::int64_t rows, std::int64_t n, float offset) {
  const std::int64_t row = thread_number() / kLanes;
  if (row >= rows) return;
  Warp warp;
  kernels::rms_norm_row_backward(warp, d_out + row * n, x + row * n, rstd[row], w,
                                 residual == nullptr ? nullptr : residual + row * n, d_x + row * n, n, offset);
}

template <bool RoundedFirst>
__global__ __launch_bounds__(kThreads) void norm_weights(ConstWords d_out, ConstWords x, const float* rstd,
                                                         float* partials, std::int64_t rows, std::int64_t block,
                                                         std::int64_t n) {
  const std::int64_t which = thread_number();
  const std::int64_t first = which / n * block, column = which % n;
  if (first >= rows) return;
  const std::int64_t left = rows - first, at = first * n + column;
  partials[which] =
      kernels::norm_weight_column<RoundedFirst>(d_out + at, x + at, rstd + first, left < block ? left : block, n);
}

__global__ __launch_bounds__(kThreads) void add_blocks(float* sum, const float* partials, std::int64_t blocks,
                                                       std::int64_t n) {
  const std::int64_t i = thread_number();
  if (i < n) sum[i] = kernels::with_partials(sum[i], partials + i, blocks, n);
}

__global__ __launch_bounds__(kThreads) void turn(Words q, Words k, std::int64_t k_heads, const float* cos,
                                                 const float* sin, const std::int64_t* table_row,
                                                 kernels::RopeShape shape, bool rounded, float sign) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t from = (table_row != nullptr ? table_row[row] : row % shape.table_rows) * (shape.rotated / 2);
  kernels::rope_row(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), q + row * shape.heads * shape.head_dim,
                    k == nullptr ? nullptr : k + row * k_heads * shape.head_dim, static_cast<int>(k_heads), cos + from,
                    sin + from, shape, rounded, sign);
}

template <kernels::Gate by>
__global__ __launch_bounds__(kThreads) void gate_all(ConstWords gate, ConstWords up, Words out, std::int64_t n) {
  kernels::gated_share<by>(thread_number(), threads(), gate, up, out, n);
}
template <kernels::Gate by>
__global__ __launch_bounds__(kThreads) void gate_all_backward(Words gate, Words up, Words d_out, std::int64_t n) {
  kernels::gated_share_backward<by>(thread_number(), threads(), gate, up, d_out, n);
}

__global__ __launch_bounds__(kThreads) void entropy(Words logits, const std::int64_t* labels, double* loss,
                                                    std::int64_t vocab, float scale, bool gradient) {
  __shared__ TeamMemory memory;
  Team team{memory};
  const std::int64_t row = blockIdx.x;
  kernels::cross_entropy_row(team, logits + row * vocab, labels[row], loss + row, vocab, scale, gradient);
}

__global__ __launch_bounds__(kThreads) void sums_of_rows(ConstWords logits, const std::int64_t* labels, double* sums,
                                                         std::int64_t first, std::int64_t width) {
  __shared__ TeamMemory memory;
  Team team{memory};
  const std::int64_t row = blockIdx.x;
  kernels::softmax_sums_row(team, logits + row * width, labels[row], sums + 4 * row, first, width);
}

__global__ __launch_bounds__(kThreads) void factors_of_rows(const double* sums, const std::int64_t* labels,
                                                            double scale, double* factors, std::int64_t rows) {
  const std::int64_t row = thread_number();
  if (row < rows) kernels::softmax_factors_row(sums + 4 * row, labels[row], scale, factors + 3 * row);
}

__global__ __launch_bounds__(kThreads) void gradient_of_rows(Words logits, const std::int64_t* labels,
                                                             const double* factors, std::int64_t first,
                                                             std::int64_t width) {
  __shared__ TeamMemory memory;
  Team team{memory};
  const std::int64_t row = blockIdx.x;
  kernels::softmax_gradient_row(team, logits + row * width, labels[row], factors + 3 * row, first, width);
}

__global__ __launch_bounds__(kThreads) void top_of_rows(ConstWords logits, std::int64_t first, std::int64_t width,
                                                        const float* values, const std::int32_t* ids, float* to_values,
                                                        std::int32_t* to_ids, std::int64_t wanted) {
  __shared__ TeamMemory memory;
  Team team{memory};
  const std::int64_t row = blockIdx.x, at = row * wanted;
  kernels::top_logits_row(team, logits + row * width, first, width, values + at, ids + at, to_values + at, to_ids + at,
                          wanted);
}

__global__ __launch_bounds__(kThreads) void add_at_ids(float* sum, std::int64_t rows, ConstWords d,
                                                       const std::int64_t* ids, const std::int64_t* tokens,
                                                       std::int64_t count, std::int64_t n) {
  kernels::add_tokens_of_id(std::int64_t{blockIdx.y} * kThreads + threadIdx.x, std::int64_t{gridDim.y} * kThreads, sum,
                            rows, d, ids, tokens, blockIdx.x, count, n);
}

void require(cudaError_t status) {
  if (status != cudaSuccess)
    throw Exception(io::Error{.kind = io::ErrorKind::environment,
                              .operation = "run a model's row kernels on the CUDA device",
                              .detail = cudaGetErrorString(status)});
}

unsigned blocks_of(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// Where there is work, enqueues kernel(arguments...).
template <class... Parameters, class... Arguments>
void launch(const Queue& on, std::int64_t work, void (*kernel)(Parameters...), dim3 grid, unsigned block,
            Arguments... arguments) {
  if (work == 0) return;
  require(cudaSetDevice(on.device));
  [&](Parameters... parameters) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    require(cudaLaunchKernel(kernel, grid, dim3(block), pointers, 0, static_cast<cudaStream_t>(on.stream)));
  }(arguments...);
}

}  // namespace

bool are_built() {
  return true;
}
int capability(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return 10 * major + minor;
}

void rms_norm(ConstWords x, Words added, ConstWords w, Words out, float* rstd, std::int64_t rows, std::int64_t n,
              float eps, kernels::RmsRule rule, const Queue& on) {
  launch(on, rows * n, rule.rounded_first ? norm_rows<true> : norm_rows<false>, blocks_of(rows * kLanes), kThreads, x,
         added, w, out, rstd, rows, n, eps, rule.offset);
}

void rms_norm_backward(ConstWords d_out, ConstWords x, const float* rstd, ConstWords w, ConstWords residual, Words d_x,
                       std::int64_t rows, std::int64_t n, kernels::RmsRule rule, const Queue& on) {
  launch(on, rows * n, norm_rows_backward, blocks_of(rows * kLanes), kThreads, d_out, x, rstd, w, residual, d_x, rows,
         n, rule.offset);
}

void norm_weight_partials(ConstWords d_out, ConstWords x, const float* rstd, float* partials, std::int64_t rows,
                          std::int64_t block, std::int64_t n, kernels::RmsRule rule, const Queue& on) {
  launch(on, rows * n, rule.rounded_first ? norm_weights<true> : norm_weights<false>,
         blocks_of((rows + block - 1) / block * n), kThreads, d_out, x, rstd, partials, rows, block, n);
}

void add_partials(float* sum, const float* partials, std::int64_t blocks, std::int64_t n, const Queue& on) {
  launch(on, blocks * n, add_blocks, blocks_of(n), kThreads, sum, partials, blocks, n);
}

void rope(Words q, Words k, std::int64_t k_heads, const float* cos, const float* sin, const std::int64_t* table_row,
          std::int64_t rows, const kernels::RopeShape& shape, bool rounded, float sign, const Queue& on) {
  const std::int64_t heads = shape.heads + k_heads, packs = heads * shape.rotated / 2 / kernels::kPack;
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>(packs / kLanes * kLanes, kLanes, kThreads));
  launch(on, rows * heads * shape.rotated, turn, static_cast<unsigned>(rows), threads, q, k, k_heads, cos, sin,
         table_row, shape, rounded, sign);
}

void gated(kernels::Gate by, ConstWords gate, ConstWords up, Words out, std::int64_t n, const Queue& on) {
  launch(on, n, by == kernels::Gate::silu ? gate_all<kernels::Gate::silu> : gate_all<kernels::Gate::gelu_tanh>,
         blocks_of((n + kernels::kPack - 1) / kernels::kPack), kThreads, gate, up, out, n);
}

void gated_backward(kernels::Gate by, Words gate, Words up, Words d_out, std::int64_t n, const Queue& on) {
  launch(
      on, n,
      by == kernels::Gate::silu ? gate_all_backward<kernels::Gate::silu> : gate_all_backward<kernels::Gate::gelu_tanh>,
      blocks_of((n + kernels::kPack - 1) / kernels::kPack), kThreads, gate, up, d_out, n);
}

void cross_entropy(Words logits, const std::int64_t* labels, double* loss, std::int64_t rows, std::int64_t vocab,
                   float scale, bool gradient, const Queue& on) {
  launch(on, rows, entropy, static_cast<unsigned>(rows), kThreads, logits, labels, loss, vocab, scale, gradient);
}

void softmax_sums(ConstWords logits, const std::int64_t* labels, double* sums, std::int64_t rows, std::int64_t first,
                  std::int64_t width, const Queue& on) {
  launch(on, rows, sums_of_rows, static_cast<unsigned>(rows), kThreads, logits, labels, sums, first, width);
}

void softmax_factors(const double* sums, const std::int64_t* labels, double scale, double* factors, std::int64_t rows,
                     const Queue& on) {
  launch(on, rows, factors_of_rows, blocks_of(rows), kThreads, sums, labels, scale, factors, rows);
}

void softmax_gradient(Words logits, const std::int64_t* labels, const double* factors, std::int64_t rows,
                      std::int64_t first, std::int64_t width, const Queue& on) {
  launch(on, rows, gradient_of_rows, static_cast<unsigned>(rows), kThreads, logits, labels, factors, first, width);
}

void top_logits(ConstWords logits, std::int64_t first, std::int64_t rows, std::int64_t width, const float* values,
                const std::int32_t* ids, float* to_values, std::int32_t* to_ids, std::int64_t wanted, const Queue& on) {
  launch(on, rows * wanted, top_of_rows, static_cast<unsigned>(rows), kThreads, logits, first, width, values, ids,
         to_values, to_ids, wanted);
}

void add_rows_at(float* sum, std::int64_t rows, ConstWords d, const std::int64_t* ids, const std::int64_t* tokens,
                 std::int64_t count, std::int64_t n, const Queue& on) {
  const dim3 grid(static_cast<unsigned>(count), std::min(blocks_of(n), 65535U));
  launch(on, count * n, add_at_ids, grid, kThreads, sum, rows, d, ids, tokens, count, n);
}

}  // namespace tierflow::models::row_kernels
