#pragma once
// Chooses which experts of a layer each token takes, and with which weight (spec/decoder_spec.h, ExpertsSpec).
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

struct Routing {
  at::Tensor scores;  // [tokens, experts], fp32 or fp64: softmax or sigmoid of the logits
  at::Tensor chosen;  // [tokens, per_token] int64, the highest score first
  at::Tensor
      weights;  // [tokens, per_token] in the scores' type; differentiable towards the logits where autograd is on
};

// From logits [tokens, experts]; correction, where the spec has one: fp32 [experts]. Of equal scores the first expert's
// counts as higher.
Routing route(const ExpertsSpec& spec, const at::Tensor& logits, const at::Tensor& correction = {});
// The gradient of the logits, in the scores' type, from that of Routing::weights and, where `balance` is not null, of
// the load-balancing loss.
at::Tensor route_backward(const ExpertsSpec& spec, const Routing& routing, const at::Tensor& d_weights,
                          const RouterBalance* balance = nullptr);

class Router {
 public:
  Router() = default;
  // Tensors `name`.weight and, where the spec says so, `name`.bias and `name`.e_score_correction_bias.
  Router(const ExpertsSpec& spec, const TensorIndex& index, const std::string& name);

  // normed [tokens, hidden] -> [tokens, experts], fp32 where the spec says so.
  at::Tensor logits(const Weights& weights, const at::Tensor& normed) const;
  Routing route(const Weights& weights, const at::Tensor& logits) const;
  // Returns the gradient of normed from the gradient of the logits. Adds the gradients of the router's weight and bias
  // to `sums`.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_logits,
                      const at::Tensor& normed) const;

 private:
  at::Tensor in_type(const at::Tensor& x) const;

  ExpertsSpec spec_;
  int weight_ = -1, bias_ = -1, correction_ = -1;
};

// The tokens of each expert.
struct Assignment {
  std::vector<std::int64_t> begin;  // of each expert's part of what follows, and the end of the last
  at::Tensor tokens;                // [tokens * per_token] int64: by expert, then ascending
  at::Tensor places;                // [tokens * per_token] int64: in weights.flatten()
  std::int64_t count(std::int64_t expert) const {
    return begin[static_cast<std::size_t>(expert) + 1] - begin[static_cast<std::size_t>(expert)];
  }
};
// Records in `touched` the experts that have tokens; does nothing if it is null.
void tell(const Assignment& assignment, std::int64_t block, ExpertsTouched* touched);
// Waits for the device.
Assignment assign(const ExpertsSpec& spec, const at::Tensor& chosen);

}  // namespace tierflow::models
