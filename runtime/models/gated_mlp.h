#pragma once
// An MLP: down(activation(gate(x)) * up(x)), or down(activation(up(x))).
#include "runtime/models/linear.h"

namespace tierflow::models {

// The names of its layers. If `gate` and `up` are one layer, `gate_up` is given instead of both. Without `gate` and
// `gate_up` there is no gate.
struct MlpNames {
  std::string gate, up, gate_up, down;
  bool up_first = false;  // the rows of gate_up
};

class GatedMlp {
 public:
  GatedMlp() = default;
  GatedMlp(const TensorIndex& index, const MlpNames& names, Activation activation);

  explicit operator bool() const { return static_cast<bool>(down_); }

  // What the gradient takes from the forward, [tokens, intermediate]; gate only where there is one.
  struct Kept {
    at::Tensor gate, up;
  };

  // For normed [.., hidden]. Differentiable where autograd is on. dropout: of what adapters take.
  Kept expand(const Weights& weights, const at::Tensor& normed, double dropout = 0) const;
  at::Tensor contract(const Weights& weights, const Kept& kept, double dropout = 0) const;
  // The backward by hand, for normed [tokens, hidden]. Returns the gradient of normed, releases normed as soon as it is
  // used, and adds the tensors' gradients to `sums`.
  at::Tensor backward(const Weights& weights, const Gradients& sums, at::Tensor normed, Kept kept,
                      const at::Tensor& d_out) const;

  std::vector<at::Tensor> essentials(const Kept& kept) const;
  Kept restore(std::vector<at::Tensor>::const_iterator& next) const;

 private:
  bool gated_ = true, up_first_ = false;
  Activation activation_ = Activation::silu;
  Linear gate_, up_, gate_up_, down_;
};

}  // namespace tierflow::models
