#pragma once
// Row kernels of the CPU path: bf16 in and out, fp32 inside, one rounding a result. Plain loops that the compiler
// vectorises, one version for each instruction set. No torch and no threads here: ops.cpp splits the rows, and every
// row's result is independent of that split. bf16 travels as std::uint16_t.
#include <cstdint>

namespace tierflow::models::kernels {

// The weight's rule: w * bf16(x * rstd), rounded before it (transformers' Llama); or (offset + w) * x * rstd in fp32,
// rounded once.
struct RmsRule {
  bool rounded_first = true;
  float offset = 0;
};

// out, with rstd = 1 / sqrt(mean(x^2) + eps). rstd: [rows], may be null. Where `added` is not null, x + added is
// normalised, and `added` becomes that sum.
void rms_norm(const std::uint16_t* x, std::uint16_t* added, const std::uint16_t* w, std::uint16_t* out, float* rstd,
              std::int64_t rows, std::int64_t n, float eps, RmsRule rule);

// d_x = rstd * (d w - xhat mean(d w xhat)) + residual, with xhat = x * rstd and w with its offset; d_w [n] += sum over
// rows of d * xhat, rounded as the rule says. residual and d_w may be null; d_x may be d_out or residual.
void rms_norm_backward(const std::uint16_t* d_out, const std::uint16_t* x, const float* rstd, const std::uint16_t* w,
                       const std::uint16_t* residual, std::uint16_t* d_x, float* d_w, std::int64_t rows, std::int64_t n,
                       RmsRule rule);

// The gradients of a layer norm's parameters: d_w [n] += sum over rows of d_out * (x - mean) * rstd, d_b [n] += of
// d_out. mean, rstd: [rows]. Either of d_w and d_b may be null.
void layer_norm_sums(const std::uint16_t* d_out, const std::uint16_t* x, const float* mean, const float* rstd,
                     float* d_w, float* d_b, std::int64_t rows, std::int64_t n);

// Rotates the first `rotated` dimensions of x [rows, heads, head_dim] in place; row r uses row table_row[first_row + r]
// of the tables, or where that is null, row (first_row + r) % table_rows. cos, sin: [table_rows, rotated / 2]; `sign`
// -1 rotates back (the gradient). Pairs are (2i, 2i + 1) where interleaved, else (i, i + rotated / 2).
struct RopeShape {
  std::int64_t table_rows, heads, head_dim, rotated;
  bool interleaved;
};
void rope(std::uint16_t* x, const float* cos, const float* sin, const std::int64_t* table_row, std::int64_t first_row,
          std::int64_t rows, const RopeShape& shape, float sign);

// What lets `up` through. On the CPU gelu_tanh is torch's operations, not a kernel.
enum class Gate : std::uint8_t { silu, gelu_tanh };

// out = silu(gate) * up, n elements.
void swiglu(const std::uint16_t* gate, const std::uint16_t* up, std::uint16_t* out, std::int64_t n);
// Replaces gate and up by their gradients, and d_out by silu(gate) * up.
void swiglu_backward(std::uint16_t* gate, std::uint16_t* up, std::uint16_t* d_out, std::int64_t n);

// loss [rows]: log(sum exp(logits)) - logits[label], 0 where the label is negative. With `gradient`, logits [rows,
// vocab] become (softmax - onehot) * scale, zeros where the label is negative. Labels are below vocab.
void cross_entropy(std::uint16_t* logits, const std::int64_t* labels, double* loss, std::int64_t rows,
                   std::int64_t vocab, float scale, bool gradient);

// The same over columns [first, first + width) of wider logits. sums [rows][4]: the largest logit so far (-infinity at
// first), the sum of exponentials relative to it, the label's logit (0 before it is seen), the first column that has
// the largest (-1 at first). Rows with a negative label keep theirs.
void softmax_sums(const std::uint16_t* logits, const std::int64_t* labels, double* sums, std::int64_t rows,
                  std::int64_t first, std::int64_t width);
// logits become exp(logit - factors[0]) * factors[1], less factors[2] at the label; zeros where the label is negative.
// factors: [rows][3].
void softmax_gradient(std::uint16_t* logits, const std::int64_t* labels, const double* factors, std::int64_t rows,
                      std::int64_t first, std::int64_t width);

// The `wanted` largest of a row's logits, columns [first, first + width), and of what values and ids held before: in
// falling order, of equal ones the smaller id first. A NaN is never taken.
void top_logits(const std::uint16_t* logits, std::int64_t first, std::int64_t width, float* values, std::int32_t* ids,
                std::int64_t wanted);

// Row ids[t] of sum, [.., stride] fp32, += row t of d, [tokens, stride], over the columns [begin, end), token after
// token.
void add_rows_at(float* sum, const std::uint16_t* d, const std::int64_t* ids, std::int64_t tokens, std::int64_t stride,
                 std::int64_t begin, std::int64_t end);

// sum [n] += a [n], fp32.
void add(float* sum, const float* a, std::int64_t n);

}  // namespace tierflow::models::kernels
