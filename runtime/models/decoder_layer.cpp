#include "runtime/models/decoder_layer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

#include "runtime/base/exception.h"
#include "runtime/models/decoder.h"
#include "runtime/models/loss_head.h"
#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/spec/families.h"
#include "runtime/spec/model_units.h"

namespace tierflow::models {
namespace {

// A model with this one layer.
ModelSpec one_layer(const ModelConfig& config, std::int64_t layer) {
  ModelSpec spec{.config = config, .tiling = Tiling::none()};
  ModelConfig& c = spec.config;
  const auto refuse = [&](const std::string& why) { fail_usage(why); };
  if (layer < 0 || layer >= c.layers) refuse("the config has no layer " + std::to_string(layer));
  if (c.layer(layer).experts) refuse("its MLP is a mixture of experts");
  if (c.query_scaling.strength > 0) refuse("its queries are scaled by their position");
  LayerSpec own = c.layer(layer);
  if (own.rope >= 0) c.ropes = {c.ropes.at(static_cast<std::size_t>(std::exchange(own.rope, 0)))};
  c.layer_specs = {own};
  c.layers = c.vocab_size = 1;
  c.tie_word_embeddings = true;
  c.embedding_dropout = c.residual_dropout = c.attention_dropout = 0;
  build_units(spec);
  return spec;
}

void add_adapters(ModelSpec& spec, UnitSpec& unit, const std::vector<DecoderLayer::Adapter>& adapters, double dropout) {
  spec.config.adapter_dropout = dropout;
  for (const DecoderLayer::Adapter& adapter : adapters) {
    const auto weight = std::ranges::find(unit.tensors, adapter.module + ".weight", &TensorSpec::role);
    if (weight == unit.tensors.end() || weight->shape.size() != 2)
      fail_usage("a decoder layer without a linear layer " + adapter.module);
    const std::int64_t in = weight->shape[spec.config.transposed ? 0 : 1],
                       out = weight->shape[spec.config.transposed ? 1 : 0];
    const std::string name = weight->name.substr(0, weight->name.size() - std::string_view(".weight").size());
    const auto add = [&](const std::string& part, std::vector<std::int64_t> shape) {
      unit.tensors.push_back({.name = name + part, .role = adapter.module + part, .shape = std::move(shape)});
    };
    add(".lora_A.weight", {adapter.rank, in});
    add(".lora_B.weight", {out, adapter.rank});
    unit.tensors.back().scale = adapter.scale;
  }
}

// Of what DecoderModel::forward_keeping() keeps, in bytes a token.
std::uint64_t bytes_of_a_token(const ModelConfig& c) {
  const std::int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const bool in = !c.names.attention_norm.empty(), in_mlp = !c.names.mlp_norm.empty(),
             out = !c.names.attention_out_norm.empty(), out_mlp = !c.names.mlp_out_norm.empty();
  const int of_norm = subtracts_mean(c.norm) ? 2 : 1;  // mean, rstd
  // The norms' results, what norms behind a half take, and the input of the second half.
  std::int64_t words = (in + in_mlp + out + out_mlp + (c.parallel ? 0 : 1)) * c.hidden_size;
  words += 2 * q + 2 * kv + (c.gated ? 2 : 1) * c.intermediate_size;
  std::int64_t floats = of_norm * (in + in_mlp + out + out_mlp) + c.heads;  // and of attention's softmax
  if (c.qk_norm != QkNorm::none) {
    words += q + kv;
    floats += of_norm * (c.qk_norm == QkNorm::whole ? 2 : c.heads + c.kv_heads);
  }
  return static_cast<std::uint64_t>(2 * words + 4 * floats);
}

// Sums of whole products are of rounded values already; those over tokens, of norms and biases, are fp32 until here.
class RoundedSums {
 public:
  // products: which of them are of products; both outlive this.
  RoundedSums(const std::vector<Tensor>& sums, const std::vector<bool>& products)
      : sums_(sums), products_(products), own_(sums) {
    for (std::size_t i = 0; i < own_.size(); ++i)
      if (adds(i)) own_[i] = at::zeros_like(own_[i]);
  }
  const std::vector<Tensor>& own() const { return own_; }
  void add() const {
    for (std::size_t i = 0; i < sums_.size(); ++i)
      if (adds(i)) sums_[i].add_(own_[i].to(at::kBFloat16));
  }

 private:
  bool adds(std::size_t i) const { return sums_[i].defined() && !products_[i]; }

