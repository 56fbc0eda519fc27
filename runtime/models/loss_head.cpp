#include "runtime/models/loss_head.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/ops.h"
#include "runtime/models/products.h"

namespace tierflow::models {
namespace {

// 16-bit logits of a chunk: 16 MiB on the CPU; elsewhere 256 MiB: the weight gradient's product has enough work for
// each element of the fp32 sum it reads and writes, and a vocabulary takes few launches.
constexpr std::int64_t kCpuLogits = std::int64_t{8} << 20, kDeviceLogits = std::int64_t{128} << 20;

}  // namespace

at::Tensor sum_in_order(const at::Tensor& losses) {
  if (!losses.is_cpu()) return losses.sum();
  const at::Tensor dense = losses.contiguous();
  const double* loss = dense.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t i = 0; i < dense.numel(); ++i) sum += loss[i];
  return at::scalar_tensor(sum, losses.options());
}

std::int64_t head_chunk_rows(std::int64_t vocab, bool on_device) {
  const std::int64_t rows = (on_device ? kDeviceLogits : kCpuLogits) / std::max<std::int64_t>(1, vocab);
  if (on_device && rows >= 128) return rows / 128 * 128;  // whole tiles of the products
  return std::max<std::int64_t>(16, rows / 16 * 16);
}

LossHead::LossHead(const Norm& norm, const LogitRule& rule, const TensorIndex& index, std::string_view own,
                   std::string_view tied, double dropout)
    : norm_(norm), rule_(rule), adapter_(index, dropout) {
  output_ = index.find(own);
  if (output_ < 0) output_ = index.at(tied);
  b_ = head_adapter_rows(index);
}

HeadRows LossHead::rows(const Weights& weights) const {
  return {.output = at_or_none(weights, output_), .b = at_or_none(weights, b_)};
}

HeadResult distilled_result(const SoftTargets& teacher, const SoftTargets::Losses& losses) {
  HeadResult result{.ce_sum = sum_in_order(losses.ce), .kd_sum = sum_in_order(losses.kd)};
  result.loss_sum = result.ce_sum * teacher.rule().ce_alpha + result.kd_sum * teacher.rule().alpha;
  return result;
}

at::Tensor top_log_probabilities(const TopLogits& top, const at::Tensor& sums) {
  return (top.values.to(at::kDouble) - sums.narrow(1, 0, 1)).sub_(at::log(sums.narrow(1, 1, 1))).clamp_max_(0);
}

HeadScores LossHead::scores(const Weights& weights, const at::Tensor& hidden, const Targets& targets,
                            std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const at::Tensor normed = norm_(weights, token_rows(hidden)), low = adapter_.low(weights, normed, false);
  const HeadRows head = rows(weights);
  const std::int64_t tokens = normed.size(0), vocabulary = head.output.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(vocabulary, !head.output.is_cpu());
  at::Tensor each = at::zeros({tokens}, normed.options().dtype(at::kDouble));
  at::Tensor hits = at::zeros({tokens}, normed.options().dtype(at::kBool));
  const TopLogits top = targets.top > 0 ? no_top_logits(tokens, targets.top, normed.device()) : TopLogits{};
  const at::Tensor sums = targets.top > 0 ? no_softmax_sums(tokens, normed.device()) : at::Tensor();
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    at::Tensor logits = at::empty({rows, vocabulary}, normed.options());
    head.logits(logits, normed.narrow(0, first, rows), low.defined() ? low.narrow(0, first, rows) : low);
    rule_.apply(logits);
    const at::Tensor chunk_labels = targets.labels.narrow(0, first, rows);
    hits.narrow(0, first, rows).copy_(logits.argmax(1).eq(chunk_labels));
    cross_entropy(logits, chunk_labels, each.narrow(0, first, rows), 1.0, false);
    if (targets.top == 0) continue;
    softmax_sums(logits, chunk_labels, 0, sums.narrow(0, first, rows));
    top_logits(logits, 0, {.values = top.values.narrow(0, first, rows), .ids = top.ids.narrow(0, first, rows)});
  }
  HeadScores scores{.loss_sum = sum_in_order(each).item<double>(), .losses = each, .hits = hits};
  if (targets.top > 0) {
    scores.top_ids = top.ids;
    scores.top_log_probabilities = top_log_probabilities(top, sums);
  }
  return scores;
}

