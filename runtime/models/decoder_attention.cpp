#include "runtime/models/decoder_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "runtime/models/device_attention.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// Whether rotary positions come before the norms of q and k.
bool rotates_first(const ModelConfig& c) {
  return c.qk_norm == QkNorm::head_rotated || c.qk_norm == QkNorm::rotated_unweighted;
}

}  // namespace

DecoderAttention::DecoderAttention(const ModelSpec& spec, int stage)
    : stage_(stage),
      config_(&spec.config),
      layer_(spec.config.layer(spec.stages.at(static_cast<std::size_t>(stage)).block)) {
  const TensorIndex index(spec, stage);
  const ModelConfig& c = spec.config;
  const DecoderNames& names = c.names;
  in_ = Norm(c.norm, c.norm_eps, index, names.attention_norm);
  out_ = Norm(c.norm, c.norm_eps, index, names.attention_out_norm);
  if (c.qk_norm == QkNorm::rotated_unweighted) {
    if (layer_.rope >= 0) q_norm_ = k_norm_ = Norm::unweighted(c.norm_eps);
  } else if (c.qk_norm != QkNorm::none) {
    q_norm_ = Norm(c.norm, c.norm_eps, index, names.q_norm);
    k_norm_ = Norm(c.norm, c.norm_eps, index, names.k_norm);
  }
  q_ = Linear(index, names.q);
  k_ = Linear(index, names.k);
  v_ = Linear(index, names.v);
  qkv_ = Linear(index, names.qkv);
  o_ = Linear(index, names.o);
  if (!names.sinks.empty()) sinks_ = index.at(names.sinks);
}

DecoderAttention::Projected DecoderAttention::project_in(const Weights& weights, const Tensor& x, const Tensor& like,
                                                         double dropout) const {
  const std::int64_t heads = config_->heads, kv_heads = config_->kv_heads, dim = config_->head_dim;
  const auto as_heads = [&](const Tensor& of, std::int64_t count) {
    return of.view({like.size(0), like.size(1), count, dim});
  };
  if (!qkv_)
    return {.q = as_heads(q_(weights, x, dropout), heads),
            .k = as_heads(k_(weights, x, dropout), kv_heads),
            .v = as_heads(v_(weights, x, dropout), kv_heads)};
  const Tensor all = as_heads(qkv_(weights, x, dropout), heads + 2 * kv_heads);
  if (config_->qkv_by_head) {
    const Tensor by_head = all.view({like.size(0), like.size(1), heads, 3, dim});
    return {.q = by_head.select(3, 0).contiguous(),
            .k = by_head.select(3, 1).contiguous(),
            .v = by_head.select(3, 2).contiguous()};
  }
  return {.q = all.narrow(2, 0, heads).contiguous(),
          .k = all.narrow(2, heads, kv_heads).contiguous(),
          .v = all.narrow(2, heads + kv_heads, kv_heads).contiguous()};
}

AttentionRules DecoderAttention::rules_of(const Weights& weights, const Shared& shared, const Tensor& q) const {
  AttentionRules rules{.window = layer_.window,
                       .documents = in_chunks(shared.documents, q.size(0), q.size(1), layer_.chunk),
                       .chunk = layer_.chunk,
                       .scale = config_->attention_scale,
                       .softcap = config_->attention_softcap,
                       .sinks = sinks_ < 0 ? Tensor() : at_position(weights, sinks_),
                       .choice = shared.attention};
  if (rules.documents.size() == shared.documents.size()) rules.ends = shared.ends;
  return rules;
}

Tensor DecoderAttention::normalise(const Weights& weights, const Norm& norm, const Tensor& x, Norm::Kept* kept) const {
  if (config_->qk_norm != QkNorm::whole) return norm(weights, x, kept);
  return norm(weights, x.flatten(2), kept).view(x.sizes());
}

Tensor DecoderAttention::normalise_backward(const Weights& weights, const Gradients& sums, const Norm& norm,
                                            const Tensor& d, const Tensor& x, const Norm::Kept& kept) const {
  if (config_->qk_norm != QkNorm::whole) return norm.backward(weights, sums, d, x, kept);
  return norm.backward(weights, sums, d.flatten(2), x.flatten(2), kept).view(x.sizes());
}

