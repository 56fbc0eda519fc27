#include "runtime/models/linear.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"
#include "runtime/models/products.h"

namespace tierflow::models {
Linear::Linear(const TensorIndex& index, const std::string& name) {
  if (name.empty()) return;
  weight_ = index.at(name + ".weight");
  bias_ = index.find(name + ".bias");
  transposed_ = index.transposed();
  adapter_ = Adapter(index, name);
}

at::Tensor Linear::weight(const Weights& weights) const {
  const at::Tensor& stored = at_position(weights, weight_);
  return transposed_ ? stored.t() : stored;
}

at::Tensor Linear::operator()(const Weights& weights, const at::Tensor& x, double dropout) const {
  const at::Tensor w = weight(weights);
  if (adapter_.has_magnitude()) {
    const at::Tensor scaled = adapter_.scaled(linear_map(x, w), weights, w, x, dropout);
    return bias_ < 0 ? scaled : scaled + at_position(weights, bias_);
  }
  const at::Tensor y = bias_ < 0 ? linear_map(x, w) : linear_map(x, w, at_position(weights, bias_));
  return adapter_.add_to(y, weights, x, dropout);
}

void Linear::add_gradient(const Weights& weights, const Gradients& sums, const at::Tensor& d_y, const at::Tensor& x,
                          const Adapter::Incoming& in) const {
  sums.add_product(weight_, transposed_ ? x : d_y, transposed_ ? d_y : x);
  if (bias_ >= 0) add_rows(at_position(sums, bias_), d_y);
  adapter_.add_gradients(sums, weights, weight(weights), d_y, x, in);
}

at::Tensor Linear::input_gradient(const Weights& weights, const at::Tensor& d_y, const Adapter::Incoming& in) const {
  at::Tensor d_x = matrix_product(in.of_sum(d_y), weight(weights));
  adapter_.add_input_gradient(d_x, weights, d_y, in);
  return d_x;
}

void Linear::add_input_gradient(const Weights& weights, at::Tensor& d_x, const at::Tensor& d_y,
                                const Adapter::Incoming& in) const {
  add_matrix_product(d_x, in.of_sum(d_y), weight(weights));
  adapter_.add_input_gradient(d_x, weights, d_y, in);
}

}  // namespace tierflow::models
