#include "runtime/models/decoder.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "runtime/models/causal_model.h"
#include "runtime/models/decoder_attention.h"
#include "runtime/models/decoder_kept.h"
#include "runtime/models/decoder_mlp.h"
#include "runtime/models/ops.h"
#include "runtime/models/random_numbers.h"
#include "runtime/models/rope.h"
#include "runtime/models/upload.h"

namespace tierflow::models {
namespace {

Weights without_graph(const Weights& weights) {
  Weights detached;
  for (const Tensor& weight : weights) detached.push_back(weight.detach());
  return detached;
}

Tensor by_token(const Tensor& hidden, std::int64_t size) {
  return hidden.detach().reshape({-1, size}).contiguous();
}

class DecoderModel final : public CausalModel {
 public:
  explicit DecoderModel(ModelSpec spec) : CausalModel(std::move(spec)) {
    for (int stage = 0; stage < static_cast<int>(this->spec().stages.size()); ++stage) {
      const bool whole = kind(stage) == StageKind::block;
      const bool on_demand = !this->spec().stages[at(stage)].on_demand.empty();
      attention_.emplace_back();
      mlp_.emplace_back();
      experts_.emplace_back();
      if (whole || kind(stage) == StageKind::attention) attention_.back().emplace(this->spec(), stage);
      if ((whole && !on_demand) || kind(stage) == StageKind::mlp) mlp_.back().emplace(this->spec(), stage);
      if (on_demand || kind(stage) == StageKind::experts) experts_.back().emplace(this->spec(), stage);
    }
  }

  // Tables: rotary cos and sin [sequence, rotated / 2] fp32 of each of the config's ropes; then, where queries are
  // scaled, their factors [sequence] fp32.
  Shared share(const MicroBatch& batch, at::Device device) const override {
    const std::int64_t length = batch.ids.size(1);
    return with_tables(CausalModel::share(batch, device), length, length, device);
  }
  Shared share_cached(const CachedRow& row, at::Device device) const override {
    Shared shared = CausalModel::share_cached(row, device);
    const std::int64_t longest = shared.longest();
    return with_tables(std::move(shared), longest, std::max(longest, row.context), device);
  }

  std::unique_ptr<StageInParts> begin(int stage, const Weights& weights, const Carry& carry,
                                      const Shared& shared) const override {
    if (spec().stages.at(at(stage)).on_demand.empty()) return CausalModel::begin(stage, weights, carry, shared);
    Tensor x = carry.at(0), normed;
    if (attends(stage)) x = with_attention(stage, weights, x, shared, false, normed).closed();
    return experts_[at(stage)]->begin(weights, x);
  }

  bool can_keep(int stage) const override { return (attends(stage) || expands(stage)) && by_hand(); }
  std::unique_ptr<KeptActivations> forward_keeping(int stage, const Weights& weights, Carry& carry,
                                                   const Shared& shared) const override;
  Carry backward_kept(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                      const Shared& shared, const Carry& d_out, std::unique_ptr<KeptActivations> kept) const override;
  std::unique_ptr<KeptActivations> restore(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                                           std::vector<Tensor> essentials) const override;

 protected:
  Tensor block(int stage, const Weights& weights, const Tensor& hidden, const Shared& shared,
               bool training) const override {
    OpenSum x{.base = hidden};
    Tensor normed;
    if (attends(stage)) x = with_attention(stage, weights, hidden, shared, training, normed);
    if (const auto& half = mlp_[at(stage)]) {
      if (config().parallel) x = {.base = x.closed()};
      if (config().parallel && !shares_norm()) normed = half->in()(weights, hidden);
      if (!config().parallel) normed = normalise(half->in(), weights, x);
      const Tensor added = half->forward(weights, normed, adapter_dropout(training), shared.watch);
      x = sum(*half, weights, residual(x.base, normed), added, training);
    }
    return x.closed();
  }

  // What a block's attention makes of its input, and that input normed.
  OpenSum with_attention(int stage, const Weights& weights, const Tensor& x, const Shared& shared, bool training,
                         Tensor& normed) const {
    const DecoderAttention& half = *attention_[at(stage)];
    normed = half.in()(weights, x);
    return sum(half, weights, residual(x, normed), half.forward(weights, normed, shared, training), training);
  }

  Carry experts(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    return experts_[at(stage)]->forward(weights, carry, adapter_dropout(training), shared.watch);
  }

  Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                       const Shared& shared, const Carry& d_out) const override;

