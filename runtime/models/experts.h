#pragma once
// The experts of a stage: MLPs, each of which computes only its tokens, one expert after the other. Their matrices may
// have adapters.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/models/expert_adapter.h"
#include "runtime/models/router.h"

namespace tierflow::models {

class Experts {
 public:
  Experts() = default;
  // For a stage of experts, or a block or MLP with all experts.
  Experts(const ModelSpec& spec, int stage);
  // Of a stage whose experts are units on demand: weights are those of one of these units, and the functions below take
  // the expert that is in it.
  static Experts on_demand(const ModelSpec& spec, int stage);

  // What the gradient takes from the forward of experts [begin, end): [their tokens, width], by expert.
  struct Kept {
    at::Tensor gate, up;
  };
  std::int64_t begin() const { return first_; }
  std::int64_t end() const { return first_ + count_; }

  // normed [tokens, hidden]. Differentiable where autograd is on.
  Kept expand(const Weights& weights, const at::Tensor& normed, const Routing& routing, const Assignment& assignment,
              std::int64_t begin, std::int64_t end) const;
  // Adds the results of experts [begin, end), each times its weight if that is not of the input, to `sum` [tokens,
  // hidden], in the type of Routing::weights.
  void contract(const Weights& weights, const Kept& kept, const Routing& routing, const Assignment& assignment,
                std::int64_t begin, std::int64_t end, const at::Tensor& sum) const;
  // By hand, for d_out [tokens, hidden]: adds the gradients of normed [tokens, hidden] and of Routing::weights, both in
  // the latter's type, and those of the experts' matrices to `sums`.
  void backward(const Weights& weights, const Gradients& sums, const at::Tensor& normed, Kept kept,
                const Routing& routing, const Assignment& assignment, std::int64_t begin, std::int64_t end,
                const at::Tensor& d_out, const at::Tensor& d_normed, const at::Tensor& d_weights) const;

  // All of the stage, one after the other, each forgotten before the next: as the three above. They take and give back
  // at once what one expert with every token needs, so that the memory they need at most is known before any routing.
  void add(const Weights& weights, const at::Tensor& normed, const Routing& routing, const Assignment& assignment,
           const at::Tensor& sum) const;
  void add(const Weights& weights, const at::Tensor& normed, const Routing& routing, const Assignment& assignment,
           std::int64_t begin, std::int64_t end, const at::Tensor& sum) const;
  void add_backward(const Weights& weights, const Gradients& sums, const at::Tensor& normed, const Routing& routing,
                    const Assignment& assignment, const at::Tensor& d_out, const at::Tensor& d_normed,
                    const at::Tensor& d_weights) const;

 private:
  // The matrices of one expert. Those that it does not have, and gradients that nobody wants, are undefined.
  struct Matrices {
    at::Tensor gate, up;         // [width, hidden], or
    at::Tensor both, both_bias;  // [2 width, hidden], [2 width]: rows of gate and up
    at::Tensor down, down_bias;  // [hidden, width], [hidden]
    ExpertFactors in, of_down;   // of the adapters; rows of in.b are those of gate, then those of up, or those of both
  };
  Experts(const ModelSpec& spec, const std::vector<int>& units, const TensorIndex& index, std::int64_t first,
          std::int64_t count);
  Matrices of(const std::vector<at::Tensor>& tensors, std::int64_t expert) const;
  at::Tensor half_of(const ExpertFactors& in, std::int64_t which) const;
  at::Tensor low_gradient(const ExpertFactors& in, const at::Tensor& d_gate, const at::Tensor& d_up) const;
  std::int64_t adapter_words(const Weights& weights, std::int64_t hidden) const;
  at::Tensor part_of(const at::Tensor& both, std::int64_t which) const;
  at::Tensor taken(const at::Tensor& normed, const Routing& routing, const Assignment& assignment,
                   std::int64_t expert) const;
  at::Tensor between(const at::Tensor& gate, const at::Tensor& up) const;
  void add_gradient(const Gradients& sums, const at::Tensor& sum, const at::Tensor& d, const at::Tensor& x) const;
  template <class Taken>
  at::Tensor backward_in(const Gradients& sums, const Matrices& matrices, const Matrices& gradients, Taken taken,
                         const at::Tensor& d_gate, const at::Tensor& d_up) const;

  Activation activation_ = Activation::silu;
  ExpertsSpec spec_;
  std::int64_t first_ = 0, count_ = 0;
  bool alone_ = false;                       // weights have one expert, whichever that is
  std::vector<int> gate_, up_, down_;        // of each expert
  int stacked_in_ = -1, stacked_down_ = -1;  // or of all
  int in_bias_ = -1, down_bias_ = -1;
  ExpertAdapter in_adapter_, down_adapter_;
};

}  // namespace tierflow::models