void DecoderAttention::rotate(Tensor& q, Tensor& k, const Shared& shared, double sign) const {
  if (layer_.rope < 0) return;
  const auto first = static_cast<std::size_t>(2 * layer_.rope);
  const RopeSpec& of = config_->ropes[static_cast<std::size_t>(layer_.rope)];
  rope(q, k, shared.tables[first], shared.tables[first + 1], {of.interleaved, of.rounded}, sign, shared.positions);
}

Tensor DecoderAttention::scale_queries(const Tensor& q, const Shared& shared) const {
  const QueryScaling& scaling = config_->query_scaling;
  if (scaling.strength <= 0 || (scaling.without_rope && layer_.rope >= 0)) return q;
  const Tensor& factors = shared.tables.back();
  const Tensor table = scaling.rounded ? factors.to(q.scalar_type()) : factors;
  const Tensor scale = shared.positions.defined() ? table.index({shared.positions}) : table;
  return (q * scale.unsqueeze(-1).unsqueeze(-1)).to(q.scalar_type());
}

Tensor DecoderAttention::forward(const Weights& weights, const Tensor& normed, const Shared& shared,
                                 bool training) const {
  const double dropout = training ? config_->adapter_dropout : 0.0;
  Projected in = project_in(weights, normed, normed, dropout);
  if (rotates_first(*config_)) rotate(in.q, in.k, shared);
  in.q = normalise(weights, q_norm_, in.q, nullptr);
  in.k = normalise(weights, k_norm_, in.k, nullptr);
  if (!rotates_first(*config_)) rotate(in.q, in.k, shared);
  in.q = scale_queries(in.q, shared);
  const Tensor out = attention_of_row(stage_, in.q, in.k, in.v, rules_of(weights, shared, in.q), shared,
                                      training ? config_->attention_dropout : 0.0);
  return o_(weights, out.reshape({normed.size(0), normed.size(1), -1}), dropout);
}

DecoderAttention::Kept DecoderAttention::attend(const Weights& weights, const Tensor& normed, const Tensor& like,
                                                const Shared& shared) const {
  Projected in = project_in(weights, normed, like, 0);
  Kept kept;
  if (rotates_first(*config_)) rotate(in.q, in.k, shared);
  kept.q_in = std::move(in.q);
  kept.k_in = std::move(in.k);
  kept.v = std::move(in.v);
  norm_and_rotate(weights, shared, kept);
  attend_to_queries(weights, shared, kept);
  return kept;
}

Tensor DecoderAttention::project(const Weights& weights, const Kept& kept) const {
  return o_(weights, kept.attended.detach().reshape({-1, config_->heads * config_->head_dim}));
}

// q and k of q_in and k_in, which stay where norms lie between.
void DecoderAttention::norm_and_rotate(const Weights& weights, const Shared& shared, Kept& kept) const {
  const auto normed = [&](Tensor& in, const Norm& norm, Norm::Kept& of_norm) {
    return norm ? normalise(weights, norm, in, &of_norm) : std::exchange(in, {});
  };
  kept.q = normed(kept.q_in, q_norm_, kept.q_norm);
  kept.k = normed(kept.k_in, k_norm_, kept.k_norm);
  if (!rotates_first(*config_)) rotate(kept.q, kept.k, shared);
  kept.q = scale_queries(kept.q, shared);
}

void DecoderAttention::attend_to_queries(const Weights& weights, const Shared& shared, Kept& kept) const {
  AttentionRules rules = rules_of(weights, shared, kept.q);
  kept.by = kept_attention(kept.q, kept.k, rules, config_->attention_dropout);
  if (kept.by != nullptr) {
    if (rules.choice.ran != nullptr) rules.choice.ran->emplace(kept.by->name());
    BlockAttention result = kept.by->forward(kept.q, kept.k, kept.v, rules);
    kept.attended = std::move(result.out);
    kept.lse = std::move(result.lse);
    return;
  }
  // Wide: the gradients of documents add up in it.
  const auto wide = kept.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (rules.sinks.defined()) kept.sinks = rules.sinks = rules.sinks.detach().to(wide);
  for (Tensor* leaf : {&kept.q, &kept.k, &kept.v, &kept.sinks})
    if (leaf->defined()) leaf->requires_grad_();
  const at::AutoGradMode grad(true);
  kept.attended = attention(kept.q, kept.k, kept.v, rules, config_->attention_dropout);
}

std::vector<Tensor> DecoderAttention::essentials(const Kept& kept) const {
  std::vector<Tensor> tensors = {q_norm_ ? kept.q_in : kept.q, k_norm_ ? kept.k_in : kept.k, kept.v};
  if (kept.by != nullptr) tensors.insert(tensors.end(), {kept.attended, kept.lse});
  return tensors;
}

