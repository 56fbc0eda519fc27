#include "runtime/models/norm.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {

at::Tensor at_or_none(const std::vector<at::Tensor>& tensors, int position) {
  if (position < 0 || !tensors[static_cast<std::size_t>(position)].defined()) return {};
  return tensors[static_cast<std::size_t>(position)].detach();
}

at::Tensor at_or_none(const Gradients& sums, int position) {
  return sums.wants(position) ? at_position(sums, position).detach() : at::Tensor();
}

Norm::Norm(NormKind kind, double eps, const TensorIndex& index, const std::string& name)
    : kind_(name.empty() ? NormKind::none : kind), eps_(eps) {
  if (kind_ != NormKind::none) weight_ = index.at(name + ".weight");
  if (has_bias(kind_)) bias_ = index.at(name + ".bias");
}

Norm Norm::unweighted(double eps) {
  Norm norm;
  norm.kind_ = NormKind::rms;
  norm.eps_ = eps;
  return norm;
}

at::Tensor Norm::weight_of(const Weights& weights, const at::Tensor& x) const {
  return weight_ < 0 ? at::ones({x.size(-1)}, x.options()) : weights[static_cast<std::size_t>(weight_)];
}

namespace {

at::Tensor wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

}  // namespace

at::Tensor Norm::operator()(const Weights& weights, const at::Tensor& x, Kept* kept) const {
  if (kind_ == NormKind::none) return x;
  const at::Tensor stored = weight_of(weights, x);
  if (!subtracts_mean(kind_)) return rms_norm(x, stored, eps_, kind_, kept != nullptr ? &kept->rstd : nullptr);
  const at::Tensor weight = kind_ == NormKind::layer_plus_one ? stored + 1 : stored;
  if (weight.dim() == 2) {
    if (kept == nullptr)
      return (at::layer_norm(wide(x), {x.size(-1)}, {}, {}, eps_) * wide(weight)).to(x.scalar_type());
    at::Tensor out;
    std::tie(out, kept->mean, kept->rstd) = at::native_layer_norm(wide(x), {x.size(-1)}, {}, {}, eps_);
    return out.mul_(wide(weight)).to(x.scalar_type());
  }
  const at::Tensor bias = bias_ < 0 ? at::Tensor() : weights[static_cast<std::size_t>(bias_)];
  if (kept == nullptr) return layer_norm(x, weight, bias, eps_);
  return layer_norm(x, weight, bias, eps_, &kept->mean, &kept->rstd);
}

at::Tensor Norm::of_sum(const Weights& weights, const at::Tensor& x, at::Tensor& added, Kept* kept) const {
  if (kind_ == NormKind::none || subtracts_mean(kind_)) {
    added = x + added;
    return (*this)(weights, added, kept);
  }
  return rms_norm_of_sum(x, added, weight_of(weights, x), eps_, kind_, kept != nullptr ? &kept->rstd : nullptr);
}

at::Tensor Norm::backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_out, const at::Tensor& x,
                          const Kept& kept, const at::Tensor& residual) const {
  if (kind_ == NormKind::none) return residual.defined() ? d_out + residual : d_out;
  const at::Tensor stored = weight_of(weights, x).detach();
  if (!subtracts_mean(kind_))
    return rms_norm_backward(d_out, x, kept.rstd, stored, at_or_none(sums, weight_), kind_, residual);
  const at::Tensor weight = kind_ == NormKind::layer_plus_one ? stored + 1 : stored;
  if (weight.dim() == 2) {
    const at::Tensor d = wide(d_out), in = wide(x);
    if (const at::Tensor sum = at_or_none(sums, weight_); sum.defined())
      sum.add_(((in - kept.mean) * kept.rstd).mul_(d).reshape({-1, weight.size(0), weight.size(1)}).sum(0));
    const at::Tensor d_in = std::get<0>(at::native_layer_norm_backward(d * wide(weight), in, {x.size(-1)}, kept.mean,
                                                                       kept.rstd, {}, {}, {true, false, false}))
                                .to(x.scalar_type());
    return residual.defined() ? d_in + residual : d_in;
  }
  const at::Tensor d_x = layer_norm_backward(d_out, x, kept.mean, kept.rstd, weight, at_or_none(weights, bias_),
                                             at_or_none(sums, weight_), at_or_none(sums, bias_));
  return residual.defined() ? d_x + residual : d_x;
}

}  // namespace tierflow::models
