#pragma once
// Attention whose backward needs only the result and the logarithms of the sums of exponentials. Both can be kept or
// moved like other activations, and attention is not computed again.
//
//   in blocks    attention.h, on the CPU
//   flash        torch's FlashAttention-2, on CUDA in 16 bits: whole rows, windows, and packed rows as sequences of
//                their lengths. Heads as flash_takes_heads_of(), and documents of kFewestFlashTokens on average or
//                more
//   cudnn        cuDNN's, on CUDA for whole rows without a window, where torch itself would choose it
//
// Sinks come behind flash and cudnn, which know none: each query's result is scaled by the share of the softmax that
// the sink leaves to the keys, and the sink is added to its sum of exponentials. The kernel's own backward, called with
// both, is then that of the attention with sinks.
//
// What none of these computes (softcap, dropout, sinks where autograd is on, other types) torch does
// (torch_attention.h), with a graph for its backward: restored activations then compute it again.
#include "runtime/models/attention.h"

namespace tierflow::models {

// Of a document, on average: the backward takes memory for 128 further tokens for each document.
inline constexpr std::int64_t kFewestFlashTokens = 64;

// Whether FlashAttention-2, without dropout, takes heads of that size on a card of that compute capability (90 for
// 9.0): other cards than those of 8.0, 9 and 10 have no backward for 193 to 224.
bool flash_takes_heads_of(std::int64_t dim, int capability);

class KeptAttention {
 public:
  virtual ~KeptAttention() = default;
  virtual std::string_view name() const = 0;
  // Differentiable where autograd is on.
  virtual BlockAttention forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AttentionRules& rules) const = 0;
  // `forward` as forward() gave it; its tensors may have been copied. The gradients are dense.
  virtual AttentionGradient backward(const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const BlockAttention& forward,
                                     const AttentionRules& rules) const = 0;
  // A view [batch, sequence, heads] of the forward's lse.
  virtual at::Tensor by_token(const at::Tensor& lse, const at::Tensor& q) const = 0;
};

// The implementation that computes these tensors; null: torch does. The same for tensors of the same shapes, types and
// device where autograd is off.
std::shared_ptr<const KeptAttention> kept_attention(const at::Tensor& q, const at::Tensor& k,
                                                    const AttentionRules& rules, double dropout);
// The same without attention in blocks.
std::shared_ptr<const KeptAttention> device_attention(const at::Tensor& q, const at::Tensor& k,
                                                      const AttentionRules& rules, double dropout);

// The rule for a flash kernel. Its windows count the keys before and after a query; -1 means all keys.
struct FlashShape {
  at::Tensor ends;  // of documents: int32 [documents + 1] on the device; undefined: rows are whole
  std::int64_t longest = 0, before = -1, behind = 0;
};
FlashShape flash_shape(const at::Tensor& q, const AttentionRules& rules);

}  // namespace tierflow::models
