#pragma once
// The attention half of a decoder's block: projections, norms of q and k, rotary positions, attention. Its input is
// normed already; the residual is added outside.
#include "runtime/models/key_value_cache.h"
#include "runtime/models/linear.h"
#include "runtime/models/norm.h"

namespace tierflow::models {

class DecoderAttention {
 public:
  // For a block or an attention stage.
  DecoderAttention(const ModelSpec& spec, int stage);

  // Norms of the half's input, and of what it adds.
  const Norm& in() const { return in_; }
  const Norm& out() const { return out_; }

  // What the gradient needs from the forward.
  struct Kept {
    at::Tensor q_in, k_in;  // what their norms take, where there are any
    Norm::Kept q_norm, k_norm;
    at::Tensor q, k, v;  // [batch, sequence, heads, head_dim]
    at::Tensor attended;
    std::shared_ptr<const KeptAttention> by;  // null: `attended` ends a graph whose leaves are q, k, v and sinks
    at::Tensor lse;                           // of `by`
    at::Tensor sinks;                         // where that graph has them
  };

  // normed, the result: [batch, sequence, hidden]. Differentiable where autograd is on.
  at::Tensor forward(const Weights& weights, const at::Tensor& normed, const Shared& shared, bool training) const;

  // By hand, for normed [tokens, hidden]; `like` has the shape of the hidden states.
  Kept attend(const Weights& weights, const at::Tensor& normed, const at::Tensor& like, const Shared& shared) const;
  at::Tensor project(const Weights& weights, const Kept& kept) const;  // [tokens, hidden]
  // The gradient of normed; adds those of the half's tensors.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& normed, const Shared& shared,
                      Kept kept, const at::Tensor& d_out) const;

  std::vector<at::Tensor> essentials(const Kept& kept) const;
  // From essentials, from `next` on.
  Kept restore(const Weights& weights, const Shared& shared, std::vector<at::Tensor>::const_iterator& next) const;

 private:
  struct Projected {
    at::Tensor q, k, v;  // [.., heads, head_dim]
  };
  Projected project_in(const Weights& weights, const at::Tensor& x, const at::Tensor& like, double dropout) const;
  AttentionRules rules_of(const Weights& weights, const Shared& shared, const at::Tensor& q) const;
  at::Tensor normalise(const Weights& weights, const Norm& norm, const at::Tensor& x, Norm::Kept* kept) const;
  at::Tensor normalise_backward(const Weights& weights, const Gradients& sums, const Norm& norm, const at::Tensor& d,
                                const at::Tensor& x, const Norm::Kept& kept) const;
  void rotate(at::Tensor& q, at::Tensor& k, const Shared& shared, double sign = 1.0) const;
  at::Tensor scale_queries(const at::Tensor& q, const Shared& shared) const;
  void norm_and_rotate(const Weights& weights, const Shared& shared, Kept& kept) const;
  void attend_to_queries(const Weights& weights, const Shared& shared, Kept& kept) const;

  int stage_;
  const ModelConfig* config_;
  LayerSpec layer_;
  Norm in_, out_, q_norm_, k_norm_;
  Linear q_, k_, v_, qkv_, o_;
  int sinks_ = -1;
};

}  // namespace tierflow::models
