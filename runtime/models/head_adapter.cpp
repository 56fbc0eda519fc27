#include "runtime/models/head_adapter.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/models/random_numbers.h"

namespace tierflow::models {
namespace {

constexpr std::string_view kA = "lm_head.lora_A.weight", kB = "lm_head.lora_B.weight";

}  // namespace

int head_adapter_rows(const TensorIndex& index) {
  return index.find(kB);
}

void HeadRows::logits(Tensor& logits, const Tensor& normed, const Tensor& low) const {
  matrix_product_into(logits, normed, output.t());
  if (low.defined()) add_matrix_product(logits, low, b.t());
}

HeadAdapter::HeadAdapter(const TensorIndex& index, double dropout) : a_(index.find(kA)), dropout_(dropout) {
  if (a_ >= 0) scale_ = index.scale(a_);
}

Tensor HeadAdapter::low(const Weights& weights, const Tensor& normed, bool training, Kept* kept) const {
  if (a_ < 0 || !at_position(weights, a_).defined()) return {};
  Kept drawn{.taken = normed, .mask = {}};
  if (training && dropout_ > 0) std::tie(drawn.taken, drawn.mask) = dropped(normed, dropout_);
  Tensor low = matrix_product(drawn.taken, at_position(weights, a_).t()).mul_(scale_);
  if (kept != nullptr) *kept = std::move(drawn);
  return low;
}

void HeadAdapter::backward(const Weights& weights, const Gradients& sums, const Tensor& d_low, const Kept& kept,
                           Tensor& d) const {
  if (!d_low.defined()) return;
  const Tensor& a = at_position(weights, a_);
  const Tensor scaled = (d_low * scale_).to(a.scalar_type());
  sums.add_product(a_, scaled, kept.taken);
  if (kept.mask.defined())
    d.add_(at::native_dropout_backward(matrix_product(scaled, a), kept.mask, 1 / (1 - dropout_)));
  else
    add_matrix_product(d, scaled, a);
}

}  // namespace tierflow::models
