#pragma once
// The norm between the last block and the logits, and its gradient by hand.
#include <ATen/core/Tensor.h>

#include <string_view>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

enum class NormKind : std::uint8_t { none, rms, layer };

class FinalNorm {
 public:
  // Tensors `name`.weight, and `name`.bias for a layer norm.
  FinalNorm(NormKind kind, double eps, const TensorIndex& index, std::string_view name);

  struct Normed {             // the result and what its gradient needs
    at::Tensor in, out;       // [tokens, hidden]
    at::Tensor weight, bias;  // of the norm
    at::Tensor mean, rstd;    // mean for a layer norm
  };
  // Without autograd.
  Normed forward(const Weights& weights, const at::Tensor& hidden) const;
  // The gradient of Normed::in from that of Normed::out; adds the parameters' to `gradients`.
  at::Tensor backward(const Normed& normed, const Gradients& gradients, const at::Tensor& d_out) const;

 private:
  NormKind kind_;
  double eps_;
  int weight_ = -1, bias_ = -1;
};

// The tensor at a position, outside any graph; undefined for position -1.
at::Tensor at_or_none(const std::vector<at::Tensor>& tensors, int position);

}  // namespace tierflow::models