 private:
  static std::size_t at(int stage) { return static_cast<std::size_t>(stage); }
  bool attends(int stage) const { return attention_[at(stage)].has_value(); }
  bool expands(int stage) const { return mlp_[at(stage)].has_value(); }
  // Whether gradients of blocks are computed by hand; else they are autograd's.
  bool by_hand() const { return config().adapter_dropout == 0; }

  Shared with_tables(Shared shared, std::int64_t length, std::int64_t context, at::Device device) const {
    for (const RopeSpec& rope : config().ropes) {
      const auto [cos, sin] = rope_tables(rope, config().head_dim, length, context, device);
      shared.tables.insert(shared.tables.end(), {cos, sin});
    }
    if (const QueryScaling& scaling = config().query_scaling; scaling.strength > 0) {
      const Tensor position = at::arange(scaling.offset, scaling.offset + length, at::kFloat);
      const Tensor turns = at::floor(position / static_cast<double>(scaling.period));
      shared.tables.push_back(upload({1 + scaling.strength * at::log1p(turns)}, device).front());
    }
    return shared;
  }

  // Whether the MLP takes what the attention takes.
  bool shares_norm() const { return config().parallel && config().names.mlp_norm.empty(); }
  // What a half adds to.
  Tensor residual(const Tensor& x, const Tensor& normed) const {
    return config().normed_residual == 0 ? x : normed * config().normed_residual;
  }

  OpenSum plus(const Tensor& x, const Tensor& added) const {
    return {.base = x, .added = config().residual_multiplier == 1 ? added : added * config().residual_multiplier};
  }
  // Of the sum, which is closed then.
  static Tensor normalise(const Norm& norm, const Weights& weights, OpenSum& x, Norm::Kept* kept = nullptr) {
    if (!x.added.defined()) return norm(weights, x.base, kept);
    Tensor normed = norm.of_sum(weights, x.base, x.added, kept);
    x = {.base = x.added};
    return normed;
  }
  // Of what a half adds to `base`, differentiable.
  template <class Half>
  OpenSum sum(const Half& half, const Weights& weights, const Tensor& base, const Tensor& added, bool training) const {
    const Tensor left = with_dropout(added, config().residual_dropout, training);
    if (!config().norm_of_sum) return plus(base, half.out()(weights, left));
    OpenSum x = plus(base, left);
    return {.base = normalise(half.out(), weights, x)};
  }

  // By hand, for x [tokens, hidden]; `like` has the shape of the hidden states. The result of a half lacks what only
  // its sum with the residual needs (add()). expand() closes x.
  KeptHalf<DecoderAttention> attend(int stage, const Weights& weights, const Tensor& x, const Tensor& like,
                                    const Shared& shared) const;
  KeptHalf<DecoderMlp> expand(int stage, const Weights& weights, OpenSum& x, const Tensor& normed,
                              const RouterWatch& watch) const;
  Tensor product(const DecoderAttention& half, const Weights& weights, const DecoderAttention::Kept& kept) const {
    return half.project(weights, kept);
  }
  Tensor product(const DecoderMlp& half, const Weights& weights, const DecoderMlp::Kept& kept) const {
    return half.contract(weights, kept);
  }
  // What the half adds, before its norm.
  template <class Half>
  Tensor added(const Half& half, const Weights& weights, KeptHalf<Half>& kept) const {
    Tensor left = product(half, weights, kept.inner);
    if (config().residual_dropout > 0) std::tie(left, kept.mask) = dropped(left, config().residual_dropout);
    return left;
  }
  template <class Half>
  OpenSum under_norm(const Half& half, const Weights& weights, KeptHalf<Half>& kept, const Tensor& base) const {
    const Tensor left = added(half, weights, kept);
    return config().norm_of_sum ? plus(base, left) : OpenSum{.base = left};
  }
  // The residual, of a half with input x, + what the half adds to `to`; completes what it keeps.
  template <class Half>
  OpenSum add(const Half& half, const Weights& weights, KeptHalf<Half>& kept, const Tensor& to) const {
    const Tensor base = residual(to, kept.normed);
    if (!half.out()) return plus(base, added(half, weights, kept));
    OpenSum under = under_norm(half, weights, kept, base);
    const Tensor normed = normalise(half.out(), weights, under, &kept.out_norm);
    kept.under_norm = under.base;
    return config().norm_of_sum ? OpenSum{.base = normed} : plus(base, normed);
  }
  // Completes what it keeps, where nothing needs the sum.
  template <class Half>
  void complete(const Half& half, const Weights& weights, KeptHalf<Half>& kept, const Tensor& to) const {
    if (half.out())
      kept.under_norm = under_norm(half, weights, kept, residual(to, kept.normed)).closed();
    else
      draw_mask(kept, to);
  }
  // As the forward drew it: it depends on the shape and the type of x alone.
  template <class Half>
  void draw_mask(KeptHalf<Half>& kept, const Tensor& x) const {
    if (config().residual_dropout > 0) kept.mask = std::get<1>(dropped(x, config().residual_dropout));
  }
  // The gradient of the half's product from d, that of the half's result. d becomes that of the sum.
  template <class Half>
  Tensor product_backward(const Half& half, const Weights& weights, const Gradients& sums, KeptHalf<Half>& kept,
                          Tensor& d) const {
    const auto through_norm = [&](const Tensor& d_out) {
      if (!kept.out_norm.rstd.defined()) half.out()(weights, kept.under_norm, &kept.out_norm);
      const Tensor d_in = half.out().backward(weights, sums, d_out, kept.under_norm, kept.out_norm);
      kept.under_norm.reset();
      return d_in;
    };
    if (half.out() && config().norm_of_sum) d = through_norm(d);
    Tensor d_added = config().residual_multiplier == 1 ? d : d * config().residual_multiplier;
    if (half.out() && !config().norm_of_sum) d_added = through_norm(d_added);
    if (!kept.mask.defined()) return d_added;
    return at::native_dropout_backward(d_added, std::exchange(kept.mask, {}), 1 / (1 - config().residual_dropout));
  }

