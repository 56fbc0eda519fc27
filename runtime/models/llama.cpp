#include "runtime/models/llama.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "runtime/models/attention.h"
#include "runtime/models/causal_model.h"
#include "runtime/models/ops.h"
#include "runtime/models/rope.h"

namespace tierflow::models {
namespace {

// A projection's tensors in Weights; bias -1: none.
struct Projection {
  int weight = -1, bias = -1;
};

Projection projection(const TensorIndex& index, const std::string& name) {
  return {.weight = index.at(name + ".weight"), .bias = index.find(name + ".bias")};
}

struct Attention {
  int norm, q_norm, k_norm;
  Projection q, k, v, o;

  explicit Attention(const TensorIndex& index)
      : norm(index.at("input_layernorm.weight")),
        q_norm(index.find("self_attn.q_norm.weight")),
        k_norm(index.find("self_attn.k_norm.weight")),
        q(projection(index, "self_attn.q_proj")),
        k(projection(index, "self_attn.k_proj")),
        v(projection(index, "self_attn.v_proj")),
        o(projection(index, "self_attn.o_proj")) {}
};

struct Mlp {
  int norm;
  Projection gate, up, down;

  explicit Mlp(const TensorIndex& index)
      : norm(index.at("post_attention_layernorm.weight")),
        gate(projection(index, "mlp.gate_proj")),
        up(projection(index, "mlp.up_proj")),
        down(projection(index, "mlp.down_proj")) {}
};

// The weights of one visit; `sums` empty in the forward.
struct Bound {
  const Weights& weights;
  const Gradients& sums;

  const Tensor& weight(int i) const { return weights[static_cast<std::size_t>(i)]; }
  const Tensor& sum(int i) const { return sums[static_cast<std::size_t>(i)]; }
  Tensor apply(const Projection& p, const Tensor& x) const {
    return p.bias < 0 ? at::linear(x, weight(p.weight)) : at::linear(x, weight(p.weight), weight(p.bias));
  }
  // Adds the gradients of p's tensors, for y = x W^T + b with d_y [tokens, out], x [tokens, in].
  void add_gradient(const Projection& p, const Tensor& d_y, const Tensor& x) const {
    add_product(sum(p.weight), d_y, x);
    if (p.bias >= 0) add_rows(sum(p.bias), d_y);
  }
};

// What the gradient of attention takes from its forward.
struct Attended {
  Tensor normed, rstd;                // of the input [tokens, hidden]
  Tensor q_in, k_in, q_rstd, k_rstd;  // before their norms, where there are any
  Tensor q, k, v;
  Tensor out;
  Tensor lse;  // of attention in blocks; without it `out` ends a graph whose leaves are q, k and v
};

// What the gradient of the MLP takes from its forward.
struct Gated {
  Tensor x;             // its input [tokens, hidden]
  Tensor normed, rstd;  // of x
  Tensor gate, up;
};

// A block's or, in a half of one, the half's.
struct KeptBlock final : KeptActivations {
  Attended attended;
  Gated gated;

  std::vector<Tensor> essentials() const override {
    std::vector<Tensor> tensors;
    const bool attends = attended.q.defined();
    if (attends) {
      tensors = {attended.q_in.defined() ? attended.q_in : attended.q,
                 attended.k_in.defined() ? attended.k_in : attended.k, attended.v};
      if (attended.lse.defined()) tensors.insert(tensors.end(), {attended.out, attended.lse});
    }
    if (!gated.gate.defined()) return tensors;
    if (attends) tensors.push_back(gated.x);
    tensors.insert(tensors.end(), {gated.gate, gated.up});
    return tensors;
  }
};

class LlamaModel final : public CausalModel {
 public:
  explicit LlamaModel(ModelSpec spec)
      : CausalModel(
            spec, {.tokens = "embed_tokens.weight", .positions = {}, .norm = "model.norm", .norm_kind = NormKind::rms}),
        attention_(index_of(spec, StageKind::block, StageKind::attention)),
        mlp_(index_of(spec, StageKind::block, StageKind::mlp)) {}

  // Tables: rotary cos and sin [sequence, head_dim / 2] fp32.
  Shared share(const MicroBatch& batch, at::Device device) const override {
    Shared shared = CausalModel::share(batch, device);
    const auto [cos, sin] = rope_tables(config().rope, config().head_dim, batch.ids.size(1), device);
    shared.tables = {cos, sin};
    return shared;
  }