HeadResult LossHead::loss_and_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                                       const Targets& targets, const TokenScale& scale, std::int64_t chunk_rows) const {
  const at::NoGradGuard no_grad;
  const at::Tensor in = token_rows(hidden);
  Norm::Kept kept;
  const at::Tensor normed = norm_(weights, in, &kept);
  HeadAdapter::Kept taken;
  const at::Tensor low = adapter_.low(weights, normed, true, &taken);
  const at::Tensor d_low = low.defined() ? at::empty_like(low) : low;
  const HeadRows head = rows(weights);
  const at::Tensor& output = head.output;
  const std::int64_t tokens = normed.size(0),
                     chunk = chunk_rows > 0 ? chunk_rows : head_chunk_rows(output.size(0), !output.is_cpu());
  at::Tensor each = at::zeros({tokens}, normed.options().dtype(at::kDouble));
  SoftTargets::Losses parts;
  if (targets.teacher.defined()) parts = {.ce = each, .kd = at::zeros_like(each)};
  at::Tensor d = at::empty_like(normed);
  at::Tensor buffer = at::empty({std::min(chunk, tokens), output.size(0)}, normed.options());
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    const at::Tensor part = normed.narrow(0, first, rows), low_part = low.defined() ? low.narrow(0, first, rows) : low;
    at::Tensor logits = buffer.narrow(0, 0, rows), d_part = d.narrow(0, first, rows);
    head.logits(logits, part, low_part);
    rule_.apply(logits);
    const at::Tensor slope = rule_.slope(logits);
    if (targets.teacher.defined()) {
      const SoftTargets teacher = targets.teacher.rows(first, rows);
      const at::Tensor labels = targets.labels.narrow(0, first, rows), sums = no_softmax_sums(rows, logits.device()),
                       soft = teacher.no_sums();
      teacher.add(logits, labels, 0, sums, soft);
      const SoftTargets::Losses here = teacher.losses(sums, soft, labels);
      parts.ce.narrow(0, first, rows).copy_(here.ce);
      parts.kd.narrow(0, first, rows).copy_(here.kd);
      teacher.gradient(logits, labels, 0, teacher.factors(sums, soft, labels, scale.all()));
    } else {
      scale.for_each_stretch(first, rows, [&](std::int64_t begin, std::int64_t count, double here) {
        at::Tensor stretch = logits.narrow(0, begin - first, count);
        cross_entropy(stretch, targets.labels.narrow(0, begin, count), each.narrow(0, begin, count), here, true);
      });
    }
    rule_.backward(logits, slope);
    matrix_product_into(d_part, logits, output);
    gradients.add_product(output_, logits, part);
    if (!low.defined()) continue;
    at::Tensor d_low_part = d_low.narrow(0, first, rows);
    matrix_product_into(d_low_part, logits, head.b);
    gradients.add_product(b_, logits, low_part);
  }
  buffer.reset();

  adapter_.backward(weights, gradients, d_low, taken, d);
  d = norm_.backward(weights, gradients, d, in, kept);
  HeadResult result;
  if (targets.teacher.defined())
    result = distilled_result(targets.teacher, parts);
  else
    result.loss_sum = sum_in_order(each);
  result.d_carry = {d.view(hidden.sizes())};
  return result;
}

at::Tensor LossHead::logits(const Weights& weights, const at::Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  const at::Tensor normed = norm_(weights, token_rows(hidden));
  const HeadRows head = rows(weights);
  at::Tensor logits = at::empty({normed.size(0), head.output.size(0)}, normed.options());
  head.logits(logits, normed, adapter_.low(weights, normed, false));
  rule_.apply(logits);
  return logits;
}

}  // namespace tierflow::models
