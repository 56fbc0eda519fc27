#pragma once
// Final norm, logits and cross-entropy. Logits exist for a chunk of tokens at a time; the chunk's rows depend on the
// vocabulary and the kind of device alone, so that the bits do not depend on a budget.
#include <ATen/core/Tensor.h>

#include "runtime/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

enum class NormKind : std::uint8_t { none, rms, layer };

// Tokens whose logits exist at once.
std::int64_t head_chunk_rows(std::int64_t vocab, bool cuda);

class LossHead {
 public:
  // Tensors `norm`.weight (and .bias for a layer norm) and "lm_head.weight", else `tied`, the embedding's [vocab,
  // hidden].
  LossHead(NormKind kind, double eps, const TensorIndex& index, std::string_view norm, std::string_view tied);

  // -sum of log probabilities of the labels that count. `losses`, where wanted: of each token [tokens] fp64, 0 where
  // none counts.
  double loss(const Weights& weights, const at::Tensor& hidden, const at::Tensor& labels, at::Tensor* losses = nullptr,
              std::int64_t chunk_rows = 0) const;
  // Adds the gradients of scale * loss to `gradients`; the hidden states' gradient is the carry's. chunk_rows 0:
  // head_chunk_rows().
  HeadResult loss_and_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                               const at::Tensor& labels, double scale, std::int64_t chunk_rows = 0) const;
  // The logits of hidden states [tokens, hidden], whole: for tests and short prompts.
  at::Tensor logits(const Weights& weights, const at::Tensor& hidden) const;

 private:
  struct Normed;  // the final norm's result and what its gradient needs
  Normed normalise(const Weights& weights, const at::Tensor& hidden) const;

  NormKind kind_;
  double eps_;
  int norm_weight_ = -1, norm_bias_ = -1, output_ = -1;
};

}  // namespace tierflow::models
