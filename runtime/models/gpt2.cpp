#include "runtime/models/gpt2.h"

#include <ATen/ATen.h>

#include "runtime/models/attention.h"
#include "runtime/models/causal_model.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// A weight and its bias in Weights.
struct Pair {
  std::size_t weight = 0, bias = 0;
};

struct Gpt2Block {
  Pair attention_norm, qkv, attention_out, mlp_norm, up, down;

  explicit Gpt2Block(const TensorIndex& index) {
    const auto pair = [&](const std::string& name) {
      return Pair{.weight = static_cast<std::size_t>(index.at(name + ".weight")),
                  .bias = static_cast<std::size_t>(index.at(name + ".bias"))};
    };
    attention_norm = pair("ln_1");
    qkv = pair("attn.c_attn");
    attention_out = pair("attn.c_proj");
    mlp_norm = pair("ln_2");
    up = pair("mlp.c_fc");
    down = pair("mlp.c_proj");
  }
};

class Gpt2Model final : public CausalModel {
 public:
  explicit Gpt2Model(ModelSpec spec)
      : CausalModel(
            spec,
            Embedding(spec.config, TensorIndex(spec, stage_of(spec, StageKind::embedding)), "wte.weight", "wpe.weight"),
            LossHead(NormKind::layer, spec.config.norm_eps, TensorIndex(spec, stage_of(spec, StageKind::head)), "ln_f",
                     "wte.weight")),
        at_(TensorIndex(spec, stage_of(spec, StageKind::block))) {}

 protected:
  Tensor block(const Weights& weights, const Tensor& hidden, const Shared&, bool training) const override {
    const std::int64_t batch = hidden.size(0), length = hidden.size(1), width = config().hidden_size;
    const auto norm = [&](const Tensor& x, const Pair& p) {
      return at::layer_norm(x, {width}, weights[p.weight], weights[p.bias], config().norm_eps);
    };
    // y = x W + b on the flat tokens.
    const auto apply = [&](const Tensor& x, const Pair& p) { return at::addmm(weights[p.bias], x, weights[p.weight]); };
    const auto drop = [&](const Tensor& x) { return with_dropout(x, config().residual_dropout, training); };

    const Tensor x = hidden.reshape({-1, width});
    const Tensor qkv =
        apply(norm(x, at_.attention_norm), at_.qkv).view({batch, length, 3, config().heads, config().head_dim});
    const Tensor attended = attention(qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), /*window=*/0,
                                      training ? config().attention_dropout : 0.0);
    const Tensor middle = x + drop(apply(attended.reshape({-1, width}), at_.attention_out));
    const Tensor inner = activate(apply(norm(middle, at_.mlp_norm), at_.up), config().activation);
    return (middle + drop(apply(inner, at_.down))).view(hidden.sizes());
  }

 private:
  const Gpt2Block at_;
};

}  // namespace

std::unique_ptr<LayeredModel> make_gpt2(ModelSpec spec) {
  return std::make_unique<Gpt2Model>(std::move(spec));
}

}  // namespace tierflow::models
