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

struct LlamaBlock {
  int attention_norm, mlp_norm, q_norm, k_norm;
  Projection q, k, v, o, gate, up, down;

  explicit LlamaBlock(const TensorIndex& index)
      : attention_norm(index.at("input_layernorm.weight")),
        mlp_norm(index.at("post_attention_layernorm.weight")),
        q_norm(index.find("self_attn.q_norm.weight")),
        k_norm(index.find("self_attn.k_norm.weight")) {
    const auto projection = [&](const std::string& name) {
      return Projection{.weight = index.at(name + ".weight"), .bias = index.find(name + ".bias")};
    };
    q = projection("self_attn.q_proj");
    k = projection("self_attn.k_proj");
    v = projection("self_attn.v_proj");
    o = projection("self_attn.o_proj");
    gate = projection("mlp.gate_proj");
    up = projection("mlp.up_proj");
    down = projection("mlp.down_proj");
  }
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

class LlamaModel final : public CausalModel {
 public:
  explicit LlamaModel(ModelSpec spec)
      : CausalModel(
            spec,
            Embedding(spec.config, TensorIndex(spec, stage_of(spec, StageKind::embedding)), "embed_tokens.weight", {}),
            LossHead(NormKind::rms, spec.config.norm_eps, TensorIndex(spec, stage_of(spec, StageKind::head)),
                     "model.norm", "embed_tokens.weight")),
        at_(TensorIndex(spec, stage_of(spec, StageKind::block))) {}

  // Tables: rotary cos and sin [sequence, head_dim / 2] fp32.
  Shared share(const MicroBatch& batch, at::Device device) const override {
    Shared shared = CausalModel::share(batch, device);
    const auto [cos, sin] = rope_tables(config().rope, config().head_dim, batch.ids.size(1), device);
    shared.tables = {cos, sin};
    return shared;
  }

 protected:
  Tensor block(const Weights& weights, const Tensor& hidden, const Shared& shared, bool training) const override {
    const Bound bound{weights, {}};
    Tensor middle = hidden + attend(bound, rms_norm(hidden, weights[index(at_.attention_norm)], config().norm_eps),
                                    shared, training);
    const Tensor normed = rms_norm(middle, weights[index(at_.mlp_norm)], config().norm_eps);
    Tensor inner = bound.apply(at_.gate, normed);
    if (config().activation == Activation::silu) {
      inner = swiglu(inner, bound.apply(at_.up, normed));
    } else {
      inner = activate(inner, config().activation) * bound.apply(at_.up, normed);
    }
    return middle + bound.apply(at_.down, inner);
  }

  Carry block_backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                       const Shared& shared, const Carry& d_out) const override;

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }

  Tensor heads(const Tensor& x, std::int64_t count, const Tensor& like) const {
    return x.view({like.size(0), like.size(1), count, config().head_dim});
  }

  // The attention sublayer of normed hidden states.
  Tensor attend(const Bound& bound, const Tensor& normed, const Shared& shared, bool training) const {
    Tensor q = heads(bound.apply(at_.q, normed), config().heads, normed),
           k = heads(bound.apply(at_.k, normed), config().kv_heads, normed);
    const Tensor v = heads(bound.apply(at_.v, normed), config().kv_heads, normed);
    if (at_.q_norm >= 0) q = rms_norm(q, bound.weight(at_.q_norm), config().norm_eps);
    if (at_.k_norm >= 0) k = rms_norm(k, bound.weight(at_.k_norm), config().norm_eps);
    q = rope(std::move(q), shared.tables[0], shared.tables[1]);
    k = rope(std::move(k), shared.tables[0], shared.tables[1]);
    const Tensor out = attention(q, k, v, config().sliding_window, training ? config().attention_dropout : 0.0);
    return bound.apply(at_.o, out.reshape({normed.size(0), normed.size(1), -1}));
  }

  const LlamaBlock at_;
};

