#include "runtime/models/causal_model.h"

#include "runtime/exception.h"

namespace tierflow::models {

CausalModel::CausalModel(ModelSpec spec, Embedding embedding, LossHead head)
    : spec_(std::move(spec)), embedding_(embedding), head_(head) {}

int CausalModel::stage_of(const ModelSpec& spec, StageKind kind) {
  for (std::size_t i = 0; i < spec.stages.size(); ++i) {
    if (spec.stages[i].kind == kind) return static_cast<int>(i);
  }
  throw Exception(io::ErrorKind::input, "a model needs an embedding, at least one block and a head");
}

Shared CausalModel::share(const MicroBatch& batch, at::Device device) const {
  return {.ids = batch.ids.to(device),
          .labels = batch.labels.defined() ? batch.labels.to(device) : at::Tensor(),
          .tables = {}};
}

Carry CausalModel::forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                           bool training) const {
  if (kind(stage) == StageKind::embedding) return {embedding_.forward(weights, shared.ids, training)};
  if (kind(stage) == StageKind::block) return {block(weights, carry.at(0), shared, training)};
  throw Exception(io::ErrorKind::usage, "the head has no carry to give: call head_loss");
}

Carry CausalModel::backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                            const Shared& shared, const Carry& d_out) const {
  if (kind(stage) == StageKind::block) return block_backward(stage, weights, gradients, carry, shared, d_out);
  if (kind(stage) == StageKind::head)
    throw Exception(io::ErrorKind::usage, "the head's gradient is head_loss_and_backward");
  const at::NoGradGuard no_grad;
  embedding_.backward(gradients, shared.ids, d_out.at(0));
  return {};
}

Carry CausalModel::block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                                  const Shared& shared, const Carry& d_out) const {
  return LayeredModel::backward(stage, weights, gradients, carry, shared, d_out);
}

double CausalModel::head_loss(const Weights& weights, const Carry& carry, const Shared& shared) const {
  return head_.loss(weights, carry.at(0), shared.labels);
}

HeadResult CausalModel::head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                               const Shared& shared, double scale) const {
  return head_.loss_and_backward(weights, gradients, carry.at(0), shared.labels, scale);
}

}  // namespace tierflow::models
