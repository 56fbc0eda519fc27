#include "runtime/models/adapter.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {
Adapter::Adapter(const TensorIndex& index, const std::string& module) : a(index.find(module + ".lora_A.weight")) {
  if (a < 0) return;
  b = index.at(module + ".lora_B.weight");
  scale = index.scale(b);
  a0 = index.find(module + ".lora_A0.weight");
  if (a0 >= 0) b0 = index.at(module + ".lora_B0.weight");
}

Tensor Adapter::add_to(const Tensor& y, const Weights& weights, const Tensor& x, double dropout) const {
  if (a < 0) return y;
  const auto product = [&](const Tensor& input, int first, int second) {
    return at::linear(at::linear(input, at_position(weights, first)) * scale, at_position(weights, second));
  };
  const Tensor added = product(with_dropout(x, dropout, dropout > 0), a, b);
  return y + (a0 < 0 ? added : added - product(x, a0, b0));
}

Tensor Adapter::low_gradient(const Weights& weights, const Tensor& d_y) const {
  return a < 0 ? Tensor() : at::mm(d_y, at_position(weights, b)).mul_(scale);
}

void Adapter::add_input_gradient(Tensor& d_x, const Weights& weights, const Tensor& d_y, const Tensor& d_low) const {
  if (a < 0) return;
  d_x.addmm_(d_low, at_position(weights, a));
  if (a0 >= 0) d_x.addmm_(at::mm(d_y, at_position(weights, b0)).mul_(-scale), at_position(weights, a0));
}

void Adapter::add_gradients(const Gradients& sums, const Weights& weights, const Tensor& d_y, const Tensor& x,
                            const Tensor& d_low) const {
  if (a < 0) return;
  add_product(at_position(sums, a), d_low, x);
  add_product(at_position(sums, b), d_y, at::linear(x, at_position(weights, a)).mul_(scale));
}

}  // namespace tierflow::models
