#pragma once
// Causal attention of a block's heads: q [batch, sequence, heads, head_dim], k, v [batch, sequence, kv heads,
// head_dim], with the last dimension dense. Scaled by head_dim^-0.5. `window` > 0: a query sees that many keys, itself
// the last of them.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tierflow::models {

// [batch, sequence, heads, head_dim]; differentiable where autograd is on. On the CPU in bf16 without dropout this is
// attention in blocks (below) where the machine multiplies bf16; otherwise torch's scaled_dot_product_attention.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                     double dropout);

// Whether attention() computes these as attention in blocks.
bool attention_is_in_blocks(const at::Tensor& q, double dropout);

// Attention in blocks of queries and keys with a running softmax (Dao et al., FlashAttention-2): scores and sums in
// fp32, probabilities rounded to bf16 before they multiply. The same bits on any number of threads.
bool attention_in_blocks_supported();
struct BlockAttention {
  at::Tensor out;  // as q, dense
  at::Tensor lse;  // fp32 [batch, heads, sequence]: log of each query's sum of exponentials
};
BlockAttention attention_in_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window);
struct AttentionGradient {
  at::Tensor q, k, v;  // dense
};
AttentionGradient attention_in_blocks_backward(const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, const BlockAttention& forward, std::int64_t window);

}  // namespace tierflow::models
