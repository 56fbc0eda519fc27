#include "runtime/models/decoder_layer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/models/decoder.h"
#include "runtime/models/loss_head.h"
#include "runtime/models/ops.h"
#include "runtime/spec/model_units.h"

namespace tierflow::models {
namespace {

ModelSpec spec_of(const DecoderShape& shape) {
  ModelSpec spec;
  spec.config = {.vocab_size = 1,
                 .hidden_size = shape.hidden,
                 .intermediate_size = shape.intermediate,
                 .layers = 1,
                 .heads = shape.heads,
                 .kv_heads = shape.kv_heads,
                 .head_dim = shape.head_dim,
                 .norm_eps = shape.norm_eps,
                 .tie_word_embeddings = true,
                 .qkv_bias = shape.qkv_bias,
                 .output_bias = shape.output_bias,
                 .mlp_bias = shape.mlp_bias,
                 .qk_norm = shape.qk_norm ? QkNorm::head : QkNorm::none,
                 .layer_specs = {{.window = shape.window}}};
  spec.tiling = Tiling::none();
  build_units(spec);
  return spec;
}

// Sums of whole products are of rounded values already; those of vectors are fp32 until here.
class RoundedVectors {
 public:
  explicit RoundedVectors(const std::vector<Tensor>& sums) : sums_(sums), own_(sums) {
    for (Tensor& sum : own_)
      if (sum.defined() && sum.dim() < 2) sum = at::zeros_like(sum);
  }
  const std::vector<Tensor>& own() const { return own_; }
  void add() const {
    for (std::size_t i = 0; i < sums_.size(); ++i)
      if (sums_[i].defined() && sums_[i].dim() < 2) sums_[i].add_(own_[i].to(at::kBFloat16));
  }

 private:
  const std::vector<Tensor>& sums_;
  std::vector<Tensor> own_;
};

Tensor rows(const Tensor& x) {
  return x.detach().reshape({-1, x.size(-1)}).contiguous();
}

}  // namespace

DecoderLayer::DecoderLayer(const DecoderShape& shape, const std::vector<std::string>& roles) : shape_(shape) {
  ModelSpec spec = spec_of(shape);
  while (spec.stages[static_cast<std::size_t>(stage_)].kind != StageKind::block) ++stage_;
  const UnitSpec& unit = spec.units[static_cast<std::size_t>(spec.stages[static_cast<std::size_t>(stage_)].units[0])];
  for (const TensorSpec& tensor : unit.tensors) {
    const auto found = std::find(roles.begin(), roles.end(), tensor.role);
    if (found == roles.end()) throw Exception(io::ErrorKind::usage, "a decoder layer without " + tensor.role);
    order_.push_back(static_cast<std::size_t>(found - roles.begin()));
  }
  if (order_.size() != roles.size())
    throw Exception(io::ErrorKind::usage, "a decoder layer with parameters that are not its own");
  model_ = make_decoder(std::move(spec));
}

std::vector<Tensor> DecoderLayer::in_order(const std::vector<Tensor>& tensors) const {
  std::vector<Tensor> ordered;
  for (const std::size_t position : order_) ordered.push_back(tensors.at(position));
  return ordered;
}

Tensor DecoderLayer::forward(const Weights& weights, const Input& input, std::unique_ptr<KeptActivations>* kept) const {
  const at::NoGradGuard no_grad;
  const Shared shared{.tables = {input.cos, input.sin}, .documents = input.documents};
  const Weights ordered = in_order(weights);
  Carry carry = {input.hidden.detach()};
  if (kept == nullptr) return model_->forward(stage_, ordered, carry, shared, /*training=*/true).at(0);
  *kept = model_->forward_keeping(stage_, ordered, carry, shared);
  return carry.at(0);
}

Tensor DecoderLayer::backward(const Weights& weights, const Gradients& sums, const Input& input, const Tensor& d_out,
                              std::unique_ptr<KeptActivations> kept) const {
  const at::NoGradGuard no_grad;
  const Shared shared{.tables = {input.cos, input.sin}, .documents = input.documents};
  const std::vector<Tensor> ordered_sums = in_order(sums.tensors());
  const RoundedVectors vectors(ordered_sums);
  const Carry d = model_->backward_kept(stage_, in_order(weights), vectors.own(), {input.hidden.detach()}, shared,
                                        {d_out}, std::move(kept));
  vectors.add();
  return d.at(0);
}

std::uint64_t DecoderLayer::kept_bytes(std::int64_t tokens) const {
  const std::int64_t q = shape_.heads * shape_.head_dim, kv = shape_.kv_heads * shape_.head_dim;
  // Both norms' results and the second's input; q, k, v and the result of attention; gate and up.
  std::int64_t words = 3 * shape_.hidden + 2 * q + 2 * kv + 2 * shape_.intermediate;
  std::int64_t floats = 2 + shape_.heads;  // of the norms, and of attention's softmax
  if (shape_.qk_norm) {
    words += q + kv;
    floats += shape_.heads + shape_.kv_heads;
  }
  return static_cast<std::uint64_t>(tokens * (2 * words + 4 * floats));
}

Tensor linear_backward(const Tensor& weight, const Tensor& weight_sum, const Tensor& bias_sum, const Tensor& x,
                       const Tensor& d_y) {
  const at::NoGradGuard no_grad;
  const Tensor d = rows(d_y);
  add_product(weight_sum, d, rows(x));
  const std::vector<Tensor> biases{bias_sum};
  const RoundedVectors vectors(biases);
  add_rows(vectors.own()[0], d);
  vectors.add();
  return at::mm(d, weight.detach()).view(x.sizes());
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