  bool can_keep(int stage) const override {
    const bool block =
        kind(stage) == StageKind::block || kind(stage) == StageKind::attention || kind(stage) == StageKind::mlp;
    return block && config().activation == Activation::silu;
  }
  std::unique_ptr<KeptActivations> forward_keeping(int stage, const Weights& weights, Carry& carry,
                                                   const Shared& shared) const override;
  Carry backward_kept(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                      const Shared& shared, const Carry& d_out, std::unique_ptr<KeptActivations> kept) const override;
  std::unique_ptr<KeptActivations> restore(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                                           std::vector<Tensor> essentials) const override;

 protected:
  Tensor attention_half(const Weights& weights, const Tensor& hidden, const Shared& shared,
                        bool training) const override {
    const Bound bound{weights, {}};
    const Tensor normed = rms_norm(hidden, bound.weight(attention_.norm), config().norm_eps);
    return hidden + attend(bound, normed, shared, training);
  }

  Tensor mlp_half(const Weights& weights, const Tensor& hidden, bool) const override {
    const Bound bound{weights, {}};
    const Tensor normed = rms_norm(hidden, bound.weight(mlp_.norm), config().norm_eps);
    Tensor inner = bound.apply(mlp_.gate, normed);
    if (config().activation == Activation::silu) {
      inner = swiglu(inner, bound.apply(mlp_.up, normed));
    } else {
      inner = activate(inner, config().activation) * bound.apply(mlp_.up, normed);
    }
    return hidden + bound.apply(mlp_.down, inner);
  }

  Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                       const Shared& shared, const Carry& d_out) const override;

 private:
  Tensor heads(const Tensor& x, std::int64_t count, const Tensor& like) const {
    return x.view({like.size(0), like.size(1), count, config().head_dim});
  }

  Reach reach(const Shared& shared) const { return {.window = config().sliding_window, .documents = shared.documents}; }

  static Tensor rotate(Tensor x, const Shared& shared, double sign = 1.0) {
    return rope(std::move(x), shared.tables[0], shared.tables[1], sign, shared.positions);
  }

  // The attention sublayer of normed hidden states.
  Tensor attend(const Bound& bound, const Tensor& normed, const Shared& shared, bool training) const {
    Tensor q = heads(bound.apply(attention_.q, normed), config().heads, normed),
           k = heads(bound.apply(attention_.k, normed), config().kv_heads, normed);
    const Tensor v = heads(bound.apply(attention_.v, normed), config().kv_heads, normed);
    if (attention_.q_norm >= 0) q = rms_norm(q, bound.weight(attention_.q_norm), config().norm_eps);
    if (attention_.k_norm >= 0) k = rms_norm(k, bound.weight(attention_.k_norm), config().norm_eps);
    q = rotate(std::move(q), shared);
    k = rotate(std::move(k), shared);
    const Tensor out = attention(q, k, v, reach(shared), training ? config().attention_dropout : 0.0);
    return bound.apply(attention_.o, out.reshape({normed.size(0), normed.size(1), -1}));
  }

  // By hand, for x, d_y, d_middle [tokens, hidden]; `like` has the shape of the hidden states.
  Attended attend_again(const Bound& bound, const Tensor& x, const Tensor& like, const Shared& shared) const;
  void norm_and_rotate(const Bound& bound, const Shared& shared, Attended& a) const;
  void attend_to_queries(const Shared& shared, Attended& a) const;
  Tensor attention_backward(const Bound& bound, const Tensor& x, const Shared& shared, Attended attended,
                            const Tensor& d_middle) const;
  Gated gate_again(const Bound& bound, const Tensor& x) const;
  Tensor mlp_backward(const Bound& bound, Gated gated, const Tensor& d_y) const;

  const Attention attention_;
  const Mlp mlp_;
};

Weights without_graph(const Weights& weights) {
  Weights detached;
  for (const Tensor& weight : weights) detached.push_back(weight.detach());
  return detached;
}

Tensor by_token(const Tensor& hidden, std::int64_t size) {
  return hidden.detach().reshape({-1, size}).contiguous();
}

// The block, or half of it, again from its input, then its gradient by hand: everything is released at its last use,
// gradients of weights go straight into the sums, and the last product of the forward, which nothing needs, is left
// out. Attention alone is autograd's.
Carry LlamaModel::block_backward(int stage, const Weights& all_weights, const Gradients& gradients, const Carry& carry,
                                 const Shared& shared, const Carry& d_out) const {
  if (config().activation != Activation::silu)
    return LayeredModel::backward(stage, all_weights, gradients, carry, shared, d_out);
  return backward_kept(stage, all_weights, gradients, carry, shared, d_out, nullptr);
}

std::unique_ptr<KeptActivations> LlamaModel::forward_keeping(int stage, const Weights& all_weights, Carry& carry,
                                                             const Shared& shared) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  const Bound bound{weights, {}};
  const Tensor like = carry.at(0);
  Tensor x = by_token(like, config().hidden_size);
  auto kept = std::make_unique<KeptBlock>();
  if (kind(stage) != StageKind::mlp) {
    kept->attended = attend_again(bound, x, like, shared);
    x = x + bound.apply(attention_.o, kept->attended.out.detach().reshape({x.size(0), -1}));
  }
  if (kind(stage) != StageKind::attention) {
    kept->gated = gate_again(bound, x);
    x = x + bound.apply(mlp_.down, swiglu(kept->gated.gate, kept->gated.up));
  }
  carry = {x.view(like.sizes())};
  return kept;
}

