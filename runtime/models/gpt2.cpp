#include "runtime/models/gpt2.h"

#include <ATen/ATen.h>

#include "runtime/models/adapter.h"
#include "runtime/models/causal_model.h"
#include "runtime/models/key_value_cache.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// A weight and its bias in Weights.
struct Pair {
  std::size_t weight = 0, bias = 0;
  Adapter adapter = {};
};

Pair pair(const TensorIndex& index, const std::string& name) {
  return {.weight = static_cast<std::size_t>(index.at(name + ".weight")),
          .bias = static_cast<std::size_t>(index.at(name + ".bias")),
          .adapter = {index, name}};
}

struct Attention {
  Pair norm, qkv, out;
  Attention(const ModelSpec&, const TensorIndex& index)
      : norm(pair(index, "ln_1")), qkv(pair(index, "attn.c_attn")), out(pair(index, "attn.c_proj")) {}
};

struct Mlp {
  Pair norm, up, down;
  Mlp(const ModelSpec&, const TensorIndex& index)
      : norm(pair(index, "ln_2")), up(pair(index, "mlp.c_fc")), down(pair(index, "mlp.c_proj")) {}
};

class Gpt2Model final : public HalvedModel<Attention, Mlp> {
 public:
  explicit Gpt2Model(const ModelSpec& spec)
      : HalvedModel(spec, {.tokens = "wte.weight", .positions = "wpe.weight", .norm = "ln_f"}) {}

 private:
  Tensor attend(int stage, const Attention& block, const Weights& weights, const Tensor& hidden, const Shared& shared,
                bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor qkv = apply(weights, block.qkv, training, norm(weights, block.norm, x))
                           .view({hidden.size(0), hidden.size(1), 3, config().heads, config().head_dim});
    const Tensor attended =
        attention_of_row(stage, qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), {.documents = shared.documents},
                         shared, training ? config().attention_dropout : 0.0);
    return (x + drop(apply(weights, block.out, training, flat(attended)), training)).view(hidden.sizes());
  }

  Tensor expand(const Mlp& block, const Weights& weights, const Tensor& hidden, bool training) const override {
    const Tensor x = flat(hidden);
    const Tensor inner =
        activate(apply(weights, block.up, training, norm(weights, block.norm, x)), config().activation);
    return (x + drop(apply(weights, block.down, training, inner), training)).view(hidden.sizes());
  }

  Tensor flat(const Tensor& x) const { return x.reshape({-1, config().hidden_size}); }
  Tensor norm(const Weights& weights, const Pair& p, const Tensor& x) const {
    return at::layer_norm(x, {config().hidden_size}, weights[p.weight], weights[p.bias], config().norm_eps);
  }
  // y = x W + b on the flat tokens.
  Tensor apply(const Weights& weights, const Pair& p, bool training, const Tensor& x) const {
    if (p.adapter.has_magnitude())
      return p.adapter.scaled(at::mm(x, weights[p.weight]), weights, weights[p.weight].t(), x,
                              adapter_dropout(training)) +
             weights[p.bias];
    return p.adapter.add_to(at::addmm(weights[p.bias], x, weights[p.weight]), weights, x, adapter_dropout(training));
  }
  Tensor drop(const Tensor& x, bool training) const { return with_dropout(x, config().residual_dropout, training); }
};

}  // namespace

std::unique_ptr<LayeredModel> make_gpt2(ModelSpec spec) {
  return std::make_unique<Gpt2Model>(spec);
}

}  // namespace tierflow::models
