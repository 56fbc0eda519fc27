// Softmax cross-entropy over a vocabulary in tiles: a running largest logit and sum of exponentials, then the gradient
// tile by tile from the complete sums.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "runtime/models/grain.h"
#include "runtime/models/kernels.h"
#include "runtime/models/ops.h"
#include "runtime/models/row_kernels.h"

namespace tierflow::models {
namespace {

bool has_kernel(const Tensor& logits) {
  return logits.is_cpu() && logits.scalar_type() == at::kBFloat16 && logits.is_contiguous();
}

// Where a row's label lies among the tile's columns: whether it does, and its column [rows, 1].
struct Place {
  Tensor inside, column;
};
Place place(const Tensor& labels, std::int64_t first, std::int64_t width) {
  const Tensor label = labels.unsqueeze(1) - first;
  return {.inside = labels.unsqueeze(1).ge(0).logical_and(label.ge(0)).logical_and(label.lt(width)),
          .column = label.clamp(0, width - 1)};
}

}  // namespace

Tensor no_softmax_sums(std::int64_t rows, at::Device device) {
  Tensor sums = at::zeros({rows, 4}, at::TensorOptions().dtype(at::kDouble).device(device));
  sums.select(1, 3).fill_(-1);
  sums.select(1, 0).fill_(-std::numeric_limits<double>::infinity());
  return sums;
}

void softmax_sums(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& sums) {
  if (row_kernels::take(logits)) return row_kernels::softmax_sums(logits, labels, first, sums);
  const std::int64_t width = logits.size(1);
  if (has_kernel(logits)) {
    const auto* words = static_cast<const std::uint16_t*>(logits.const_data_ptr());
    const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
    double* sum = sums.mutable_data_ptr<double>();
    at::parallel_for(0, logits.size(0), grain_rows(width), [&](std::int64_t begin, std::int64_t end) {
      kernels::softmax_sums(words + begin * width, label + begin, sum + 4 * begin, end - begin, first, width);
    });
    return;
  }
  for_each_slice(logits, [&](std::int64_t row, std::int64_t rows) {
    const Tensor wide = logits.narrow(0, row, rows).to(wide_type(logits));
    const Place at = place(labels.narrow(0, row, rows), first, width);
    const Tensor part = sums.narrow(0, row, rows);
    const auto [largest, column] = wide.max(1, true);
    const Tensor before = part.narrow(1, 0, 1), most = at::maximum(before, largest.to(at::kDouble));
    part.narrow(1, 3, 1).copy_(
        at::where(largest.to(at::kDouble) > before, (column + first).to(at::kDouble), part.narrow(1, 3, 1)));
    const Tensor here = at::exp(wide - most.to(wide.scalar_type())).sum(at::IntArrayRef{1}, true, at::kDouble);
    part.narrow(1, 1, 1).mul_(at::exp(part.narrow(1, 0, 1) - most)).add_(here);
    part.narrow(1, 0, 1).copy_(most);
    part.narrow(1, 2, 1).copy_(at::where(at.inside, wide.gather(1, at.column).to(at::kDouble), part.narrow(1, 2, 1)));
  });
}

Tensor softmax_losses(const Tensor& sums, const Tensor& labels) {
  const Tensor loss = at::log(sums.select(1, 1)) + sums.select(1, 0) - sums.select(1, 2);
  return at::where(labels.ge(0), loss, at::zeros_like(loss));
}

Tensor softmax_hits(const Tensor& sums, const Tensor& labels) {
  return labels.ge(0).logical_and(sums.select(1, 3).eq(labels));
}

Tensor softmax_factors(const Tensor& sums, const Tensor& labels, double scale) {
  if (row_kernels::are_on(sums.device())) return row_kernels::softmax_factors(sums, labels, scale);
  const Tensor share = labels.ge(0).to(at::kDouble) * scale;  // 0 where no label counts
  return at::stack({sums.select(1, 0), at::where(labels.ge(0), share / sums.select(1, 1), share), share}, 1);
}

void softmax_gradient(Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& factors) {
  if (row_kernels::take(logits) && factors.is_contiguous())
    return row_kernels::softmax_gradient(logits, labels, first, factors);
  const std::int64_t width = logits.size(1);
  if (has_kernel(logits)) {
    auto* words = static_cast<std::uint16_t*>(logits.mutable_data_ptr());
    const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
    const double* factor = factors.const_data_ptr<double>();
    at::parallel_for(0, logits.size(0), grain_rows(width), [&](std::int64_t begin, std::int64_t end) {
      kernels::softmax_gradient(words + begin * width, label + begin, factor + 3 * begin, end - begin, first, width);
    });
    return;
  }
  for_each_slice(logits, [&](std::int64_t row, std::int64_t rows) {
    Tensor part = logits.narrow(0, row, rows);
    const Place at = place(labels.narrow(0, row, rows), first, width);
    const Tensor wide = factors.narrow(0, row, rows).to(wide_type(logits));
    Tensor d = at::exp(part.to(wide.scalar_type()) - wide.narrow(1, 0, 1)).mul_(wide.narrow(1, 1, 1));
    d.scatter_add_(1, at.column, wide.narrow(1, 2, 1).neg() * at.inside);
    part.copy_(d);
  });
}

}  // namespace tierflow::models