// The block again from its input, then its gradient by hand: everything is released at its last use, gradients of
// weights go straight into the sums, and the last product of the forward, which nothing needs, is left out. Attention
// alone is autograd's.
Carry LlamaModel::block_backward(int stage, const Weights& all_weights, const Gradients& gradients, const Carry& carry,
                                 const Shared& shared, const Carry& d_out) const {
  if (config().activation != Activation::silu)
    return LayeredModel::backward(stage, all_weights, gradients, carry, shared, d_out);
  const at::NoGradGuard no_grad;
  Weights weights;
  for (const Tensor& weight : all_weights) weights.push_back(weight.detach());
  const Bound bound{weights, gradients};
  const double eps = config().norm_eps;
  const Tensor x = carry.at(0).detach().reshape({-1, config().hidden_size}).contiguous();
  const Tensor& like = carry[0];
  Tensor d_y = d_out.at(0).reshape({-1, config().hidden_size}).contiguous();

  // Attention forward; q, k: before their norms where there are any.
  Tensor rstd, q_rstd, k_rstd;
  Tensor normed = rms_norm(x, bound.weight(at_.attention_norm), eps, &rstd);
  Tensor q = heads(bound.apply(at_.q, normed), config().heads, like),
         k = heads(bound.apply(at_.k, normed), config().kv_heads, like);
  Tensor v = heads(bound.apply(at_.v, normed), config().kv_heads, like);
  Tensor q_in = at_.q_norm >= 0 ? q : Tensor(), k_in = at_.k_norm >= 0 ? k : Tensor();
  if (q_in.defined()) q = rms_norm(q, bound.weight(at_.q_norm), eps, &q_rstd);
  if (k_in.defined()) k = rms_norm(k, bound.weight(at_.k_norm), eps, &k_rstd);
  q = rope(std::move(q), shared.tables[0], shared.tables[1]).requires_grad_();
  k = rope(std::move(k), shared.tables[0], shared.tables[1]).requires_grad_();
  v.requires_grad_();
  Tensor attended;
  {
    const at::AutoGradMode grad(true);
    attended = attention(q, k, v, config().sliding_window, config().attention_dropout);
  }
  Tensor flat = attended.detach().reshape({x.size(0), -1});
  const Tensor middle = x + bound.apply(at_.o, flat);

  // MLP forward, without the down projection, and backward.
  Tensor mlp_rstd;
  Tensor mlp_normed = rms_norm(middle, bound.weight(at_.mlp_norm), eps, &mlp_rstd);
  Tensor gate = bound.apply(at_.gate, mlp_normed), up = bound.apply(at_.up, mlp_normed);
  Tensor inner = at::mm(d_y, bound.weight(at_.down.weight));
  swiglu_backward(gate, up, inner);
  bound.add_gradient(at_.down, d_y, inner);
  inner.reset();
  bound.add_gradient(at_.gate, gate, mlp_normed);
  bound.add_gradient(at_.up, up, mlp_normed);
  mlp_normed.reset();
  Tensor d_normed = at::mm(gate, bound.weight(at_.gate.weight));
  gate.reset();
  d_normed.addmm_(up, bound.weight(at_.up.weight));
  up.reset();
  const Tensor d_middle =
      rms_norm_backward(d_normed, middle, mlp_rstd, bound.weight(at_.mlp_norm), bound.sum(at_.mlp_norm), d_y);
  d_y.reset();

  // Attention backward.
  bound.add_gradient(at_.o, d_middle, flat);
  flat.reset();
  Tensor d_attended = at::mm(d_middle, bound.weight(at_.o.weight)).view(attended.sizes());
  auto d_qkv = torch::autograd::grad({attended}, {q, k, v}, {d_attended});
  for (Tensor* used : {&attended, &d_attended, &q, &k, &v}) used->reset();
  Tensor d_q = rope(d_qkv[0].contiguous(), shared.tables[0], shared.tables[1], -1.0);
  Tensor d_k = rope(d_qkv[1].contiguous(), shared.tables[0], shared.tables[1], -1.0);
  const Tensor d_v = d_qkv[2].reshape({x.size(0), -1});
  d_qkv.clear();
  if (q_in.defined()) d_q = rms_norm_backward(d_q, q_in, q_rstd, bound.weight(at_.q_norm), bound.sum(at_.q_norm));
  if (k_in.defined()) d_k = rms_norm_backward(d_k, k_in, k_rstd, bound.weight(at_.k_norm), bound.sum(at_.k_norm));
  d_q = d_q.view({x.size(0), -1});
  d_k = d_k.view({x.size(0), -1});
  bound.add_gradient(at_.q, d_q, normed);
  bound.add_gradient(at_.k, d_k, normed);
  bound.add_gradient(at_.v, d_v, normed);
  d_normed = at::mm(d_q, bound.weight(at_.q.weight));
  d_normed.addmm_(d_k, bound.weight(at_.k.weight));
  d_normed.addmm_(d_v, bound.weight(at_.v.weight));
  const Tensor d_x =
      rms_norm_backward(d_normed, x, rstd, bound.weight(at_.attention_norm), bound.sum(at_.attention_norm), d_middle);
  return {d_x.view(like.sizes())};
}

}  // namespace

std::unique_ptr<LayeredModel> make_llama(ModelSpec spec) {
  return std::make_unique<LlamaModel>(std::move(spec));
}

}  // namespace tierflow::models
