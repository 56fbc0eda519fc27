#include "runtime/models/opt.h"

#include <ATen/ATen.h>

#include "runtime/models/causal_model.h"
#include "runtime/models/key_value_cache.h"
#include "runtime/models/linear.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

struct Attention {
  Norm norm;
  Linear q, k, v, out;
  Attention(const ModelSpec& spec, const TensorIndex& index)
      : norm(NormKind::layer, spec.config.norm_eps, index, "self_attn_layer_norm"),
        q(index, "self_attn.q_proj"),
        k(index, "self_attn.k_proj"),
        v(index, "self_attn.v_proj"),
        out(index, "self_attn.out_proj") {}
};

struct Mlp {
  Norm norm;
  Linear up, down;
  Mlp(const ModelSpec& spec, const TensorIndex& index)
      : norm(NormKind::layer, spec.config.norm_eps, index, "final_layer_norm"), up(index, "fc1"), down(index, "fc2") {}
};

class OptModel final : public HalvedModel<Attention, Mlp> {
 public:
  explicit OptModel(const ModelSpec& spec)
      : HalvedModel(spec, {.tokens = "embed_tokens.weight",
                           .positions = "embed_positions.weight",
                           .norm = "final_layer_norm",
                           .norm_kind = spec.config.norm_before ? NormKind::layer : NormKind::none}) {}

 private:
  Tensor attend(int stage, const Attention& half, const Weights& weights, const Tensor& hidden, const Shared& shared,
                bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor in = config().norm_before ? half.norm(weights, x) : x;
    const double dropout = adapter_dropout(training);
    const auto heads = [&](const Linear& linear) {
      return linear(weights, in, dropout).view({hidden.size(0), hidden.size(1), config().heads, config().head_dim});
    };
    const Tensor q = heads(half.q), k = heads(half.k), v = heads(half.v);
    const Tensor attended = attention_of_row(stage, q, k, v, {.documents = shared.documents}, shared,
                                             training ? config().attention_dropout : 0.0);
    Tensor middle = x + drop(half.out(weights, flat(attended), dropout), training);
    if (!config().norm_before) middle = half.norm(weights, middle);
    return middle.view(hidden.sizes());
  }

  Tensor expand(const Mlp& half, const Weights& weights, const Tensor& hidden, bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor in = config().norm_before ? half.norm(weights, x) : x;
    const double dropout = adapter_dropout(training);
    const Tensor inner = activate(half.up(weights, in, dropout), config().activation);
    Tensor result = x + drop(half.down(weights, inner, dropout), training);
    if (!config().norm_before) result = half.norm(weights, result);
    return result.view(hidden.sizes());
  }

  Tensor flat(const Tensor& x) const { return x.reshape({-1, config().hidden_size}); }
  Tensor drop(const Tensor& x, bool training) const { return with_dropout(x, config().residual_dropout, training); }
};

}  // namespace

std::unique_ptr<LayeredModel> make_opt(ModelSpec spec) {
  return std::make_unique<OptModel>(spec);
}

}  // namespace tierflow::models
