#pragma once
// What some families compute with logits between the product and the softmax.
#include <ATen/core/Tensor.h>

namespace tierflow::models {

// logits = multiplier * product, then softcap * tanh(logits / softcap).
struct LogitRule {
  double multiplier = 1;
  double softcap = 0;  // 0: none

  // In place, without autograd.
  void apply(at::Tensor& logits) const;
  // What backward() needs from the logits. Call it between apply() and the loss, which may overwrite them.
  at::Tensor slope(const at::Tensor& logits) const;
  // Turns the gradient of the logits into that of the product, in place.
  void backward(at::Tensor& d_logits, const at::Tensor& slope) const;
};

}  // namespace tierflow::models
