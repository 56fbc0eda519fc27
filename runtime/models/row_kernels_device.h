#pragma once
// The row kernels (kernels.h) on a CUDA device, each one launch, enqueued and not waited for. They give the bits of the
// CPU's kernels, but for logarithms and exponentials in double, which are those of the device's library, and a gate of
// gelu, for which the CPU has no kernel. Sums have an order set by the shape: no atomics.
//
// What CUDA refuses, and every call in a build without it, throws Exception (environment).
#include <cstdint>

#include "runtime/models/kernels.h"

namespace tierflow::models::row_kernels {

// A cudaStream_t of a device, whose memory all pointers point to.
struct Queue {
  int device = 0;
  void* stream = nullptr;
};

bool are_built();
// The card's compute capability, 90 for 9.0; 0 where CUDA does not say, and in a build without it.
int capability(int device);

// added: null, or what becomes x + added, which is normalised.
void rms_norm(const std::uint16_t* x, std::uint16_t* added, const std::uint16_t* w, std::uint16_t* out, float* rstd,
              std::int64_t rows, std::int64_t n, float eps, kernels::RmsRule rule, const Queue& on);
// The gradient of x alone. residual may be null.
void rms_norm_backward(const std::uint16_t* d_out, const std::uint16_t* x, const float* rstd, const std::uint16_t* w,
                       const std::uint16_t* residual, std::uint16_t* d_x, std::int64_t rows, std::int64_t n,
                       kernels::RmsRule rule, const Queue& on);
// The weight's: partials [blocks, n] of blocks of `block` rows, the last of what is left.
void norm_weight_partials(const std::uint16_t* d_out, const std::uint16_t* x, const float* rstd, float* partials,
                          std::int64_t rows, std::int64_t block, std::int64_t n, kernels::RmsRule rule,
                          const Queue& on);
// sum [n] += the partials, which are summed first, in order.
void add_partials(float* sum, const float* partials, std::int64_t blocks, std::int64_t n, const Queue& on);

// Of q and of k, which has k_heads heads and may be null. cos and sin are rounded to bf16 first, if `rounded`.
void rope(std::uint16_t* q, std::uint16_t* k, std::int64_t k_heads, const float* cos, const float* sin,
          const std::int64_t* table_row, std::int64_t rows, const kernels::RopeShape& shape, bool rounded, float sign,
          const Queue& on);

void gated(kernels::Gate by, const std::uint16_t* gate, const std::uint16_t* up, std::uint16_t* out, std::int64_t n,
           const Queue& on);
void gated_backward(kernels::Gate by, std::uint16_t* gate, std::uint16_t* up, std::uint16_t* d_out, std::int64_t n,
                    const Queue& on);

// A label beyond the vocabulary gives a loss of NaN.
void cross_entropy(std::uint16_t* logits, const std::int64_t* labels, double* loss, std::int64_t rows,
                   std::int64_t vocab, float scale, bool gradient, const Queue& on);
void softmax_sums(const std::uint16_t* logits, const std::int64_t* labels, double* sums, std::int64_t rows,
                  std::int64_t first, std::int64_t width, const Queue& on);
// factors [rows, 3] of softmax_gradient() from complete sums [rows, 4].
void softmax_factors(const double* sums, const std::int64_t* labels, double scale, double* factors, std::int64_t rows,
                     const Queue& on);
void softmax_gradient(std::uint16_t* logits, const std::int64_t* labels, const double* factors, std::int64_t rows,
                      std::int64_t first, std::int64_t width, const Queue& on);
// From what values and ids [rows, wanted] hold to to_values and to_ids, other memory.
void top_logits(const std::uint16_t* logits, std::int64_t first, std::int64_t rows, std::int64_t width,
                const float* values, const std::int32_t* ids, float* to_values, std::int32_t* to_ids,
                std::int64_t wanted, const Queue& on);

// Rows ids[i] of sum [rows, n] += row tokens[i] of d [count, n], for i in order. ids [count] rise; those that are not
// rows of the sum are left out.
void add_rows_at(float* sum, std::int64_t rows, const std::uint16_t* d, const std::int64_t* ids,
                 const std::int64_t* tokens, std::int64_t count, std::int64_t n, const Queue& on);

}  // namespace tierflow::models::row_kernels
