#include "runtime/models/gated_mlp.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {

GatedMlp::GatedMlp(const TensorIndex& index, const MlpNames& names, Activation activation)
    : gated_(!names.gate.empty() || !names.gate_up.empty()),
      up_first_(names.up_first),
      activation_(activation),
      gate_(index, names.gate),
      up_(index, names.up),
      gate_up_(index, names.gate_up),
      down_(index, names.down) {}

GatedMlp::Kept GatedMlp::expand(const Weights& weights, const Tensor& normed, double dropout) const {
  if (!gated_) return {.gate = {}, .up = up_(weights, normed, dropout)};
  if (!gate_up_) {
    Tensor gate = gate_(weights, normed, dropout);
    return {.gate = std::move(gate), .up = up_(weights, normed, dropout)};
  }
  const Tensor both = gate_up_(weights, normed, dropout);
  const std::int64_t half = both.size(-1) / 2;
  return {.gate = both.narrow(-1, up_first_ ? half : 0, half).contiguous(),
          .up = both.narrow(-1, up_first_ ? 0 : half, half).contiguous()};
}

Tensor GatedMlp::contract(const Weights& weights, const Kept& kept, double dropout) const {
  return down_(weights, gated_ ? gated(kept.gate, kept.up, activation_) : activate(kept.up, activation_), dropout);
}

std::vector<Tensor> GatedMlp::essentials(const Kept& kept) const {
  return gated_ ? std::vector<Tensor>{kept.gate, kept.up} : std::vector<Tensor>{kept.up};
}

GatedMlp::Kept GatedMlp::restore(std::vector<Tensor>::const_iterator& next) const {
  Kept kept;
  if (gated_) kept.gate = *next++;
  kept.up = *next++;
  return kept;
}

Tensor GatedMlp::backward(const Weights& weights, const Gradients& sums, Tensor normed, Kept kept,
                          const Tensor& d_y) const {
  const auto in_down = down_.incoming(weights, d_y);
  Tensor inner = down_.input_gradient(weights, d_y, in_down);
  if (gated_) {
    gated_backward(kept.gate, kept.up, inner, activation_);  // now gradients, and inner what down took
  } else {
    Tensor d_up = activate_backward(inner, kept.up, activation_);
    inner = activate(kept.up, activation_);
    kept.up = std::move(d_up);
  }
  down_.add_gradient(weights, sums, d_y, inner, in_down);
  inner.reset();
  if (!gated_ || gate_up_) {
    const Tensor d = !gated_     ? kept.up
                     : up_first_ ? at::cat({kept.up, kept.gate}, 1)
                                 : at::cat({kept.gate, kept.up}, 1);
    kept = {};
    const Linear& first = gated_ ? gate_up_ : up_;
    const auto in = first.incoming(weights, d);
    first.add_gradient(weights, sums, d, normed, in);
    normed.reset();
    return first.input_gradient(weights, d, in);
  }
  const auto in_gate = gate_.incoming(weights, kept.gate), in_up = up_.incoming(weights, kept.up);
  gate_.add_gradient(weights, sums, kept.gate, normed, in_gate);
  up_.add_gradient(weights, sums, kept.up, normed, in_up);
  normed.reset();
  Tensor d_normed = gate_.input_gradient(weights, kept.gate, in_gate);
  kept.gate.reset();
  up_.add_input_gradient(weights, d_normed, kept.up, in_up);
  return d_normed;
}

}  // namespace tierflow::models