  const std::vector<Tensor>& sums_;
  const std::vector<bool>& products_;
  std::vector<Tensor> own_;
};

Tensor rows(const Tensor& x) {
  return x.detach().reshape({-1, x.size(-1)}).contiguous();
}

}  // namespace

std::vector<std::string> DecoderLayer::architectures() {
  std::vector<std::string> names;
  for (const std::span<const FamilyRow> table : {rms_norm_families(), layer_norm_families()})
    for (const FamilyRow& row : table) names.emplace_back(row.architecture);
  return names;
}

DecoderLayer::DecoderLayer(const ModelConfig& config, std::int64_t layer, const std::vector<std::string>& roles,
                           const std::vector<Adapter>& adapters, double dropout) {
  ModelSpec spec = one_layer(config, layer);
  const ModelConfig& c = spec.config;
  const LayerSpec& own = c.layer_specs.front();
  const RopeSpec rope = own.rope < 0 ? RopeSpec{.partial = 0} : c.ropes.front();
  form_ = {.window = own.window,
           .rotated = rope.rotated(c.head_dim),
           .interleaved = rope.interleaved,
           .rounded = rope.rounded,
           .keeps = c.attention_softcap <= 0 && dropout == 0};
  token_bytes_ = bytes_of_a_token(c);
  by_hand_ = dropout == 0;
  while (spec.stages[static_cast<std::size_t>(stage_)].kind != StageKind::block) ++stage_;
  UnitSpec& unit = spec.units[static_cast<std::size_t>(spec.stages[static_cast<std::size_t>(stage_)].units[0])];
  add_adapters(spec, unit, adapters, dropout);
  for (const TensorSpec& tensor : unit.tensors) {
    const auto found = std::find(roles.begin(), roles.end(), tensor.role);
    if (found == roles.end()) fail_usage("a decoder layer without " + tensor.role);
    order_.push_back(static_cast<std::size_t>(found - roles.begin()));
    products_.push_back(tensor.shape.size() > 1 && tensor.init == Init::normal);
  }
  if (order_.size() != roles.size()) fail_usage("a decoder layer with parameters that are not its own");
  model_ = make_decoder(std::move(spec));
}

namespace {

// Batches of a data collator are as long as their longest row.
Shared shared_of(const DecoderLayer::Input& input) {
  return {.tables = {input.cos, input.sin}, .documents = input.documents, .attention = {.any_length = true}};
}

}  // namespace

std::vector<Tensor> DecoderLayer::in_order(const std::vector<Tensor>& tensors) const {
  std::vector<Tensor> ordered;
  for (const std::size_t position : order_) ordered.push_back(tensors.at(position));
  return ordered;
}

Tensor DecoderLayer::forward(const Weights& weights, const Input& input, std::unique_ptr<KeptActivations>* kept) const {
  const at::NoGradGuard no_grad;
  const Shared shared = shared_of(input);
  const Weights ordered = in_order(weights);
  Carry carry = {input.hidden.detach()};
  if (kept == nullptr) return model_->forward(stage_, ordered, carry, shared, /*training=*/true).at(0);
  *kept = model_->forward_keeping(stage_, ordered, carry, shared);
  return carry.at(0);
}

Tensor DecoderLayer::backward(const Weights& weights, const Gradients& sums, const Input& input, const Tensor& d_out,
                              std::unique_ptr<KeptActivations> kept) const {
  const at::NoGradGuard no_grad;
  const Shared shared = shared_of(input);
  const std::vector<Tensor> ordered_sums = in_order(sums.tensors());
  const RoundedSums rounded(ordered_sums, products_);
  // backward_kept() with nothing kept is backward() by hand, for models without dropout.
  const Carry in = {input.hidden.detach()};
  const Carry d =
      by_hand_ ? model_->backward_kept(stage_, in_order(weights), rounded.own(), in, shared, {d_out}, std::move(kept))
               : model_->backward(stage_, in_order(weights), rounded.own(), in, shared, {d_out});
  rounded.add();
  return d.at(0);
}

std::uint64_t DecoderLayer::kept_bytes(std::int64_t tokens) const {
  return static_cast<std::uint64_t>(tokens) * token_bytes_;
}

Tensor linear_backward(const Tensor& weight, const Tensor& weight_sum, const Tensor& bias_sum, const Tensor& x,
                       const Tensor& d_y) {
  const at::NoGradGuard no_grad;
  const Tensor d = rows(d_y);
  add_product(weight_sum, d, rows(x));
  const std::vector<Tensor> biases{bias_sum};
  const std::vector<bool> products{false};
  const RoundedSums rounded(biases, products);
  add_rows(rounded.own()[0], d);
  rounded.add();
  return matrix_product(d, weight.detach()).view(x.sizes());
}

void embedding_backward(const Tensor& sum, const Tensor& ids, const Tensor& d, std::int64_t padding) {
  if (!sum.defined()) return;
  const at::NoGradGuard no_grad;
  const auto [found, position, counts] = at::_unique2(ids.reshape({-1}), /*sorted=*/true, /*return_inverse=*/true);
  Tensor own = at::zeros({found.size(0), d.size(-1)}, sum.options());
  add_rows_at(own, position, rows(d));
  if (padding >= 0) own.masked_fill_(found.eq(padding).unsqueeze(1), 0);
  sum.index_add_(0, found, own.to(at::kBFloat16).to(at::kFloat));
}

Tensor cross_entropy_sum(const Tensor& logits, const Tensor& labels) {
  const at::NoGradGuard no_grad;
  Tensor read = logits.detach();
  const Tensor losses = at::zeros({read.size(0)}, read.options().dtype(at::kDouble));
  cross_entropy(read, labels, losses, 1.0, false);
  return sum_in_order(losses);
}

Tensor cross_entropy_gradient(const Tensor& logits, const Tensor& labels, double scale) {
  const at::NoGradGuard no_grad;
  Tensor gradient = logits.detach().clone(at::MemoryFormat::Contiguous);
  const Tensor losses = at::zeros({gradient.size(0)}, gradient.options().dtype(at::kDouble));
  cross_entropy(gradient, labels, losses, scale, true);
  return gradient;
}

}  // namespace tierflow::models
