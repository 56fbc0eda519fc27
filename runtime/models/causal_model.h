#pragma once
// What the families have in common: embedding, blocks of one shape, loss head; and the tiles of each.
#include <optional>

#include "runtime/models/embedding.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/loss_head.h"
#include "runtime/models/tensor_index.h"
#include "runtime/models/tiled_head.h"

namespace tierflow::models {

// What a family calls the tensors outside its blocks; `positions` is empty where it has none.
struct EdgeNames {
  std::string_view tokens, positions, norm;
  NormKind norm_kind = NormKind::layer;
};

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
  bool draws_random_numbers() const override {
    return config().embedding_dropout > 0 || config().residual_dropout > 0 || config().attention_dropout > 0 ||
           config().adapter_dropout > 0;
  }
  // Of a model whose head is one stage.
  const LossHead& head() const { return head_.value(); }

 protected:
  CausalModel(ModelSpec spec, const EdgeNames& names);

  // By stage: where a half finds its tensors in the weights of blocks, and of stages of its own kind. Throws Exception
  // (kind input) where there is no such stage.
  template <class Half>
  static std::vector<std::optional<Half>> halves_of(const ModelSpec& spec, StageKind kind) {
    std::vector<std::optional<Half>> halves(spec.stages.size());
    for (const int stage : stages_of(spec, kind))
      halves[static_cast<std::size_t>(stage)].emplace(spec, TensorIndex(spec, stage));
    return halves;
  }
  const ModelConfig& config() const { return spec_.config; }

  // A block or a half of one, with its residuals: hidden [batch, sequence, hidden] -> the same shape; differentiable
  // where autograd is on.
  virtual at::Tensor block(int stage, const Weights& weights, const at::Tensor& hidden, const Shared& shared,
                           bool training) const = 0;
  // A stage of experts, for carries as ExpertStage has them; by default there is none.
  virtual Carry experts(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                        bool training) const;
  double adapter_dropout(bool training) const { return training ? config().adapter_dropout : 0.0; }
  // LayeredModel::backward of a block, a half or a stage of experts; by default that one.
  virtual Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                               const Shared& shared, const Carry& d_out) const;
  StageKind kind(int stage) const { return spec_.stages.at(static_cast<std::size_t>(stage)).kind; }

 private:
  static std::vector<int> stages_of(const ModelSpec& spec, StageKind kind);

  ModelSpec spec_;
  std::vector<Embedding> embeddings_;  // by stage
  std::optional<LossHead> head_;
  std::optional<TiledHead> tiled_head_;
};

// A family whose blocks are an attention and an MLP, one after the other, each with its residual. Both are made from a
// specification and the index of a stage.
template <class Attention, class Mlp>
class HalvedModel : public CausalModel {
 protected:
  HalvedModel(const ModelSpec& spec, const EdgeNames& names)
      : CausalModel(spec, names),
        attention_(halves_of<Attention>(spec, StageKind::attention)),
        mlp_(halves_of<Mlp>(spec, StageKind::mlp)) {}

  virtual at::Tensor attend(int stage, const Attention& half, const Weights& weights, const at::Tensor& hidden,
                            const Shared& shared, bool training) const = 0;
  virtual at::Tensor expand(const Mlp& half, const Weights& weights, const at::Tensor& hidden, bool training) const = 0;

 private:
  at::Tensor block(int stage, const Weights& weights, const at::Tensor& hidden, const Shared& shared,
                   bool training) const final {
    at::Tensor x = hidden;
    if (const auto& half = attention_[static_cast<std::size_t>(stage)])
      x = attend(stage, *half, weights, x, shared, training);
    if (const auto& half = mlp_[static_cast<std::size_t>(stage)]) x = expand(*half, weights, x, training);
    return x;
  }

  const std::vector<std::optional<Attention>> attention_;  // by stage
  const std::vector<std::optional<Mlp>> mlp_;
};

}  // namespace tierflow::models
