#include "runtime/models/loss_head.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// 16-bit logits of a chunk: 16 MiB on the CPU; on CUDA more rows, so that the weight gradient's product has enough work
// for each element of the fp32 sum it reads and writes.
constexpr std::int64_t kCpuLogits = std::int64_t{8} << 20, kCudaLogits = std::int64_t{64} << 20;

at::Tensor at_or_none(const std::vector<at::Tensor>& tensors, int position) {
  if (position < 0 || !tensors[static_cast<std::size_t>(position)].defined()) return {};
  return tensors[static_cast<std::size_t>(position)].detach();
}

double sum_in_order(const at::Tensor& losses) {
  const at::Tensor host = losses.cpu();
  const double* loss = host.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t i = 0; i < host.numel(); ++i) sum += loss[i];
  return sum;
}

}  // namespace

struct LossHead::Normed {
  at::Tensor in, out;       // [tokens, hidden]
  at::Tensor weight, bias;  // of the norm
  at::Tensor mean, rstd;    // mean for a layer norm
};

std::int64_t head_chunk_rows(std::int64_t vocab, bool cuda) {
  const std::int64_t rows = (cuda ? kCudaLogits : kCpuLogits) / std::max<std::int64_t>(1, vocab) / 16 * 16;
  return std::max<std::int64_t>(16, rows);
}

LossHead::LossHead(NormKind kind, double eps, const TensorIndex& index, std::string_view norm, std::string_view tied)
    : kind_(kind), eps_(eps) {
  if (kind_ != NormKind::none) norm_weight_ = index.at(std::string(norm) + ".weight");
  if (kind_ == NormKind::layer) norm_bias_ = index.at(std::string(norm) + ".bias");
  output_ = index.find("lm_head.weight");
  if (output_ < 0) output_ = index.at(tied);
}

LossHead::Normed LossHead::normalise(const Weights& weights, const at::Tensor& hidden) const {
  Normed normed;
  normed.in = hidden.detach().reshape({-1, hidden.size(-1)});
  normed.weight = at_or_none(weights, norm_weight_);
  normed.bias = at_or_none(weights, norm_bias_);
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

double LossHead::loss(const Weights& weights, const at::Tensor& hidden, const at::Tensor& labels, at::Tensor* losses,
                      std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const at::Tensor normed = normalise(weights, hidden).out;
  const at::Tensor output = at_or_none(weights, output_), flat = labels.reshape({-1}).contiguous();
  const std::int64_t tokens = normed.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(output.size(0), output.is_cuda());
  at::Tensor each = at::zeros({tokens}, normed.options().dtype(at::kDouble));
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    at::Tensor logits = at::mm(normed.narrow(0, first, rows), output.t());
    cross_entropy(logits, flat.narrow(0, first, rows), each.narrow(0, first, rows), 1.0, false);
  }
  if (losses != nullptr) *losses = each;
  return sum_in_order(each);
}

HeadResult LossHead::loss_and_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                                       const at::Tensor& labels, double scale, std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const Normed normed = normalise(weights, hidden);
  const at::Tensor output = at_or_none(weights, output_), flat = labels.reshape({-1}).contiguous();
  const at::Tensor d_output = at_or_none(gradients, output_);
  const std::int64_t tokens = normed.out.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(output.size(0), output.is_cuda());
  at::Tensor each = at::zeros({tokens}, normed.out.options().dtype(at::kDouble));
  at::Tensor d = at::empty_like(normed.out);
  at::Tensor buffer = at::empty({std::min(chunk, tokens), output.size(0)}, normed.out.options());
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    const at::Tensor part = normed.out.narrow(0, first, rows);
    at::Tensor logits = buffer.narrow(0, 0, rows), d_part = d.narrow(0, first, rows);
    at::mm_out(logits, part, output.t());
    cross_entropy(logits, flat.narrow(0, first, rows), each.narrow(0, first, rows), scale, true);
    at::mm_out(d_part, logits, output);
    add_product(d_output, logits, part);
  }
  buffer.reset();

  if (kind_ == NormKind::rms) {
    d = rms_norm_backward(d, normed.in, normed.rstd, normed.weight, at_or_none(gradients, norm_weight_));
  } else if (kind_ == NormKind::layer) {
    const auto [d_in, d_weight, d_bias] = at::native_layer_norm_backward(
        d, normed.in, {normed.in.size(1)}, normed.mean, normed.rstd, normed.weight, normed.bias, {true, true, true});
    d = d_in;
    if (const at::Tensor sum = at_or_none(gradients, norm_weight_); sum.defined()) sum.add_(d_weight);
    if (const at::Tensor sum = at_or_none(gradients, norm_bias_); sum.defined()) sum.add_(d_bias);
  }
  return {.loss_sum = sum_in_order(each), .d_carry = {d.view(hidden.sizes())}};
}

at::Tensor LossHead::logits(const Weights& weights, const at::Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  return at::mm(normalise(weights, hidden).out, at_or_none(weights, output_).t());
}

}  // namespace tierflow::models
