#include "runtime/models/embedding.h"

#include <ATen/ATen.h>

#include "runtime/exception.h"
#include "runtime/models/ops.h"

namespace tierflow::models {

Embedding::Embedding(const ModelConfig& config, const TensorIndex& index, std::string_view tokens,
                     std::string_view positions)
    : tokens_(index.at(tokens)),
      positions_(positions.empty() ? -1 : index.at(positions)),
      offset_(config.position_offset),
      max_positions_(config.max_positions),
      dropout_(config.embedding_dropout) {}

at::Tensor Embedding::forward(const Weights& weights, const at::Tensor& ids, bool training) const {
  at::Tensor hidden = at::embedding(weights[static_cast<std::size_t>(tokens_)], ids);
  if (positions_ >= 0) {
    const std::int64_t length = ids.size(1);
    if (length > max_positions_) {
      throw Exception(io::ErrorKind::usage, "sequences of " + std::to_string(length) + " tokens exceed the model's " +
                                                std::to_string(max_positions_) + " positions");
    }
    hidden = hidden + weights[static_cast<std::size_t>(positions_)].narrow(0, offset_, length);
  }
  return with_dropout(hidden, dropout_, training);
}

void Embedding::backward(const Gradients& gradients, const at::Tensor& ids, const at::Tensor& d_out) const {
  const at::Tensor d = with_dropout(d_out, dropout_, true);
  add_rows_at(gradients[static_cast<std::size_t>(tokens_)], ids.reshape({-1}),
              d.reshape({-1, d.size(-1)}).contiguous());
  if (positions_ >= 0 && gradients[static_cast<std::size_t>(positions_)].defined()) {
    const at::Tensor& positions = gradients[static_cast<std::size_t>(positions_)];
    positions.narrow(0, offset_, ids.size(1)).add_(d.sum(at::IntArrayRef{0}, false, positions.scalar_type()));
  }
}

}  // namespace tierflow::models
