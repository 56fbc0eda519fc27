#include "runtime/models/embedding.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/models/row_kernels.h"

namespace tierflow::models {
namespace {

constexpr std::string_view kA = "lora_embedding_A", kB = "lora_embedding_B";

}  // namespace

void add_rows_within(const at::Tensor& sum, const at::Tensor& ids, const at::Tensor& d) {
  if (!sum.defined()) return;
  if (row_kernels::take(d) && row_kernels::take_sum(sum)) return row_kernels::add_rows_at(sum, ids, d);
  const std::int64_t rows = sum.size(0);
  const at::Tensor here = ids.ge(0).logical_and(ids.lt(rows));
  // The others add zeros, to one row after the other, so that no row gets them all.
  const at::Tensor others = at::arange(ids.numel(), ids.options()).remainder_(rows);
  add_rows_at(sum, at::where(here, ids, others), d.masked_fill(here.logical_not().unsqueeze(1), 0));
}

Embedding::Embedding(const ModelSpec& spec, int stage)
    : offset_(spec.config.position_offset), max_positions_(spec.config.max_positions) {
  const TensorIndex index(spec, stage);
  const StageSpec& of = spec.stages.at(static_cast<std::size_t>(stage));
  tokens_ = index.at(spec.config.names.tokens);
  first_row_ = of.first_row;
  rows_ = spec.units.at(static_cast<std::size_t>(of.units.front()))
              .tensors.at(static_cast<std::size_t>(tokens_))
              .shape.front();
  vocab_ = spec.config.vocab_size;
  a_ = index.find(kA);
  if (!is_last()) return;
  b_ = index.find(kB);
  if (b_ >= 0) scale_ = index.scale(b_);
  if (const std::string& positions = spec.config.names.positions; !positions.empty()) positions_ = index.at(positions);
  multiplier_ = spec.config.embedding_multiplier;
  dropout_ = spec.config.embedding_dropout;
}

at::Tensor Embedding::look_up(const at::Tensor& table, const at::Tensor& before, const at::Tensor& ids) const {
  if (rows_ == vocab_) return at::embedding(table, ids);
  const at::Tensor row = ids - first_row_;
  const at::Tensor here = row.ge(0).logical_and(row.lt(rows_)).unsqueeze(-1);
  const at::Tensor found = at::embedding(table, row.clamp(0, rows_ - 1));
  return at::where(here, found, before.defined() ? before : at::zeros_like(found));
}

at::Tensor Embedding::low(const Weights& weights, const Carry& carry, const at::Tensor& ids) const {
  if (a_ < 0 || !at_position(weights, a_).defined()) return {};
  return look_up(at_position(weights, a_), carry.empty() ? at::Tensor() : carry.at(1), ids);
}

// In x's type, as Gemma has it.
at::Tensor Embedding::rounded_multiplier(const at::Tensor& x) const {
  return at::full({}, multiplier_, x.options());
}

Carry Embedding::forward(const Weights& weights, const Carry& carry, const Shared& shared, bool training) const {
  at::Tensor hidden =
      look_up(weights[static_cast<std::size_t>(tokens_)], carry.empty() ? at::Tensor() : carry.at(0), shared.ids);
  if (const at::Tensor adapted = low(weights, carry, shared.ids); adapted.defined()) {
    if (!is_last()) return {hidden, adapted};
    hidden = hidden + linear_map(adapted * scale_, at_position(weights, b_));
  }
  if (multiplier_ != 1) hidden = hidden * rounded_multiplier(hidden);
  if (positions_ >= 0) {
    const at::Tensor& table = weights[static_cast<std::size_t>(positions_)];
    const std::int64_t longest = shared.longest();
    if (longest > max_positions_) {
      fail_usage("sequences of " + std::to_string(longest) + " tokens exceed the model's " +
                 std::to_string(max_positions_) + " positions");
    }
    hidden = hidden + (shared.positions.defined() ? at::embedding(table, shared.positions + offset_)
                                                  : table.narrow(0, offset_, longest));
  }
  return {with_dropout(hidden, dropout_, training)};
}

void Embedding::add_gradient(const at::Tensor& sum, const at::Tensor& ids, const at::Tensor& d) const {
  const at::Tensor row = ids.reshape({-1}) - first_row_;
  if (rows_ == vocab_) {
    add_rows_at(sum, row, d);
  } else if (d.is_cpu()) {
    const at::Tensor which = row.ge(0).logical_and(row.lt(rows_)).nonzero().squeeze(1);
    add_rows_at(sum, row.index_select(0, which), d.index_select(0, which));
  } else {
    add_rows_within(sum, row, d);
  }
}

Carry Embedding::backward(const Weights& weights, const Gradients& gradients, const Carry& carry, const Shared& shared,
                          const Carry& d_out) const {
  at::Tensor d = with_dropout(d_out.at(0), dropout_, true);
  if (multiplier_ != 1) d = d * rounded_multiplier(d);
  const at::Tensor flat = d.reshape({-1, d.size(-1)}).contiguous();
  add_gradient(gradients[static_cast<std::size_t>(tokens_)], shared.ids, flat);
  at::Tensor d_low = d_out.size() > 1 ? d_out[1] : at::Tensor();  // [tokens, rank]
  if (b_ >= 0) {
    const at::Tensor adapted = low(weights, carry, shared.ids);
    gradients.add_product(b_, flat, (adapted * scale_).reshape({-1, adapted.size(-1)}));
    d_low = matrix_product(flat, at_position(weights, b_)).mul_(scale_);
  }
  if (gradients.wants(a_)) add_gradient(gradients[static_cast<std::size_t>(a_)], shared.ids, d_low);
  if (gradients.wants(positions_)) {
    const at::Tensor& positions = gradients[static_cast<std::size_t>(positions_)];
    if (shared.documents.empty()) {
      positions.narrow(0, offset_, d.size(1)).add_(d.sum(at::IntArrayRef{0}, false, positions.scalar_type()));
    } else {
      add_rows_at(positions, shared.positions.reshape({-1}) + offset_, flat);
    }
  }
  if (first_row_ == 0) return {};
  return d_low.defined() ? Carry{d, d_low} : Carry{d};
}

}  // namespace tierflow::models
