#include "runtime/models/final_norm.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {

at::Tensor at_or_none(const std::vector<at::Tensor>& tensors, int position) {
  if (position < 0 || !tensors[static_cast<std::size_t>(position)].defined()) return {};
  return tensors[static_cast<std::size_t>(position)].detach();
}

FinalNorm::FinalNorm(NormKind kind, double eps, const TensorIndex& index, std::string_view name)
    : kind_(kind), eps_(eps) {
  if (kind_ != NormKind::none) weight_ = index.at(std::string(name) + ".weight");
  if (kind_ == NormKind::layer) bias_ = index.at(std::string(name) + ".bias");
}

FinalNorm::Normed FinalNorm::forward(const Weights& weights, const at::Tensor& hidden) const {
  Normed normed;
  normed.in = hidden.detach().reshape({-1, hidden.size(-1)});
  normed.weight = at_or_none(weights, weight_);
  normed.bias = at_or_none(weights, bias_);
  if (kind_ == NormKind::none) {
    normed.out = normed.in;
  } else if (kind_ == NormKind::rms) {
    normed.out = rms_norm(normed.in, normed.weight, eps_, &normed.rstd);
  } else {
    std::tie(normed.out, normed.mean, normed.rstd) =
        at::native_layer_norm(normed.in, {normed.in.size(1)}, normed.weight, normed.bias, eps_);
  }
  return normed;
}

at::Tensor FinalNorm::backward(const Normed& normed, const Gradients& gradients, const at::Tensor& d_out) const {
  if (kind_ == NormKind::rms)
    return rms_norm_backward(d_out, normed.in, normed.rstd, normed.weight, at_or_none(gradients, weight_));
  if (kind_ == NormKind::none) return d_out;
  const auto [d_in, d_weight, d_bias] = at::native_layer_norm_backward(
      d_out, normed.in, {normed.in.size(1)}, normed.mean, normed.rstd, normed.weight, normed.bias, {true, true, true});
  if (const at::Tensor sum = at_or_none(gradients, weight_); sum.defined()) sum.add_(d_weight);
  if (const at::Tensor sum = at_or_none(gradients, bias_); sum.defined()) sum.add_(d_bias);
  return d_in;
}

}  // namespace tierflow::models