DecoderAttention::Kept DecoderAttention::restore(const Weights& weights, const Shared& shared,
                                                 std::vector<Tensor>::const_iterator& next) const {
  Kept kept;
  (q_norm_ ? kept.q_in : kept.q) = *next++;
  (k_norm_ ? kept.k_in : kept.k) = *next++;
  kept.v = *next++;
  if (q_norm_) norm_and_rotate(weights, shared, kept);
  kept.by = kept_attention(kept.q, kept.k, rules_of(weights, shared, kept.q), config_->attention_dropout);
  if (kept.by != nullptr) {
    kept.attended = *next++;
    kept.lse = *next++;
  } else {
    attend_to_queries(weights, shared, kept);
  }
  return kept;
}

Tensor DecoderAttention::backward(const Weights& weights, const Gradients& sums, const Tensor& normed,
                                  const Shared& shared, Kept kept, const Tensor& d_y) const {
  const std::int64_t tokens = normed.size(0);
  const auto in_o = o_.incoming(weights, d_y);
  o_.add_gradient(weights, sums, d_y, kept.attended.detach().reshape({tokens, -1}), in_o);
  Tensor d_out = o_.input_gradient(weights, d_y, in_o).view(kept.attended.sizes());
  AttentionGradient d;
  if (kept.by != nullptr) {
    d = kept.by->backward(d_out, kept.q, kept.k, kept.v, {kept.attended, kept.lse}, rules_of(weights, shared, kept.q));
  } else {
    torch::autograd::variable_list leaves{kept.q, kept.k, kept.v};
    if (kept.sinks.defined()) leaves.push_back(kept.sinks);
    auto d_leaves = torch::autograd::grad({kept.attended}, leaves, {d_out});
    d = {.q = d_leaves[0].contiguous(), .k = d_leaves[1].contiguous(), .v = d_leaves[2]};
    if (kept.sinks.defined()) d.sinks = d_leaves[3];
  }
  if (const Tensor sum = at_or_none(sums, sinks_); sum.defined()) sum.add_(d.sinks);
  for (Tensor* used : {&kept.attended, &kept.lse, &d_out, &kept.q, &kept.k, &kept.v}) used->reset();
  const bool rotated_last = !rotates_first(*config_);
  Tensor d_q = scale_queries(std::exchange(d.q, {}), shared), d_k = std::exchange(d.k, {});
  if (rotated_last) rotate(d_q, d_k, shared, -1.0);
  Tensor d_v = std::exchange(d.v, {}).reshape({tokens, -1});
  if (q_norm_) d_q = normalise_backward(weights, sums, q_norm_, d_q, kept.q_in, kept.q_norm);
  if (k_norm_) d_k = normalise_backward(weights, sums, k_norm_, d_k, kept.k_in, kept.k_norm);
  if (!rotated_last) rotate(d_q, d_k, shared, -1.0);
  d_q = d_q.reshape({tokens, -1});
  d_k = d_k.reshape({tokens, -1});
  if (qkv_) {
    Tensor d_qkv;
    if (config_->qkv_by_head) {
      const std::vector<std::int64_t> heads{tokens, config_->heads, config_->head_dim};
      d_qkv = at::stack({d_q.view(heads), d_k.view(heads), d_v.view(heads)}, 2).view({tokens, -1});
    } else {
      d_qkv = at::cat({d_q, d_k, d_v}, 1);
    }
    for (Tensor* used : {&d_q, &d_k, &d_v}) used->reset();
    const auto in = qkv_.incoming(weights, d_qkv);
    qkv_.add_gradient(weights, sums, d_qkv, normed, in);
    return qkv_.input_gradient(weights, d_qkv, in);
  }
  const auto in_q = q_.incoming(weights, d_q), in_k = k_.incoming(weights, d_k), in_v = v_.incoming(weights, d_v);
  q_.add_gradient(weights, sums, d_q, normed, in_q);
  k_.add_gradient(weights, sums, d_k, normed, in_k);
  v_.add_gradient(weights, sums, d_v, normed, in_v);
  Tensor d_normed = q_.input_gradient(weights, d_q, in_q);
  k_.add_input_gradient(weights, d_normed, d_k, in_k);
  v_.add_input_gradient(weights, d_normed, d_v, in_v);
  return d_normed;
}

}  // namespace tierflow::models
