#include "runtime/models/tiled_head.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/loss_head.h"
#include "runtime/models/ops.h"
#include "runtime/models/products.h"

namespace tierflow::models {
namespace {

Tensor part_of(const Tensor& tensor, std::int64_t first, std::int64_t rows) {
  return tensor.defined() ? tensor.narrow(0, first, rows) : tensor;
}

// Calls use(first token, tokens, their logits in the tile), the logits to be overwritten.
template <class Use>
void for_each_chunk(const Tensor& normed, const Tensor& low, const HeadRows& tile, const LogitRule& rule, Use use) {
  const std::int64_t tokens = normed.size(0), width = tile.output.size(0),
                     chunk = std::min(tokens, head_chunk_rows(width, !tile.output.is_cpu()));
  const Tensor buffer = at::empty({chunk, width}, normed.options());
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t rows = std::min(chunk, tokens - first);
    Tensor logits = buffer.narrow(0, 0, rows);
    tile.logits(logits, normed.narrow(0, first, rows), part_of(low, first, rows));
    rule.apply(logits);
    use(first, rows, logits);
  }
}

// Writes what a chunk's product with `matrix` gives with what the tiles after this one have summed.
void add_here(const Tensor& d_logits, const Tensor& matrix, const Tensor& before, const Tensor& d) {
  const Tensor here = matrix_product(d_logits, matrix);
  if (before.defined()) {
    Tensor sum = d;
    at::add_out(sum, before, here);
  } else {
    d.copy_(here);
  }
}

// What A gave in a forward's carry, where the tile has an adapter.
Tensor low_in(const Carry& carry, const HeadRows& tile) {
  return tile.b.defined() ? carry.back() : Tensor();
}

Tensor empty_sum(const Tensor& normed) {
  return at::empty_like(normed, normed.options().dtype(normed.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

}  // namespace

TiledHead::TiledHead(const ModelSpec& spec, int norm_stage, const Norm& norm, const LogitRule& rule,
                     std::string_view tied)
    : norm_(norm),
      rule_(rule),
      adapter_(TensorIndex(spec, norm_stage), spec.config.adapter_dropout),
      norm_stage_(norm_stage) {
  for (int stage = norm_stage + 1; stage < static_cast<int>(spec.stages.size()); ++stage) {
    const TensorIndex index(spec, stage);
    const int own = index.find(spec.config.names.head);
    tiles_.push_back({.output = own >= 0 ? own : index.at(tied),
                      .b = head_adapter_rows(index),
                      .first = spec.stages[static_cast<std::size_t>(stage)].first_row});
  }
}

Carry TiledHead::normalise(const Weights& weights, const Tensor& hidden) const {
  const at::NoGradGuard no_grad;
  Carry carry = {norm_(weights, token_rows(hidden))};
  if (Tensor low = adapter_.low(weights, carry[0], false); low.defined()) carry.push_back(std::move(low));
  return carry;
}

Carry TiledHead::normalise(const Weights& weights, const Tensor& hidden, const Targets& targets, bool training) const {
  const at::NoGradGuard no_grad;
  Carry carry = {norm_(weights, token_rows(hidden))};
  const std::int64_t tokens = carry[0].size(0);
  carry.push_back(no_softmax_sums(tokens, hidden.device()));
  if (targets.teacher.defined()) carry.push_back(targets.teacher.no_sums());
  if (targets.top > 0) {
    const TopLogits top = no_top_logits(tokens, targets.top, hidden.device());
    carry.insert(carry.end(), {top.values, top.ids});
  }
  if (Tensor low = adapter_.low(weights, carry[0], training); low.defined()) carry.push_back(std::move(low));
  return carry;
}

Carry TiledHead::normalise_backward(const Weights& weights, const Gradients& gradients, const Tensor& hidden,
                                    const Carry& d_out) const {
  const at::NoGradGuard no_grad;
  const Tensor in = token_rows(hidden);
  Norm::Kept kept;
  const Tensor normed = norm_(weights, in, &kept);
  Tensor d = d_out.at(0).to(hidden.scalar_type());
  if (d_out.size() > 3) {
    HeadAdapter::Kept taken;
    adapter_.low(weights, normed, true, &taken);
    if (d.is_same(d_out[0])) d = d.clone();
    adapter_.backward(weights, gradients, d_out.at(4), taken, d);
  }
  return {norm_.backward(weights, gradients, d, in, kept).view(hidden.sizes())};
}

Carry TiledHead::forward(int stage, const Weights& weights, const Carry& carry, const Targets& targets) const {
  const at::NoGradGuard no_grad;
  Carry out = {carry.at(0)};
  for (std::size_t i = 1; i < carry.size(); ++i) out.push_back(carry[i].clone());
  const std::int64_t begin = tile(stage).first;
  const HeadRows tile_rows = tile(stage).rows(weights);
  for_each_chunk(out[0], low_in(out, tile_rows), tile_rows, rule_,
                 [&](std::int64_t first, std::int64_t rows, Tensor& logits) {
                   const auto part = [&](std::size_t which) { return out.at(which).narrow(0, first, rows); };
                   const Tensor labels = targets.labels.narrow(0, first, rows);
                   if (targets.teacher.defined())
                     targets.teacher.rows(first, rows).add(logits, labels, begin, part(1), part(2));
                   else
                     softmax_sums(logits, labels, begin, part(1));
                   if (targets.top > 0) top_logits(logits, begin, {.values = part(2), .ids = part(3)});
                 });
  return out;
}

Carry TiledHead::backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& d_out,
                          const Targets& targets) const {
  const at::NoGradGuard no_grad;
  const Tensor &before = d_out.at(0), &normed = d_out.at(1), &factors = d_out.at(2);
  const HeadRows rows_here = tile(stage).rows(weights);
  const Tensor low = d_out.size() > 3 ? d_out.at(3) : Tensor(), low_before = low.defined() ? d_out.at(4) : Tensor();
  const Tensor d = at::empty_like(before), d_low = low.defined() ? at::empty_like(low_before) : Tensor();
  for_each_chunk(normed, low, rows_here, rule_, [&](std::int64_t first, std::int64_t rows, Tensor& logits) {
    const Tensor slope = rule_.slope(logits);
    const Tensor labels = targets.labels.narrow(0, first, rows), factor = factors.narrow(0, first, rows);
    if (targets.teacher.defined())
      targets.teacher.rows(first, rows).gradient(logits, labels, tile(stage).first, factor);
    else
      softmax_gradient(logits, labels, tile(stage).first, factor);
    rule_.backward(logits, slope);
    add_here(logits, rows_here.output, before.narrow(0, first, rows), d.narrow(0, first, rows));
    gradients.add_product(tile(stage).output, logits, normed.narrow(0, first, rows));
    if (!low.defined()) return;
    add_here(logits, rows_here.b, low_before.narrow(0, first, rows), d_low.narrow(0, first, rows));
    gradients.add_product(tile(stage).b, logits, low.narrow(0, first, rows));
  });
  Carry out = {d, normed, factors};
  if (low.defined()) out.insert(out.end(), {low, d_low});
  return out;
}

Carry TiledHead::logits(int stage, const Weights& weights, const Carry& carry) const {
  const at::NoGradGuard no_grad;
  const HeadRows rows = tile(stage).rows(weights);
  const Tensor low = low_in(carry, rows);
  Tensor here = at::empty({carry.at(0).size(0), rows.output.size(0)}, carry[0].options());
  rows.logits(here, carry[0], low);
  rule_.apply(here);
  Carry out = {carry[0], carry.size() == (low.defined() ? 2 : 1) ? here : at::cat({carry[1], here}, 1)};
  if (low.defined()) out.push_back(low);
  return out;
}

HeadScores TiledHead::scores(const Weights& weights, const Carry& carry, const Targets& targets) const {
  const at::NoGradGuard no_grad;
  const int last = norm_stage_ + static_cast<int>(tiles_.size());
  const Carry out = forward(last, weights, carry, targets);
  const Tensor &sums = out.at(1), losses = softmax_losses(sums, targets.labels);
  HeadScores scores{
      .loss_sum = sum_in_order(losses).item<double>(), .losses = losses, .hits = softmax_hits(sums, targets.labels)};
  if (targets.top > 0) {
    scores.top_ids = out.at(3);
    scores.top_log_probabilities = top_log_probabilities({.values = out[2], .ids = out[3]}, sums);
  }
  return scores;
}

HeadResult TiledHead::loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                        const Targets& targets, const TokenScale& scale) const {
  const at::NoGradGuard no_grad;
  const Tile& last = tiles_.back();
  const bool soft = targets.teacher.defined();
  const Tensor &normed = carry.at(0), &labels = targets.labels, sums = carry.at(1).clone();
  const Tensor soft_sums = soft ? carry.at(2).clone() : Tensor();
  const HeadRows tile_rows = last.rows(weights);
  const Tensor low = low_in(carry, tile_rows), d_low = low.defined() ? empty_sum(low) : low;
  const Tensor factors = at::empty({sums.size(0), soft ? 5 : 3}, sums.options()), d = empty_sum(normed);
  for_each_chunk(normed, low, tile_rows, rule_, [&](std::int64_t first, std::int64_t rows, Tensor& logits) {
    const Tensor chunk_labels = labels.narrow(0, first, rows), chunk_sums = sums.narrow(0, first, rows);
    const Tensor chunk_factors = factors.narrow(0, first, rows), slope = rule_.slope(logits);
    if (soft) {
      const SoftTargets teacher = targets.teacher.rows(first, rows);
      const Tensor chunk_soft = soft_sums.narrow(0, first, rows);
      teacher.add(logits, chunk_labels, last.first, chunk_sums, chunk_soft);
      chunk_factors.copy_(teacher.factors(chunk_sums, chunk_soft, chunk_labels, scale.all()));
      teacher.gradient(logits, chunk_labels, last.first, chunk_factors);
    } else {
      softmax_sums(logits, chunk_labels, last.first, chunk_sums);
      scale.for_each_stretch(first, rows, [&](std::int64_t begin, std::int64_t count, double here) {
        factors.narrow(0, begin, count)
            .copy_(softmax_factors(sums.narrow(0, begin, count), labels.narrow(0, begin, count), here));
      });
      softmax_gradient(logits, chunk_labels, last.first, chunk_factors);
    }
    rule_.backward(logits, slope);
    add_here(logits, tile_rows.output, {}, d.narrow(0, first, rows));
    gradients.add_product(last.output, logits, normed.narrow(0, first, rows));
    if (!low.defined()) return;
    add_here(logits, tile_rows.b, {}, d_low.narrow(0, first, rows));
    gradients.add_product(last.b, logits, low.narrow(0, first, rows));
  });
  HeadResult result;
  if (soft)
    result = distilled_result(targets.teacher, targets.teacher.losses(sums, soft_sums, labels));
  else
    result.loss_sum = sum_in_order(softmax_losses(sums, labels));
  result.d_carry = {d, normed, factors};
  if (low.defined()) result.d_carry.insert(result.d_carry.end(), {low, d_low});
  return result;
}

}  // namespace tierflow::models
