#pragma once
// Causal attention of a block's heads: q [batch, sequence, heads, head_dim], k, v [batch, sequence, kv heads,
// head_dim], with the last dimension dense.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/models/micro_batch.h"

namespace tierflow::models {

class KeptAttention;  // device_attention.h

// The choice of what computes attention, and a record of what did.
struct AttentionChoice {
  std::shared_ptr<const KeptAttention> by = {};  // null: the device decides (device_attention.h)
  bool any_length = false;  // lengths differ from call to call: cuDNN would plan for each of them, in half a second
  std::set<std::string>* ran = nullptr;  // receives the name of what computed attention
};

// A query sees the keys of its own document up to itself.
struct AttentionRules {
  std::int64_t window = 0;  // > 0: at most that many of them, the last ones
  // As MicroBatch::documents() gives them, or cut (in_chunks()); none: each row is one.
  std::vector<Document> documents = {};
  std::int64_t chunk = 0;  // > 0: of sequences in a cache, which has no documents: as LayerSpec has it
  double scale = 0;        // of scores; 0: head_dim^-0.5
  double softcap = 0;      // > 0: scores become softcap * tanh(score / softcap)
  // [heads], where defined: a logit of each head that the softmax counts beside the scores, of a value of zero (Xiao et
  // al., attention sinks, as gpt-oss learns them). Not together with a softcap.
  at::Tensor sinks = {};
  at::Tensor ends = {};  // as Shared::ends, where there are documents; undefined: made where it is wanted
  AttentionChoice choice = {};

  // Of scores of heads of this size.
  double scale_of(std::int64_t head_dim) const;
};

// The documents of rows [rows, length], none where each row is one, cut at multiples of `chunk` of their own tokens.
// The same documents where none is longer, or chunk is 0.
std::vector<Document> in_chunks(const std::vector<Document>& documents, std::int64_t rows, std::int64_t length,
                                std::int64_t chunk);

// [batch, sequence, heads, head_dim]; differentiable where autograd is on, towards the sinks too. On the CPU in bf16
// without dropout and softcap this is attention in blocks (below); otherwise what device_attention.h has, or torch's
// (torch_attention.h).
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionRules& rules,
                     double dropout);

// Whether attention() would compute these tensors as attention in blocks.
bool attention_is_in_blocks(const at::Tensor& q, const AttentionRules& rules, double dropout);

// Attention in blocks of queries and keys with a running softmax (Dao et al., FlashAttention-2): scores and sums in
// fp32, probabilities rounded to bf16 before they multiply. The same bits on any number of threads. A block of keys
// that none of a block's queries sees is skipped: packed rows cost about what their documents cost. Blocks are counted
// from the row's begin. So a document has the bits of the same document alone where it begins at a multiple of 128;
// elsewhere its sums are cut differently. A processor that multiplies bf16 does so; others multiply in fp32
// (attention_kernels.h).
struct BlockAttention {
  at::Tensor out;  // as q, dense
  at::Tensor lse;  // fp32 [batch, heads, sequence]: log of each query's sum of exponentials, the sink's among them
};
BlockAttention attention_in_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionRules& rules);
struct AttentionGradient {
  at::Tensor q, k, v;  // dense
  at::Tensor sinks;    // fp32 [heads], where there are sinks
};
AttentionGradient attention_in_blocks_backward(const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, const BlockAttention& forward,
                                               const AttentionRules& rules);

}  // namespace tierflow::models
