#include "runtime/models/opt.h"

#include <ATen/ATen.h>

#include "runtime/models/attention.h"
#include "runtime/models/causal_model.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// A weight and its bias in Weights; bias -1: none.
struct Pair {
  int weight = -1, bias = -1;
};

Pair pair(const TensorIndex& index, const std::string& name) {
  return {.weight = index.at(name + ".weight"), .bias = index.find(name + ".bias")};
}

struct Attention {
  Pair norm, q, k, v, out;
  explicit Attention(const TensorIndex& index)
      : norm(pair(index, "self_attn_layer_norm")),
        q(pair(index, "self_attn.q_proj")),
        k(pair(index, "self_attn.k_proj")),
        v(pair(index, "self_attn.v_proj")),
        out(pair(index, "self_attn.out_proj")) {}
};

struct Mlp {
  Pair norm, up, down;
  explicit Mlp(const TensorIndex& index)
      : norm(pair(index, "final_layer_norm")), up(pair(index, "fc1")), down(pair(index, "fc2")) {}
};

class OptModel final : public CausalModel {
 public:
  explicit OptModel(ModelSpec spec)
      : CausalModel(spec, {.tokens = "embed_tokens.weight",
                           .positions = "embed_positions.weight",
                           .norm = "final_layer_norm",
                           .norm_kind = spec.config.norm_before ? NormKind::layer : NormKind::none}),
        attention_(index_of(spec, StageKind::block, StageKind::attention)),
        mlp_(index_of(spec, StageKind::block, StageKind::mlp)) {}

 protected:
  Tensor attention_half(const Weights& weights, const Tensor& hidden, const Shared& shared,
                        bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor in = config().norm_before ? norm(weights, attention_.norm, x) : x;
    const auto heads = [&](const Pair& p) {
      return apply(weights, p, in).view({hidden.size(0), hidden.size(1), config().heads, config().head_dim});
    };
    const Tensor attended = attention(heads(attention_.q), heads(attention_.k), heads(attention_.v),
                                      {.documents = shared.documents}, training ? config().attention_dropout : 0.0);
    Tensor middle = x + drop(apply(weights, attention_.out, flat(attended)), training);
    if (!config().norm_before) middle = norm(weights, attention_.norm, middle);
    return middle.view(hidden.sizes());
  }

  Tensor mlp_half(const Weights& weights, const Tensor& hidden, bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor in = config().norm_before ? norm(weights, mlp_.norm, x) : x;
    const Tensor inner = activate(apply(weights, mlp_.up, in), config().activation);
    Tensor result = x + drop(apply(weights, mlp_.down, inner), training);
    if (!config().norm_before) result = norm(weights, mlp_.norm, result);
    return result.view(hidden.sizes());
  }

 private:
  Tensor flat(const Tensor& x) const { return x.reshape({-1, config().hidden_size}); }
  static Tensor tensor(const Weights& weights, int i) {
    return i < 0 ? Tensor() : weights[static_cast<std::size_t>(i)];
  }
  Tensor norm(const Weights& weights, const Pair& p, const Tensor& x) const {
    return at::layer_norm(x, {config().hidden_size}, tensor(weights, p.weight), tensor(weights, p.bias),
                          config().norm_eps);
  }
  Tensor apply(const Weights& weights, const Pair& p, const Tensor& x) const {
    return p.bias < 0 ? at::linear(x, tensor(weights, p.weight))
                      : at::linear(x, tensor(weights, p.weight), tensor(weights, p.bias));
  }
  Tensor drop(const Tensor& x, bool training) const { return with_dropout(x, config().residual_dropout, training); }

  const Attention attention_;
  const Mlp mlp_;
};

}  // namespace

std::unique_ptr<LayeredModel> make_opt(ModelSpec spec) {
  return std::make_unique<OptModel>(std::move(spec));
}

}  // namespace tierflow::models