Carry LlamaModel::backward_kept(int stage, const Weights& all_weights, const Gradients& gradients, const Carry& carry,
                                const Shared& shared, const Carry& d_out,
                                std::unique_ptr<KeptActivations> activations) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  const Bound bound{weights, gradients};
  const Tensor& like = carry.at(0);
  const Tensor x = by_token(like, config().hidden_size);
  Tensor d = d_out.at(0).reshape({-1, config().hidden_size}).contiguous();
  auto* kept = dynamic_cast<KeptBlock*>(activations.get());
  if (kind(stage) == StageKind::mlp)
    return {mlp_backward(bound, kept != nullptr ? std::move(kept->gated) : gate_again(bound, x), d).view(like.sizes())};
  Attended attended = kept != nullptr ? std::move(kept->attended) : attend_again(bound, x, like, shared);
  if (kind(stage) == StageKind::block) {
    const auto middle = [&] { return x + bound.apply(attention_.o, attended.out.detach().reshape({x.size(0), -1})); };
    d = mlp_backward(bound, kept != nullptr ? std::move(kept->gated) : gate_again(bound, middle()), d);
  }
  return {attention_backward(bound, x, shared, std::move(attended), d).view(like.sizes())};
}

Attended LlamaModel::attend_again(const Bound& bound, const Tensor& x, const Tensor& like, const Shared& shared) const {
  const double eps = config().norm_eps;
  Attended a;
  a.normed = rms_norm(x, bound.weight(attention_.norm), eps, &a.rstd);
  a.q_in = heads(bound.apply(attention_.q, a.normed), config().heads, like);
  a.k_in = heads(bound.apply(attention_.k, a.normed), config().kv_heads, like);
  a.v = heads(bound.apply(attention_.v, a.normed), config().kv_heads, like);
  norm_and_rotate(bound, shared, a);
  attend_to_queries(shared, a);
  return a;
}

// q and k of q_in and k_in, which stay where norms lie between.
void LlamaModel::norm_and_rotate(const Bound& bound, const Shared& shared, Attended& a) const {
  const auto rotated = [&](Tensor& in, int norm, Tensor& rstd) {
    Tensor x = norm < 0 ? std::exchange(in, {}) : rms_norm(in, bound.weight(norm), config().norm_eps, &rstd);
    return rotate(std::move(x), shared);
  };
  a.q = rotated(a.q_in, attention_.q_norm, a.q_rstd);
  a.k = rotated(a.k_in, attention_.k_norm, a.k_rstd);
}

void LlamaModel::attend_to_queries(const Shared& shared, Attended& a) const {
  if (attention_is_in_blocks(a.q, config().attention_dropout)) {
    BlockAttention result = attention_in_blocks(a.q, a.k, a.v, reach(shared));
    a.out = std::move(result.out);
    a.lse = std::move(result.lse);
    return;
  }
  for (Tensor* leaf : {&a.q, &a.k, &a.v}) leaf->requires_grad_();
  const at::AutoGradMode grad(true);
  a.out = attention(a.q, a.k, a.v, reach(shared), config().attention_dropout);
}

