#pragma once
// What the families have in common: embedding, blocks of one shape, loss head.
#include "runtime/layered_model.h"
#include "runtime/models/embedding.h"
#include "runtime/models/loss_head.h"

namespace tierflow::models {

class CausalModel : public LayeredModel {
 public:
  const ModelSpec& spec() const override { return spec_; }
  Shared share(const MicroBatch& batch, at::Device device) const override;
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override;
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override;
  double head_loss(const Weights& weights, const Carry& carry, const Shared& shared) const override;
  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, double scale) const override;
  bool draws_random_numbers() const override {
    return config().embedding_dropout > 0 || config().residual_dropout > 0 || config().attention_dropout > 0;
  }
  const LossHead& head() const { return head_; }

 protected:
  CausalModel(ModelSpec spec, Embedding embedding, LossHead head);

  // The position of a stage's kind in the specification. Throws Exception (kind input) where there is none.
  static int stage_of(const ModelSpec& spec, StageKind kind);
  const ModelConfig& config() const { return spec_.config; }

  // hidden [batch, sequence, hidden] -> the same shape; differentiable where autograd is on.
  virtual at::Tensor block(const Weights& weights, const at::Tensor& hidden, const Shared& shared,
                           bool training) const = 0;
  // LayeredModel::backward of a block; by default that one.
  virtual Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                               const Shared& shared, const Carry& d_out) const;
  StageKind kind(int stage) const { return spec_.stages.at(static_cast<std::size_t>(stage)).kind; }

 private:
  ModelSpec spec_;
  Embedding embedding_;
  LossHead head_;
};

}  // namespace tierflow::models
