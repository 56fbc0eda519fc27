#pragma once
// Token embedding, learned positions where the family has them, dropout.
#include <ATen/core/Tensor.h>

#include "runtime/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

class Embedding {
 public:
  // Tensors `tokens` [vocab, hidden] and, unless the name is empty, `positions` [position_offset + max_positions,
  // hidden].
  Embedding(const ModelConfig& config, const TensorIndex& index, std::string_view tokens, std::string_view positions);

  // Hidden states [batch, sequence, hidden]. Throws Exception (kind usage) for a sequence longer than the positions.
  at::Tensor forward(const Weights& weights, const at::Tensor& ids, bool training) const;
  // Adds the gradients of the tables in fp32; the dropout mask comes from the generator in the state that forward found
  // it in.
  void backward(const Gradients& gradients, const at::Tensor& ids, const at::Tensor& d_out) const;

 private:
  int tokens_ = 0, positions_ = -1;
  std::int64_t offset_ = 0, max_positions_ = 0;
  double dropout_ = 0;
};

}  // namespace tierflow::models
