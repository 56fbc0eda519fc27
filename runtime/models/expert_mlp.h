#pragma once
// A mixture of experts: router, experts and the shared expert. It is one stage with all experts, or several stages with
// some experts each (stage kind experts).
#include "runtime/models/experts.h"
#include "runtime/models/gated_mlp.h"
#include "runtime/models/norm.h"
#include "runtime/models/router.h"

namespace tierflow::models {

// The expert that every token takes.
class SharedExpert {
 public:
  SharedExpert() = default;
  SharedExpert(const ModelSpec& spec, const TensorIndex& index);

  explicit operator bool() const { return static_cast<bool>(mlp_); }

  struct Kept {
    GatedMlp::Kept mlp;
    at::Tensor gate;  // [tokens, 1], before its sigmoid; undefined where there is none
  };
  Kept expand(const Weights& weights, const at::Tensor& normed, double dropout = 0) const;
  // Differentiable where autograd is on, as is expand().
  at::Tensor contract(const Weights& weights, const Kept& kept, double dropout = 0) const;
  // The gradient of normed.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& normed, Kept kept,
                      const at::Tensor& d_out) const;
  void add_essentials(const Kept& kept, std::vector<at::Tensor>& tensors) const;
  Kept restore(std::vector<at::Tensor>::const_iterator& next) const;

 private:
  GatedMlp mlp_;
  Linear gate_;
};

// For a block or MLP stage with all experts of its layer.
class ExpertMlp {
 public:
  ExpertMlp() = default;
  ExpertMlp(const ModelSpec& spec, int stage);

  struct Kept {
    at::Tensor logits;
    Routing routing;
    Assignment assignment;
    Experts::Kept experts;
    SharedExpert::Kept shared;
  };
  // For normed [tokens, hidden]; differentiable where autograd is on.
  Kept expand(const Weights& weights, const at::Tensor& normed, double dropout, const RouterWatch& watch) const;
  at::Tensor contract(const Weights& weights, const Kept& kept, double dropout = 0) const;
  // By hand: the gradient of normed; adds those of the tensors.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& normed, Kept kept,
                      const at::Tensor& d_out, const RouterBalance* balance) const;
  std::vector<at::Tensor> essentials(const Kept& kept) const;
  Kept restore(const Weights& weights, std::vector<at::Tensor>::const_iterator& next) const;

 private:
  ExpertsSpec spec_;
  std::int64_t hidden_ = 0, block_ = 0;
  Router router_;
  SharedExpert shared_;
  Experts experts_;
};

// A stage with some of a layer's experts. Between two of them the carry holds: the hidden states that the layer's MLP
// began with; these normed [tokens, hidden]; of each token the weights and the experts [tokens, per_token], as Routing
// has them; and the sum so far [tokens, hidden], fp32 (fp64 in a model of fp64). Before the first and after the last it
// holds hidden states alone. The gradient by hand of such a carry has the same shapes, none for the experts; those of
// the normed states, the weights and the sum are fp32 (fp64).
class ExpertStage {
 public:
  ExpertStage(const ModelSpec& spec, int stage);

  // Differentiable where autograd is on.
  Carry forward(const Weights& weights, const Carry& carry, double dropout, const RouterWatch& watch) const;
  // forward() of a stage whose experts are units on demand. weights: of its own units; x: what the carry begins with.
  std::unique_ptr<StageInParts> begin(const Weights& weights, const at::Tensor& x) const;
  // By hand; `taken`: as taken_by_backward() says.
  Carry backward(const Weights& weights, const Gradients& sums, const Carry& taken, const Carry& d_out,
                 const RouterBalance* balance) const;
  // The whole input for the gradient; tensors that were not taken are zeros.
  Carry completed(const Carry& taken, const Carry& d_out) const;

 private:
  class InParts;
  // The carry with which a layer's first stage begins.
  struct Begun {
    at::Tensor normed, sum;
    Routing routing;
  };
  Begun begun(const Weights& weights, const at::Tensor& x, double dropout, RouterBalance* balance) const;
  // x and what the experts add to it.
  at::Tensor finished(const at::Tensor& x, const at::Tensor& sum) const;

  ExpertsSpec spec_;
  double residual_multiplier_;
  std::int64_t hidden_, block_;
  bool first_, last_;
  Norm in_;
  Router router_;
  SharedExpert shared_;
  Experts experts_;
};

}  // namespace tierflow::models