std::unique_ptr<KeptActivations> LlamaModel::restore(int stage, const Weights& all_weights, const Carry& carry,
                                                     const Shared& shared, std::vector<Tensor> essentials) const {
  const at::NoGradGuard no_grad;
  const Weights weights = without_graph(all_weights);
  const Bound bound{weights, {}};
  auto next = essentials.begin();
  auto kept = std::make_unique<KeptBlock>();
  const Tensor input = by_token(carry.at(0), config().hidden_size);
  if (kind(stage) != StageKind::mlp) {
    Attended& a = kept->attended;
    a.normed = rms_norm(input, bound.weight(attention_.norm), config().norm_eps, &a.rstd);
    (attention_.q_norm >= 0 ? a.q_in : a.q) = *next++;
    (attention_.k_norm >= 0 ? a.k_in : a.k) = *next++;
    a.v = *next++;
    if (attention_.q_norm >= 0) norm_and_rotate(bound, shared, a);
    if (attention_is_in_blocks(a.q, config().attention_dropout)) {
      a.out = *next++;
      a.lse = *next++;
    } else {
      attend_to_queries(shared, a);
    }
  }
  if (kind(stage) != StageKind::attention) {
    Gated& g = kept->gated;
    g.x = kind(stage) == StageKind::mlp ? input : *next++;
    g.normed = rms_norm(g.x, bound.weight(mlp_.norm), config().norm_eps, &g.rstd);
    g.gate = *next++;
    g.up = *next++;
  }
  return kept;
}

Gated LlamaModel::gate_again(const Bound& bound, const Tensor& x) const {
  Gated g{.x = x};
  g.normed = rms_norm(x, bound.weight(mlp_.norm), config().norm_eps, &g.rstd);
  g.gate = bound.apply(mlp_.gate, g.normed);
  g.up = bound.apply(mlp_.up, g.normed);
  return g;
}

Tensor LlamaModel::mlp_backward(const Bound& bound, Gated g, const Tensor& d_y) const {
  Tensor inner = at::mm(d_y, bound.weight(mlp_.down.weight));
  swiglu_backward(g.gate, g.up, inner);
  bound.add_gradient(mlp_.down, d_y, inner);
  inner.reset();
  bound.add_gradient(mlp_.gate, g.gate, g.normed);
  bound.add_gradient(mlp_.up, g.up, g.normed);
  g.normed.reset();
  Tensor d_normed = at::mm(g.gate, bound.weight(mlp_.gate.weight));
  g.gate.reset();
  d_normed.addmm_(g.up, bound.weight(mlp_.up.weight));
  g.up.reset();
  return rms_norm_backward(d_normed, g.x, g.rstd, bound.weight(mlp_.norm), bound.sum(mlp_.norm), d_y);
}

Tensor LlamaModel::attention_backward(const Bound& bound, const Tensor& x, const Shared& shared, Attended a,
                                      const Tensor& d_middle) const {
  bound.add_gradient(attention_.o, d_middle, a.out.detach().reshape({x.size(0), -1}));
  Tensor d_out = at::mm(d_middle, bound.weight(attention_.o.weight)).view(a.out.sizes());
  AttentionGradient d;
  if (a.lse.defined()) {
    d = attention_in_blocks_backward(d_out, a.q, a.k, a.v, {a.out, a.lse}, reach(shared));
  } else {
    auto d_qkv = torch::autograd::grad({a.out}, {a.q, a.k, a.v}, {d_out});
    d = {.q = d_qkv[0].contiguous(), .k = d_qkv[1].contiguous(), .v = d_qkv[2]};
  }
  for (Tensor* used : {&a.out, &a.lse, &d_out, &a.q, &a.k, &a.v}) used->reset();
  Tensor d_q = rotate(std::move(d.q), shared, -1.0);
  Tensor d_k = rotate(std::move(d.k), shared, -1.0);
  const Tensor d_v = d.v.reshape({x.size(0), -1});
  d.v.reset();
  if (a.q_in.defined())
    d_q = rms_norm_backward(d_q, a.q_in, a.q_rstd, bound.weight(attention_.q_norm), bound.sum(attention_.q_norm));
  if (a.k_in.defined())
    d_k = rms_norm_backward(d_k, a.k_in, a.k_rstd, bound.weight(attention_.k_norm), bound.sum(attention_.k_norm));
  d_q = d_q.view({x.size(0), -1});
  d_k = d_k.view({x.size(0), -1});
  bound.add_gradient(attention_.q, d_q, a.normed);
  bound.add_gradient(attention_.k, d_k, a.normed);
  bound.add_gradient(attention_.v, d_v, a.normed);
  Tensor d_normed = at::mm(d_q, bound.weight(attention_.q.weight));
  d_normed.addmm_(d_k, bound.weight(attention_.k.weight));
  d_normed.addmm_(d_v, bound.weight(attention_.v.weight));
  return rms_norm_backward(d_normed, x, a.rstd, bound.weight(attention_.norm), bound.sum(attention_.norm), d_middle);
}

}  // namespace

std::unique_ptr<LayeredModel> make_llama(ModelSpec spec) {
  return std::make_unique<LlamaModel>(std::move(spec));
}

}  // namespace tierflow::models