  // The gradient of a half's input x from that of what it takes and `d`, that of the half's result.
  template <class Half>
  Tensor taken_backward(const Half& half, const Weights& weights, const Gradients& sums, Tensor d_normed,
                        const Tensor& x, const Norm::Kept& norm, const Tensor& d) const {
    if (config().normed_residual == 0) return half.in().backward(weights, sums, d_normed, x, norm, d);
    return half.in().backward(weights, sums, d_normed.add_(d, config().normed_residual), x, norm);
  }

  std::vector<std::optional<DecoderAttention>> attention_;  // by stage
  std::vector<std::optional<DecoderMlp>> mlp_;
  std::vector<std::optional<ExpertStage>> experts_;
};

KeptHalf<DecoderAttention> DecoderModel::attend(int stage, const Weights& weights, const Tensor& x, const Tensor& like,
                                                const Shared& shared) const {
  const DecoderAttention& half = *attention_[at(stage)];
  KeptHalf<DecoderAttention> kept{.x = x};
  kept.normed = half.in()(weights, x, &kept.norm);
  kept.inner = half.attend(weights, kept.normed, like, shared);
  return kept;
}

KeptHalf<DecoderMlp> DecoderModel::expand(int stage, const Weights& weights, OpenSum& x, const Tensor& normed,
                                          const RouterWatch& watch) const {
  const DecoderMlp& half = *mlp_[at(stage)];
  KeptHalf<DecoderMlp> kept{.normed = normed};
  if (!shares_norm()) kept.normed = normalise(half.in(), weights, x, &kept.norm);
  kept.x = x.base;
  kept.inner = half.expand(weights, kept.normed, watch);
  return kept;
}

std::unique_ptr<KeptActivations> DecoderModel::forward_keeping(int stage, const Weights& all_weights, Carry& carry,
                                                               const Shared& shared) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  const Tensor like = carry.at(0);
  const Tensor input = by_token(like, config().hidden_size);
  OpenSum x{.base = input};
  auto kept = std::make_unique<KeptBlock>();
  kept->parallel = config().parallel;
  if (attends(stage)) {
    kept->attends = &*attention_[at(stage)];
    kept->attention = attend(stage, weights, input, like, shared);
    x = add(*kept->attends, weights, kept->attention, input);
    kept->attention.x.reset();
  }
  if (expands(stage)) {
    kept->expands = &*mlp_[at(stage)];
    OpenSum taken = config().parallel ? OpenSum{.base = input} : std::exchange(x, {});
    kept->mlp = expand(stage, weights, taken, kept->attention.normed, shared.watch);
    x = add(*kept->expands, weights, kept->mlp, config().parallel ? x.closed() : taken.base);
    if (config().parallel) kept->mlp.x.reset();
  }
  carry = {x.closed().view(like.sizes())};
  return kept;
}

