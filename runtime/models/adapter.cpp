#include "runtime/models/adapter.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/spec/adapters.h"

namespace tierflow::models {
namespace {

constexpr std::int64_t kLengthElements = 1 << 22;  // of a weight, while the lengths of its rows are taken
constexpr std::int64_t kMagnitudeTokens = 1024;    // at once, for the magnitude's gradient

}  // namespace

Adapter::Adapter(const TensorIndex& index, const std::string& module) : a(index.find(module + ".lora_A.weight")) {
  if (a < 0) return;
  b = index.at(module + ".lora_B.weight");
  scale = index.scale(b);
  a0 = index.find(module + ".lora_A0.weight");
  if (a0 >= 0) b0 = index.at(module + ".lora_B0.weight");
  m = index.find(module + ".lora_magnitude_vector");
  if (m >= 0) m0 = index.at(module + ".lora_magnitude_base");
}

Tensor Adapter::product(const Weights& weights, const Tensor& x, int first, int second) const {
  return linear_map(linear_map(x, at_position(weights, first)) * scale, at_position(weights, second));
}

Tensor Adapter::add_to(const Tensor& y, const Weights& weights, const Tensor& x, double dropout) const {
  if (!is_in(weights)) return y;
  const Tensor added = product(weights, with_dropout(x, dropout, dropout > 0), a, b);
  return y + (a0 < 0 ? added : added - product(weights, x, a0, b0));
}

// |rows of W + scale * B A| [out], fp32 (fp64 for fp64); a row of zeros has a length that can be divided by.
Tensor Adapter::lengths(const Weights& weights, const Tensor& weight) const {
  if (const Tensor& known = at_position(weights, m0); known.dim() == 2) return known.select(0, 1);
  const at::NoGradGuard no_grad;
  const auto wide = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor first = at_position(weights, a).to(wide), second = at_position(weights, b).to(wide);
  const std::int64_t rows = weight.size(0), tile = std::max<std::int64_t>(1, kLengthElements / weight.size(1));
  const Tensor lengths = at::empty({rows}, weight.options().dtype(wide));
  for (std::int64_t row = 0; row < rows; row += tile) {
    const std::int64_t count = std::min(tile, rows - row);
    const Tensor sum = at::addmm(weight.narrow(0, row, count).to(wide), second.narrow(0, row, count), first, 1, scale);
    lengths.narrow(0, row, count).copy_(at::linalg_vector_norm(sum, 2, at::IntArrayRef{1}));
  }
  return lengths.clamp_min(1e-30);
}

Tensor Adapter::with_lengths(const Weights& weights, const Tensor& weight) const {
  return at::stack({at_position(weights, m0), lengths(weights, weight)});
}

Tensor Adapter::magnitude(const Weights& weights) const {
  const Tensor& base = at_position(weights, m0);
  const Tensor first = base.dim() == 2 ? base.select(0, 0) : base;
  const Tensor& more = at_position(weights, m);
  return first + more.to(more.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Tensor Adapter::scaled(const Tensor& y, const Weights& weights, const Tensor& weight, const Tensor& x,
                       double dropout) const {
  if (!is_in(weights)) return y;
  const Tensor gain = magnitude(weights) / lengths(weights, weight);
  if (dropout == 0) return ((y + product(weights, x, a, b)) * gain).to(y.scalar_type());
  const Tensor left = with_dropout(x, dropout, true);
  return y + ((gain - 1) * linear_map(left, weight) + gain * product(weights, left, a, b)).to(y.scalar_type());
}

Adapter::Incoming Adapter::incoming(const Weights& weights, const Tensor& weight, const Tensor& d_y) const {
  Incoming in;
  if (a < 0) return in;
  if (m >= 0) {
    in.reciprocals = lengths(weights, weight).reciprocal();
    in.sum = (d_y * (magnitude(weights) * in.reciprocals)).to(d_y.scalar_type());
  }
  in.low = matrix_product(in.of_sum(d_y), at_position(weights, b)).mul_(scale);
  return in;
}

void Adapter::add_input_gradient(Tensor& d_x, const Weights& weights, const Tensor& d_y, const Incoming& in) const {
  if (a < 0) return;
  add_matrix_product(d_x, in.low, at_position(weights, a));
  if (a0 >= 0)
    add_matrix_product(d_x, matrix_product(d_y, at_position(weights, b0)).mul_(-scale), at_position(weights, a0));
}

void Adapter::add_gradients(const Gradients& sums, const Weights& weights, const Tensor& weight, const Tensor& d_y,
                            const Tensor& x, const Incoming& in) const {
  if (a < 0) return;
  sums.add_product(a, in.low, x);
  if (sums.wants(b)) sums.add_product(b, in.of_sum(d_y), linear_map(x, at_position(weights, a)).mul_(scale));
  if (!sums.wants(m)) return;
  Tensor total = at::zeros_like(in.reciprocals);
  for (std::int64_t token = 0; token < x.size(0); token += kMagnitudeTokens) {
    const std::int64_t count = std::min(kMagnitudeTokens, x.size(0) - token);
    const Tensor part = x.narrow(0, token, count);
    const Tensor sum = linear_map(part, weight) + product(weights, part, a, b);
    total.add_((d_y.narrow(0, token, count).to(total.scalar_type()) * sum).sum(0));
  }
  at_position(sums, m).add_(total.mul_(in.reciprocals));
}

Weights without_adapters(const ModelSpec& spec, int stage, Weights weights) {
  std::size_t position = 0;
  for (const int unit : spec.stages[static_cast<std::size_t>(stage)].units)
    for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors) {
      if (is_adapter(tensor)) weights[position].reset();
      ++position;
    }
  return weights;
}

}  // namespace tierflow::models
