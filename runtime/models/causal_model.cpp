#include "runtime/models/causal_model.h"

#include <ATen/ATen.h>

#include "runtime/base/exception.h"

namespace tierflow::models {
namespace {

[[noreturn]] void fail_head() {
  fail_usage("the head gives a loss and no carry: call head_scores or head_loss_and_backward");
}

Targets targets_of(const Shared& shared) {
  return {shared.labels, shared.teacher, shared.top};
}

// The hidden states of each span's last token, [1, spans, hidden].
at::Tensor last_of_spans(const at::Tensor& hidden, const Shared& shared) {
  std::vector<at::Tensor> last;
  for (const CachedSpan& span : shared.spans) last.push_back(hidden.narrow(1, span.begin + span.length - 1, 1));
  return at::cat(last, 1);
}

}  // namespace

CausalModel::CausalModel(ModelSpec spec) : spec_(std::move(spec)) {
  const int last = static_cast<int>(spec_.stages.size()) - 1;
  const DecoderNames& names = config().names;
  int norm_stage = last;
  for (int stage = 0; stage < last; ++stage) {
    if (kind(stage) == StageKind::embedding) embeddings_.emplace_back(spec_, stage);
    if (kind(stage) == StageKind::norm) norm_stage = stage;
  }
  const Norm norm(config().norm, config().norm_eps, TensorIndex(spec_, norm_stage), names.norm);
  const LogitRule rule{.multiplier = config().logits_multiplier, .softcap = config().logits_softcap};
  if (norm_stage == last) {
    head_.emplace(norm, rule, TensorIndex(spec_, last), names.head, names.tokens, config().adapter_dropout);
  } else {
    tiled_head_.emplace(spec_, norm_stage, norm, rule, names.tokens);
  }
}

Shared CausalModel::share(const MicroBatch& batch, at::Device device) const {
  return shared_of(batch, device);
}

Shared CausalModel::share_cached(const CachedRow& row, at::Device device) const {
  return shared_of(row, device);
}

at::Tensor CausalModel::next_logits(const Weights& weights, const Carry& carry, const Shared& shared) const {
  return tiled_head_ ? tiled_head_->logits(static_cast<int>(spec_.stages.size()) - 1, weights, carry).at(1)
                     : head_->logits(weights, last_of_spans(carry.at(0), shared));
}

Carry CausalModel::forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                           bool training) const {
  switch (kind(stage)) {
    case StageKind::embedding:
      return embeddings_[static_cast<std::size_t>(stage)].forward(weights, carry, shared, training);
    case StageKind::block:
    case StageKind::attention:
    case StageKind::mlp:
      return {block(stage, weights, carry.at(0), shared, training)};
    case StageKind::experts:
      return experts(stage, weights, carry, shared, training);
    case StageKind::norm:
      if (shared.cache != nullptr) return tiled_head_->normalise(weights, last_of_spans(carry.at(0), shared));
      return tiled_head_->normalise(weights, carry.at(0), targets_of(shared), training);
    case StageKind::head_tile:
      if (shared.cache != nullptr) return tiled_head_->logits(stage, weights, carry);
      return tiled_head_->forward(stage, weights, carry, targets_of(shared));
    case StageKind::head:
      break;
  }
  fail_head();
}

Carry CausalModel::backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                            const Shared& shared, const Carry& d_out) const {
  switch (kind(stage)) {
    case StageKind::embedding: {
      const at::NoGradGuard no_grad;
      return embeddings_[static_cast<std::size_t>(stage)].backward(weights, gradients, carry, shared, d_out);
    }
    case StageKind::block:
    case StageKind::attention:
    case StageKind::mlp:
    case StageKind::experts:
      return block_backward(stage, weights, gradients, carry, shared, d_out);
    case StageKind::norm:
      return tiled_head_->normalise_backward(weights, gradients, carry.at(0), d_out);
    case StageKind::head_tile:
      return tiled_head_->backward(stage, weights, gradients, d_out, targets_of(shared));
    case StageKind::head:
      break;
  }
  fail_head();
}

HeadScores CausalModel::head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const {
  return tiled_head_ ? tiled_head_->scores(weights, carry, targets_of(shared))
                     : head_->scores(weights, carry.at(0), targets_of(shared));
}

HeadResult CausalModel::head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                               const Shared& shared, const TokenScale& scale) const {
  return tiled_head_ ? tiled_head_->loss_and_backward(weights, gradients, carry, targets_of(shared), scale)
                     : head_->loss_and_backward(weights, gradients, carry.at(0), targets_of(shared), scale);
}

}  // namespace tierflow::models
