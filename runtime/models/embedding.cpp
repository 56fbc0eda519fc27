#include "runtime/models/embedding.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/models/ops.h"
#include "runtime/models/row_kernels.h"

namespace tierflow::models {

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
  if (first_row_ + rows_ < vocab_) return;
  if (const std::string& positions = spec.config.names.positions; !positions.empty()) positions_ = index.at(positions);
  multiplier_ = spec.config.embedding_multiplier;
  dropout_ = spec.config.embedding_dropout;
}

at::Tensor Embedding::look_up(const at::Tensor& table, const Carry& carry, const at::Tensor& ids) const {
  if (rows_ == vocab_) return at::embedding(table, ids);
  const at::Tensor row = ids - first_row_;
  const at::Tensor here = row.ge(0).logical_and(row.lt(rows_)).unsqueeze(-1);
  const at::Tensor found = at::embedding(table, row.clamp(0, rows_ - 1));
  return at::where(here, found, carry.empty() ? at::zeros_like(found) : carry[0]);
}

// In x's type, as Gemma has it.
at::Tensor Embedding::rounded_multiplier(const at::Tensor& x) const {
  return at::full({}, multiplier_, x.options());
}

at::Tensor Embedding::forward(const Weights& weights, const Carry& carry, const Shared& shared, bool training) const {
  at::Tensor hidden = look_up(weights[static_cast<std::size_t>(tokens_)], carry, shared.ids);
  if (multiplier_ != 1) hidden = hidden * rounded_multiplier(hidden);
  if (positions_ >= 0) {
    const at::Tensor& table = weights[static_cast<std::size_t>(positions_)];
    const std::int64_t longest = shared.longest();
    if (longest > max_positions_) {
      throw Exception(io::ErrorKind::usage, "sequences of " + std::to_string(longest) + " tokens exceed the model's " +
                                                std::to_string(max_positions_) + " positions");
    }
    hidden = hidden + (shared.positions.defined() ? at::embedding(table, shared.positions + offset_)
                                                  : table.narrow(0, offset_, longest));
  }
  return with_dropout(hidden, dropout_, training);
}

Carry Embedding::backward(const Gradients& gradients, const Shared& shared, const at::Tensor& d_out) const {
  at::Tensor d = with_dropout(d_out, dropout_, true);
  if (multiplier_ != 1) d = d * rounded_multiplier(d);
  const at::Tensor flat = d.reshape({-1, d.size(-1)}).contiguous(), row = shared.ids.reshape({-1}) - first_row_;
  const at::Tensor& sum = gradients[static_cast<std::size_t>(tokens_)];
  if (rows_ == vocab_) {
    add_rows_at(sum, row, flat);
  } else if (flat.is_cpu()) {
    const at::Tensor which = row.ge(0).logical_and(row.lt(rows_)).nonzero().squeeze(1);
    add_rows_at(sum, row.index_select(0, which), flat.index_select(0, which));
  } else {
    add_rows_within(sum, row, flat);
  }
  if (gradients.wants(positions_)) {
    const at::Tensor& positions = gradients[static_cast<std::size_t>(positions_)];
    if (shared.documents.empty()) {
      positions.narrow(0, offset_, d.size(1)).add_(d.sum(at::IntArrayRef{0}, false, positions.scalar_type()));
    } else {
      add_rows_at(positions, shared.positions.reshape({-1}) + offset_, flat);
    }
  }
  return first_row_ == 0 ? Carry{} : Carry{d};
}

}  // namespace tierflow::models
