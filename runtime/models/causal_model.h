#pragma once
// A decoder without its blocks (these are in decoder.cpp): embedding, loss head, and the tiles of each.
#include <optional>

#include "runtime/models/embedding.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/loss_head.h"
#include "runtime/models/tensor_index.h"
#include "runtime/models/tiled_head.h"

namespace tierflow::models {

class CausalModel : public LayeredModel {
 public:
  const ModelSpec& spec() const override { return spec_; }
  Shared share(const MicroBatch& batch, at::Device device) const override;
  Shared share_cached(const CachedRow& row, at::Device device) const override;
  at::Tensor next_logits(const Weights& weights, const Carry& carry, const Shared& shared) const override;
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override;
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override;
  HeadScores head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const override;
  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const TokenScale& scale) const override;
  Draws draws() const override {
    if (config().attention_dropout > 0) return Draws::torchs;
    return config().embedding_dropout > 0 || config().residual_dropout > 0 || config().adapter_dropout > 0
               ? Draws::own
               : Draws::nothing;
  }
  // For a model whose head is one stage.
  const LossHead& head() const { return head_.value(); }

 protected:
  explicit CausalModel(ModelSpec spec);

  const ModelConfig& config() const { return spec_.config; }

  // A block or a half of one, with its residuals: hidden [batch, sequence, hidden] -> the same shape; differentiable
  // where autograd is on.
  virtual at::Tensor block(int stage, const Weights& weights, const at::Tensor& hidden, const Shared& shared,
                           bool training) const = 0;
  // A stage of experts, for carries as ExpertStage has them.
  virtual Carry experts(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                        bool training) const = 0;
  double adapter_dropout(bool training) const { return training ? config().adapter_dropout : 0.0; }
  // LayeredModel::backward of a block, a half or a stage of experts.
  virtual Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                               const Shared& shared, const Carry& d_out) const = 0;
  StageKind kind(int stage) const { return spec_.stages.at(static_cast<std::size_t>(stage)).kind; }

 private:
  ModelSpec spec_;
  std::vector<Embedding> embeddings_;  // by stage
  std::optional<LossHead> head_;
  std::optional<TiledHead> tiled_head_;
};

}  // namespace tierflow::models
