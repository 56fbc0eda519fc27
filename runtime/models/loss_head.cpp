#include "runtime/models/loss_head.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// 16-bit logits of a chunk: 16 MiB on the CPU; on CUDA more rows, so that the weight gradient's product has enough work
// for each element of the fp32 sum it reads and writes.
constexpr std::int64_t kCpuLogits = std::int64_t{8} << 20, kCudaLogits = std::int64_t{64} << 20;

}  // namespace

double sum_in_order(const at::Tensor& losses) {
  const at::Tensor host = losses.cpu();
  const double* loss = host.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t i = 0; i < host.numel(); ++i) sum += loss[i];
  return sum;
}

std::int64_t head_chunk_rows(std::int64_t vocab, bool cuda) {
  const std::int64_t rows = (cuda ? kCudaLogits : kCpuLogits) / std::max<std::int64_t>(1, vocab) / 16 * 16;
  return std::max<std::int64_t>(16, rows);
}

LossHead::LossHead(const Norm& norm, const LogitRule& rule, const TensorIndex& index, std::string_view own,
                   std::string_view tied)
    : norm_(norm), rule_(rule) {
  output_ = index.find(own);
  if (output_ < 0) output_ = index.at(tied);
}

HeadScores LossHead::scores(const Weights& weights, const at::Tensor& hidden, const at::Tensor& labels,
                            std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const at::Tensor normed = norm_(weights, token_rows(hidden));
  const at::Tensor output = at_or_none(weights, output_), flat = labels.reshape({-1}).contiguous();
  const std::int64_t tokens = normed.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(output.size(0), output.is_cuda());
  at::Tensor each = at::zeros({tokens}, normed.options().dtype(at::kDouble));
  at::Tensor hits = at::zeros({tokens}, normed.options().dtype(at::kBool));
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    at::Tensor logits = at::mm(normed.narrow(0, first, rows), output.t());
    rule_.apply(logits);
    const at::Tensor chunk_labels = flat.narrow(0, first, rows);
    hits.narrow(0, first, rows).copy_(logits.argmax(1).eq(chunk_labels));
    cross_entropy(logits, chunk_labels, each.narrow(0, first, rows), 1.0, false);
  }
  return {.loss_sum = sum_in_order(each), .losses = each, .hits = hits};
}

HeadResult LossHead::loss_and_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                                       const at::Tensor& labels, const TokenScale& scale,
                                       std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const at::Tensor in = token_rows(hidden);
  Norm::Kept kept;
  const at::Tensor normed = norm_(weights, in, &kept);
  const at::Tensor output = at_or_none(weights, output_), flat = labels.reshape({-1}).contiguous();
  const at::Tensor d_output = at_or_none(gradients, output_);
  const std::int64_t tokens = normed.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(output.size(0), output.is_cuda());
  at::Tensor each = at::zeros({tokens}, normed.options().dtype(at::kDouble));
  at::Tensor d = at::empty_like(normed);
  at::Tensor buffer = at::empty({std::min(chunk, tokens), output.size(0)}, normed.options());
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    const at::Tensor part = normed.narrow(0, first, rows);
    at::Tensor logits = buffer.narrow(0, 0, rows), d_part = d.narrow(0, first, rows);
    at::mm_out(logits, part, output.t());
    rule_.apply(logits);
    const at::Tensor slope = rule_.slope(logits);
    scale.for_each_stretch(first, rows, [&](std::int64_t begin, std::int64_t count, double here) {
      at::Tensor stretch = logits.narrow(0, begin - first, count);
      cross_entropy(stretch, flat.narrow(0, begin, count), each.narrow(0, begin, count), here, true);
    });
    rule_.backward(logits, slope);
    at::mm_out(d_part, logits, output);
    add_product(d_output, logits, part);
  }
  buffer.reset();

  d = norm_.backward(weights, gradients, d, in, kept);
  return {.loss_sum = sum_in_order(each), .d_carry = {d.view(hidden.sizes())}};
}

at::Tensor LossHead::logits(const Weights& weights, const at::Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  at::Tensor logits = at::mm(norm_(weights, token_rows(hidden)), at_or_none(weights, output_).t());
  rule_.apply(logits);
  return logits;
}

}  // namespace tierflow::models