// The block, or half of it, again from its input, then its gradient by hand: everything is released at its last use,
// gradients of weights go straight into the sums, and the last product of the forward, which nothing needs, is left
// out.
Carry DecoderModel::block_backward(int stage, const Weights& all_weights, const Gradients& gradients,
                                   const Carry& carry, const Shared& shared, const Carry& d_out) const {
  const auto& experts = experts_[at(stage)];
  if (!by_hand())
    return LayeredModel::backward(stage, all_weights, gradients, experts ? experts->completed(carry, d_out) : carry,
                                  shared, d_out);
  if (experts) {
    const at::NoGradGuard no_grad;
    return experts->backward(without_graph(all_weights), gradients, carry, d_out, shared.watch.balance);
  }
  return backward_kept(stage, all_weights, gradients, carry, shared, d_out, nullptr);
}

Carry DecoderModel::backward_kept(int stage, const Weights& all_weights, const Gradients& sums, const Carry& carry,
                                  const Shared& shared, const Carry& d_out,
                                  std::unique_ptr<KeptActivations> activations) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  const Tensor& like = carry.at(0);
  const Tensor x = by_token(like, config().hidden_size);
  Tensor d = d_out.at(0).reshape({-1, config().hidden_size}).contiguous();
  auto* block = dynamic_cast<KeptBlock*>(activations.get());
  KeptHalf<DecoderAttention> attended;
  KeptHalf<DecoderMlp> expanded;
  if (block != nullptr) {
    attended = std::move(block->attention);
    expanded = std::move(block->mlp);
  } else {
    OpenSum middle{.base = x};
    if (attends(stage)) {
      attended = attend(stage, weights, x, like, shared);
      if (expands(stage) && !config().parallel)
        middle = add(*attention_[at(stage)], weights, attended, x);
      else
        complete(*attention_[at(stage)], weights, attended, x);
    }
    if (expands(stage)) {
      expanded = expand(stage, weights, middle, attended.normed, {});
      complete(*mlp_[at(stage)], weights, expanded, middle.base);
    }
  }
  Tensor d_normed;        // of what both halves take, where that is the same
  Tensor d_residual = d;  // of the input, beside what comes to it through the attention
  if (expands(stage)) {
    const DecoderMlp& half = *mlp_[at(stage)];
    const Tensor d_added = product_backward(half, weights, sums, expanded, d);
    Tensor from_mlp = half.backward(weights, sums, std::exchange(expanded.normed, {}),
                                    std::exchange(expanded.inner, {}), d_added, shared.watch);
    if (shares_norm())
      d_normed = std::move(from_mlp);
    else if (config().parallel)
      d_residual = half.in().backward(weights, sums, from_mlp, x, expanded.norm, d);
    else
      d_residual = d = taken_backward(half, weights, sums, std::move(from_mlp), expanded.x, expanded.norm, d);
    expanded = {};
  }
  if (attends(stage)) {
    const DecoderAttention& half = *attention_[at(stage)];
    const Tensor d_added = product_backward(half, weights, sums, attended, d);
    if (config().norm_of_sum) d_residual = d;
    Tensor from_attention =
        half.backward(weights, sums, attended.normed, shared, std::exchange(attended.inner, {}), d_added);
    if (d_normed.defined()) from_attention.add_(d_normed);
    d = taken_backward(half, weights, sums, std::move(from_attention), x, attended.norm, d_residual);
  }
  return {d.view(like.sizes())};
}

std::unique_ptr<KeptActivations> DecoderModel::restore(int stage, const Weights& all_weights, const Carry& carry,
                                                       const Shared& shared, std::vector<Tensor> essentials) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  auto next = essentials.cbegin();
  auto kept = std::make_unique<KeptBlock>();
  kept->parallel = config().parallel;
  const Tensor input = by_token(carry.at(0), config().hidden_size);
  if (attends(stage)) {
    const DecoderAttention& half = *(kept->attends = &*attention_[at(stage)]);
    kept->attention.normed = half.in()(weights, input, &kept->attention.norm);
    kept->attention.inner = half.restore(weights, shared, next);
    if (half.out()) kept->attention.under_norm = *next++;
    draw_mask(kept->attention, input);
  }
  if (expands(stage)) {
    const DecoderMlp& half = *(kept->expands = &*mlp_[at(stage)]);
    kept->mlp.x = attends(stage) && !config().parallel ? *next++ : input;
    kept->mlp.normed = shares_norm() ? kept->attention.normed : half.in()(weights, kept->mlp.x, &kept->mlp.norm);
    kept->mlp.inner = half.restore(weights, next);
    if (half.out()) kept->mlp.under_norm = *next++;
    draw_mask(kept->mlp, input);
  }
  return kept;
}

}  // namespace

std::unique_ptr<LayeredModel> make_decoder(ModelSpec spec) {
  return std::make_unique<DecoderModel>(std::move(spec));
}

}  // namespace tierflow::models
