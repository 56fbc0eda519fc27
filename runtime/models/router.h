#pragma once
// Which experts of a layer each token takes, and with what weight (spec/decoder_spec.h, ExpertsSpec).
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/models/linear.h"

namespace tierflow::models {

struct Routing {
  at::Tensor scores;  // [tokens, experts], fp32 or fp64: softmax of the logits
  at::Tensor chosen;  // [tokens, per_token] int64, the highest score first
  at::Tensor
      weights;  // [tokens, per_token] in the scores' type; differentiable towards the logits where autograd is on
};

class Router {
 public:
  Router() = default;
  // With an index that has no `name`.weight there is no router.
  Router(const TensorIndex& index, const std::string& name);

  explicit operator bool() const { return static_cast<bool>(linear_); }
  // normed [tokens, hidden] -> [tokens, experts].
  at::Tensor logits(const Weights& weights, const at::Tensor& normed) const { return linear_(weights, normed); }
  // The gradient of normed from that of the logits; adds that of the router's weight.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_logits,
                      const at::Tensor& normed) const;

 private:
  Linear linear_;
};

// From logits [tokens, experts]. Of equal scores the first expert's counts as higher.
Routing route(const ExpertsSpec& spec, const at::Tensor& logits);
// The gradient of the logits, in the scores' type, from that of Routing::weights.
at::Tensor route_backward(const ExpertsSpec& spec, const Routing& routing, const at::Tensor& d_weights);

// The tokens of each expert.
struct Assignment {
  std::vector<std::int64_t> begin;  // of each expert's part of what follows, and the end of the last
  at::Tensor tokens;                // [tokens * per_token] int64: by expert, then ascending
  at::Tensor places;                // [tokens * per_token] int64: in weights.flatten()
  std::int64_t count(std::int64_t expert) const {
    return begin[static_cast<std::size_t>(expert) + 1] - begin[static_cast<std::size_t>(expert)];
  }
};
// Waits for the device.
Assignment assign(const ExpertsSpec& spec, const at::Tensor& chosen);

}  // namespace tierflow::models
