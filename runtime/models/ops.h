#pragma once
// The operations of which blocks consist. Each follows transformers' arithmetic. Functions named *_backward are
// explicit gradients and run without autograd; the others are differentiable where autograd is on. In bf16 and without
// autograd they run fused kernels, the CPU's (kernels.h) or CUDA's (row_kernels.h), which have the same bits; elsewhere
// they are ATen expressions of the same formulas.
//
// Accumulators: a gradient goes into `sum` (fp32 beside a bf16 weight), which may be undefined: then nobody wants it.
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "runtime/spec/model_spec.h"

namespace tierflow::models {

using at::Tensor;

// Normalises the last dimension: w * (x * rstd), by `kind`, one of the rms kinds of decoder_spec.h.
// rstd, where wanted: fp32 (fp64 for fp64), one for each row.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, NormKind kind = NormKind::rms,
                Tensor* rstd = nullptr);
// The same of x + added, two tensors of one shape. `added` becomes that sum, without autograd in its own memory.
Tensor rms_norm_of_sum(const Tensor& x, Tensor& added, const Tensor& weight, double eps, NormKind kind = NormKind::rms,
                       Tensor* rstd = nullptr);
// The gradient of x, plus `residual` where defined; adds the weight's to `sum`.
Tensor rms_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& rstd, const Tensor& weight,
                         const Tensor& sum, NormKind kind = NormKind::rms, const Tensor& residual = {});

// A layer norm over the last dimension, and its gradient of x; adds the parameters' gradients to `weight_sum` and
// `bias_sum`. bias may be undefined. mean, rstd: as layer_norm() gave them, in a type that the device chooses.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Tensor* mean = nullptr,
                  Tensor* rstd = nullptr);
Tensor layer_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                           const Tensor& weight, const Tensor& bias, const Tensor& weight_sum, const Tensor& bias_sum);

// Rotary embedding of the first 2n dimensions of x [batch, sequence, heads, head_dim]. cos, sin: fp32 [sequence, n], or
// one for each row [batch, sequence, n]. positions, where defined: int64 [batch, sequence], the row of [sequence, n]
// for each token. Pairs are neighbours where interleaved, else one of each half; cos and sin are rounded to x's type
// first, if `rounded`. The arithmetic is fp32 (fp64 for fp64), and the result rounded once. Without autograd x itself
// is rotated and returned. The gradient is the rotation by -1.
struct RopeRule {
  bool interleaved = false, rounded = true;
};
Tensor rope(Tensor x, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign = 1.0,
            const Tensor& positions = {});
// The same for two tensors that differ only in their number of heads, in one launch on a device.
void rope(Tensor& q, Tensor& k, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign,
          const Tensor& positions);

Tensor activate(const Tensor& x, Activation activation);
// The gradient of x from that of activate(x).
Tensor activate_backward(const Tensor& d_out, const Tensor& x, Activation activation);

// activate(gate) * up.
Tensor gated(const Tensor& gate, const Tensor& up, Activation activation);
// Gradients of gate and up, written over them; d_out becomes gated(gate, up).
void gated_backward(Tensor& gate, Tensor& up, Tensor& d_out, Activation activation);

// The same with a clamped gate (decoder_spec.h, of sharpness > 0).
Tensor gated(const Tensor& gate, const Tensor& up, const ClampedGate& clamped);
void gated_backward(Tensor& gate, Tensor& up, Tensor& d_out, const ClampedGate& clamped);

// hidden [batch, sequence, hidden_size] as [batch * sequence, hidden_size], without its history.
Tensor token_rows(const Tensor& hidden);

// Zeroes with probability p and scales the rest by 1/(1-p); the mask depends on the generator's state and x's size
// alone, so that the gradient is dropout of the gradient from the same state.
Tensor with_dropout(const Tensor& x, double p, bool training);

// sum [m, n] += a^T b for a [tokens, m], b [tokens, n]: in row tiles, each product rounded to a's type before it is
// added.
void add_product(const Tensor& sum, const Tensor& a, const Tensor& b);
// sum [n] += the rows of a [tokens, n].
void add_rows(const Tensor& sum, const Tensor& a);

// Rows ids [tokens] of sum [vocab, n] += the rows of d [tokens, n], in the order of the tokens (in fp32 on CUDA only of
// bf16, else in deterministic mode). An id beyond the vocabulary is an error; on CUDA whoever looked it up has seen it.
void add_rows_at(const Tensor& sum, const Tensor& ids, const Tensor& d);

// Softmax cross-entropy of a chunk. logits [rows, vocab], labels [rows] int64, -100 where none counts; losses [rows]
// fp64. With `gradient`, logits are replaced by the gradient of scale * sum(losses).
void cross_entropy(Tensor& logits, const Tensor& labels, Tensor losses, double scale, bool gradient);

// The same for a vocabulary in tiles. logits [rows, width] are its columns from `first`; sums [rows, 4] fp64: the
// largest logit so far, the sum of exponentials relative to it, the label's logit, the first column that has the
// largest.
Tensor no_softmax_sums(std::int64_t rows, at::Device device);
void softmax_sums(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& sums);
// Of complete sums: losses [rows] fp64, 0 where no label counts.
Tensor softmax_losses(const Tensor& sums, const Tensor& labels);
// Whether the label is the first of the columns with the largest logit [rows] bool; false where no label counts.
Tensor softmax_hits(const Tensor& sums, const Tensor& labels);
// The factors [rows, 3] fp64 that softmax_gradient needs besides each row's logits, for the gradient of scale *
// sum(losses).
Tensor softmax_factors(const Tensor& sums, const Tensor& labels, double scale);
// Replaces the tile's logits by their gradient.
void softmax_gradient(Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& factors);

}  // namespace tierflow::models
