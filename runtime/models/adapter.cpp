#include "runtime/models/adapter.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {
Adapter::Adapter(const TensorIndex& index, const std::string& module) : a(index.find(module + ".lora_A.weight")) {
  if (a < 0) return;
  b = index.at(module + ".lora_B.weight");
  scale = index.scale(b);
}

Tensor Adapter::add_to(const Tensor& y, const Weights& weights, const Tensor& x, double dropout) const {
  if (a < 0) return y;
  const Tensor low = at::linear(with_dropout(x, dropout, dropout > 0), at_position(weights, a));
  return y + at::linear(low * scale, at_position(weights, b));
}

Tensor Adapter::low_gradient(const Weights& weights, const Tensor& d_y) const {
  return a < 0 ? Tensor() : at::mm(d_y, at_position(weights, b)).mul_(scale);
}

void Adapter::add_input_gradient(Tensor& d_x, const Weights& weights, const Tensor& d_low) const {
  if (a >= 0) d_x.addmm_(d_low, at_position(weights, a));
}

void Adapter::add_gradients(const Gradients& sums, const Weights& weights, const Tensor& d_y, const Tensor& x,
                            const Tensor& d_low) const {
  if (a < 0) return;
  add_product(at_position(sums, a), d_low, x);
  add_product(at_position(sums, b), d_y, at::linear(x, at_position(weights, a)).mul_(scale));
}

}  // namespace tierflow::models
