#pragma once
// The MLP half of a decoder's block: one MLP, or a mixture of experts. Its input is normed already; the residual is
// added outside.
#include <optional>

#include "runtime/models/expert_mlp.h"
#include "runtime/models/gated_mlp.h"
#include "runtime/models/norm.h"

namespace tierflow::models {

class DecoderMlp {
 public:
  // For a block or an MLP stage.
  DecoderMlp(const ModelSpec& spec, int stage);

  // Norms of the half's input, and of what it adds.
  const Norm& in() const { return in_; }
  const Norm& out() const { return out_; }

  // What the gradient needs from the forward.
  struct Kept {
    GatedMlp::Kept dense;
    ExpertMlp::Kept experts;
  };

  // normed, the result: [.., hidden]. Differentiable where autograd is on. dropout: of what adapters take.
  at::Tensor forward(const Weights& weights, const at::Tensor& normed, double dropout, const RouterWatch& watch) const;

  // By hand, for normed [tokens, hidden].
  Kept expand(const Weights& weights, const at::Tensor& normed, const RouterWatch& watch) const;
  at::Tensor contract(const Weights& weights, const Kept& kept) const;
  // Returns the gradient of normed, and releases normed as soon as it is used. Adds the gradients of the half's tensors
  // to `sums`.
  at::Tensor backward(const Weights& weights, const Gradients& sums, at::Tensor normed, Kept kept,
                      const at::Tensor& d_out, const RouterWatch& watch) const;

  std::vector<at::Tensor> essentials(const Kept& kept) const;
  // From essentials, from `next` on.
  Kept restore(const Weights& weights, std::vector<at::Tensor>::const_iterator& next) const;

 private:
  Norm in_, out_;
  GatedMlp dense_;
  std::optional<ExpertMlp> experts_;
};

}  // namespace tierflow::models
