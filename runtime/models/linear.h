#pragma once
// A torch.nn.Linear of a block with its adapter: y = x W^T + b, and the positions of its tensors in a stage's Weights.
// W^T may be stored instead of W.
#include <ATen/core/Tensor.h>

#include <string>

#include "runtime/models/adapter.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

class Linear {
 public:
  Linear() = default;
  // Tensors `name`.weight and, where there is one, `name`.bias. With an empty name there is no such layer.
  Linear(const TensorIndex& index, const std::string& name);

  explicit operator bool() const { return weight_ >= 0; }
  // x [.., in] -> [.., out]. Differentiable where autograd is on. dropout: of what the adapter takes.
  at::Tensor operator()(const Weights& weights, const at::Tensor& x, double dropout = 0) const;

  // By hand, for d_y [tokens, out], x [tokens, in], and what incoming() gives of d_y.
  Adapter::Incoming incoming(const Weights& weights, const at::Tensor& d_y) const {
    return adapter_.incoming(weights, weight(weights), d_y);
  }
  // Adds the gradients of its tensors to `sums`.
  void add_gradient(const Weights& weights, const Gradients& sums, const at::Tensor& d_y, const at::Tensor& x,
                    const Adapter::Incoming& in) const;
  // The gradient of x; the second adds it.
  at::Tensor input_gradient(const Weights& weights, const at::Tensor& d_y, const Adapter::Incoming& in) const;
  void add_input_gradient(const Weights& weights, at::Tensor& d_x, const at::Tensor& d_y,
                          const Adapter::Incoming& in) const;

 private:
  at::Tensor weight(const Weights& weights) const;  // W [out, in]

  int weight_ = -1, bias_ = -1;
  bool transposed_ = false;
  Adapter adapter_;
};

}  // namespace tierflow::models
