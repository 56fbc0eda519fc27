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

struct OptBlock {
  Pair attention_norm, q, k, v, out, mlp_norm, up, down;

  explicit OptBlock(const TensorIndex& index) {
    const auto pair = [&](const std::string& name) {
      return Pair{.weight = index.at(name + ".weight"), .bias = index.find(name + ".bias")};
    };
    attention_norm = pair("self_attn_layer_norm");
    q = pair("self_attn.q_proj");
    k = pair("self_attn.k_proj");
    v = pair("self_attn.v_proj");
    out = pair("self_attn.out_proj");
    mlp_norm = pair("final_layer_norm");
    up = pair("fc1");
    down = pair("fc2");
  }
};

class OptModel final : public CausalModel {
 public:
  explicit OptModel(ModelSpec spec)
      : CausalModel(
            spec,
            Embedding(spec.config, TensorIndex(spec, stage_of(spec, StageKind::embedding)), "embed_tokens.weight",
                      "embed_positions.weight"),
            LossHead(spec.config.norm_before ? NormKind::layer : NormKind::none, spec.config.norm_eps,
                     TensorIndex(spec, stage_of(spec, StageKind::head)), "final_layer_norm", "embed_tokens.weight")),
        at_(TensorIndex(spec, stage_of(spec, StageKind::block))) {}

 protected:
  Tensor block(const Weights& weights, const Tensor& hidden, const Shared&, bool training) const override {
    const std::int64_t batch = hidden.size(0), length = hidden.size(1), width = config().hidden_size;
    const bool before = config().norm_before;
    const auto tensor = [&](int i) { return i < 0 ? Tensor() : weights[static_cast<std::size_t>(i)]; };
    const auto norm = [&](const Tensor& x, const Pair& p) {
      return at::layer_norm(x, {width}, tensor(p.weight), tensor(p.bias), config().norm_eps);
    };
    const auto apply = [&](const Tensor& x, const Pair& p) {
      return p.bias < 0 ? at::linear(x, tensor(p.weight)) : at::linear(x, tensor(p.weight), tensor(p.bias));
    };
    const auto drop = [&](const Tensor& x) { return with_dropout(x, config().residual_dropout, training); };
    const auto heads = [&](const Tensor& x) { return x.view({batch, length, config().heads, config().head_dim}); };

    const Tensor x = hidden.reshape({-1, width});
    const Tensor in = before ? norm(x, at_.attention_norm) : x;
    const Tensor attended = attention(heads(apply(in, at_.q)), heads(apply(in, at_.k)), heads(apply(in, at_.v)),
                                      /*window=*/0, training ? config().attention_dropout : 0.0);
    Tensor middle = x + drop(apply(attended.reshape({-1, width}), at_.out));
    if (!before) middle = norm(middle, at_.attention_norm);
    const Tensor inner = activate(apply(before ? norm(middle, at_.mlp_norm) : middle, at_.up), config().activation);
    Tensor result = middle + drop(apply(inner, at_.down));
    if (!before) result = norm(result, at_.mlp_norm);
    return result.view(hidden.sizes());
  }

 private:
  const OptBlock at_;
};

}  // namespace

std::unique_ptr<LayeredModel> make_opt(ModelSpec spec) {
  return std::make_unique<OptModel>(std::move(spec));
}

}  // namespace tierflow::models
