#pragma once
// A norm of hidden states or of heads, over the last dimension, and its gradient by hand.
#include <ATen/core/Tensor.h>

#include <string>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

class Norm {
 public:
  Norm() = default;
  // Tensors `name`.weight, and `name`.bias for a layer norm. With an empty name the norm changes nothing. A weight
  // [heads, size] of layer_no_bias is that of x [.., heads, size]: multiplied in fp32, the product is rounded once.
  Norm(NormKind kind, double eps, const TensorIndex& index, const std::string& name);
  // Of kind rms, without a weight.
  static Norm unweighted(double eps);

  explicit operator bool() const { return kind_ != NormKind::none; }

  struct Kept {  // what the gradient needs beside the input
    at::Tensor mean, rstd;
  };
  // Differentiable where autograd is on and `kept` is null.
  at::Tensor operator()(const Weights& weights, const at::Tensor& x, Kept* kept = nullptr) const;
  // The same of x + added, two tensors of one shape; `added` becomes that sum, where nothing differentiates in its own
  // memory.
  at::Tensor of_sum(const Weights& weights, const at::Tensor& x, at::Tensor& added, Kept* kept = nullptr) const;
  // The gradient of x from that of the result, plus `residual` where defined; adds the parameters' to `sums`.
  at::Tensor backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_out, const at::Tensor& x,
                      const Kept& kept, const at::Tensor& residual = {}) const;

 private:
  at::Tensor weight_of(const Weights& weights, const at::Tensor& x) const;

  NormKind kind_ = NormKind::none;
  double eps_ = 0;
  int weight_ = -1, bias_ = -1;
};

// The tensor at a position, outside any graph; undefined for position -1.
at::Tensor at_or_none(const std::vector<at::Tensor>& tensors, int position);
at::Tensor at_or_none(const Gradients& sums, int position);

}  // namespace tierflow::models
