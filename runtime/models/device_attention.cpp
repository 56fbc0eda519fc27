#include "runtime/models/device_attention.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>

#include <algorithm>

#include "runtime/models/row_kernels_device.h"
#include "runtime/models/upload.h"

namespace tierflow::models {
namespace {

using at::Tensor;

class InBlocks final : public KeptAttention {
 public:
  std::string_view name() const override { return "blocks"; }
  BlockAttention forward(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionRules& rules) const override {
    return attention_in_blocks(q, k, v, rules);
  }
  AttentionGradient backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                             const BlockAttention& forward, const AttentionRules& rules) const override {
    return attention_in_blocks_backward(d_out, q, k, v, forward, rules);
  }
  Tensor by_token(const Tensor& lse, const Tensor&) const override { return lse.transpose(1, 2); }
};

// x as the kernel takes it: all tokens in one row where documents cut them.
Tensor as_taken(const Tensor& x, const FlashShape& shape) {
  return shape.ends.defined() ? x.reshape({-1, x.size(2), x.size(3)}) : x;
}
std::optional<Tensor> if_any(const Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// q, k, v as they are, [batch, sequence, heads, head_dim]; lse [batch, heads, sequence], of documents [heads, tokens].
class Flash final : public KeptAttention {
 public:
  std::string_view name() const override { return "flash"; }
  BlockAttention forward(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionRules& rules) const override {
    const FlashShape shape = flash_shape(q, rules);
    const auto ends = if_any(shape.ends);
    const auto [out, lse, state, unused, mask] = at::_flash_attention_forward(
        as_taken(q, shape), as_taken(k, shape), as_taken(v, shape), ends, ends, shape.longest, shape.longest,
        /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false,
        std::optional<double>(rules.scale_of(q.size(3))), shape.before, shape.behind);
    return {out.view(q.sizes()), lse};
  }
  AttentionGradient backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                             const BlockAttention& forward, const AttentionRules& rules) const override {
    const FlashShape shape = flash_shape(q, rules);
    // Where random numbers stood: without dropout nobody reads it.
    const Tensor state = at::empty({2}, q.options().dtype(at::kUInt64)), unused = at::empty({}, state.options());
    const auto [d_q, d_k, d_v] = at::_flash_attention_backward(
        as_taken(d_out, shape), as_taken(q, shape), as_taken(k, shape), as_taken(v, shape),
        as_taken(forward.out, shape), forward.lse, shape.ends, shape.ends, shape.longest, shape.longest,
        /*dropout_p=*/0.0, /*is_causal=*/true, state, unused, std::optional<double>(rules.scale_of(q.size(3))),
        shape.before, shape.behind);
    return {.q = d_q.reshape(q.sizes()).contiguous(),
            .k = d_k.reshape(k.sizes()).contiguous(),
            .v = d_v.reshape(v.sizes()).contiguous()};
  }
  Tensor by_token(const Tensor& lse, const Tensor& q) const override {
    if (lse.dim() == 3) return lse.transpose(1, 2);
    return lse.view({q.size(2), q.size(0), q.size(1)}).permute({1, 2, 0});
  }
};

// In the layout [batch, heads, sequence, head_dim]; lse [batch, heads, sequence, 1].
class Cudnn final : public KeptAttention {
 public:
  std::string_view name() const override { return "cudnn"; }
  BlockAttention forward(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionRules& rules) const override {
    const auto result = at::_scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_bias=*/std::nullopt,
        /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false,
        std::optional<double>(rules.scale_of(q.size(3))));
    return {std::get<0>(result).transpose(1, 2).contiguous(), std::get<1>(result)};
  }
  AttentionGradient backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                             const BlockAttention& forward, const AttentionRules& rules) const override {
    const Tensor seed = at::empty({}, q.options().dtype(at::kLong)), offset = at::empty_like(seed);  // as above
    const auto [d_q, d_k, d_v] = at::_scaled_dot_product_cudnn_attention_backward(
        d_out.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), forward.out.transpose(1, 2),
        forward.lse, seed, offset, /*attn_bias=*/Tensor(), /*cum_seq_q=*/Tensor(), /*cum_seq_k=*/Tensor(), q.size(1),
        k.size(1), /*dropout_p=*/0.0, /*is_causal=*/true, std::optional<double>(rules.scale_of(q.size(3))));
    const auto dense = [](const Tensor& d) { return d.transpose(1, 2).contiguous(); };
    return {.q = dense(d_q), .k = dense(d_k), .v = dense(d_v)};
  }
  Tensor by_token(const Tensor& lse, const Tensor&) const override { return lse.squeeze(3).transpose(1, 2); }
};

class WithSinks final : public KeptAttention {
 public:
  explicit WithSinks(std::shared_ptr<const KeptAttention> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  BlockAttention forward(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionRules& rules) const override {
    BlockAttention result = inner_->forward(q, k, v, without_sinks(rules));
    const Tensor lse = inner_->by_token(result.lse, q), sinks = rules.sinks.detach().to(lse.scalar_type());
    result.out.mul_(at::sigmoid(lse - sinks).unsqueeze(3));
    lse.copy_(at::logaddexp(lse, sinks));
    return result;
  }
  AttentionGradient backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                             const BlockAttention& forward, const AttentionRules& rules) const override {
    AttentionGradient d = inner_->backward(d_out, q, k, v, forward, without_sinks(rules));
    const Tensor lse = inner_->by_token(forward.lse, q), sinks = rules.sinks.detach().to(lse.scalar_type());
    const Tensor pulled = (d_out.to(lse.scalar_type()) * forward.out).sum(3);
    d.sinks = pulled.mul_(at::exp(sinks - lse)).sum(at::IntArrayRef{0, 1}).neg_();
    return d;
  }
  Tensor by_token(const Tensor& lse, const Tensor& q) const override { return inner_->by_token(lse, q); }

 private:
  static AttentionRules without_sinks(AttentionRules rules) {
    rules.sinks.reset();
    return rules;
  }
  std::shared_ptr<const KeptAttention> inner_;
};

bool knows_flash(const Tensor& q, const AttentionRules& rules) {
  return at::isReducedFloatingType(q.scalar_type()) &&
         flash_takes_heads_of(q.size(3), row_kernels::capability(q.device().index())) &&
         kFewestFlashTokens * std::ssize(rules.documents) <= q.size(0) * q.size(1);
}

bool has_window(const Tensor& q, const AttentionRules& rules) {
  return rules.window > 0 && rules.window < q.size(1);
}

// Torch's order depends on the card, and on whether runs must repeat their bits.
bool torch_takes_cudnn(const Tensor& q, const Tensor& k, const AttentionRules& rules) {
  const Tensor queries = q.transpose(1, 2), keys = k.transpose(1, 2);
  return at::_fused_sdp_choice(queries, keys, keys, /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0, /*is_causal=*/true,
                               std::optional<double>(rules.scale_of(q.size(3))),
                               /*enable_gqa=*/q.size(2) != k.size(2)) ==
         static_cast<std::int64_t>(at::SDPBackend::cudnn_attention);
}

}  // namespace

bool flash_takes_heads_of(std::int64_t dim, int capability) {
  const bool large = capability == 80 || capability / 10 == 9 || capability / 10 == 10;
  return dim % 8 == 0 && dim <= 256 && (large || dim <= 192 || dim > 224);
}

FlashShape flash_shape(const Tensor& q, const AttentionRules& rules) {
  FlashShape shape{.longest = q.size(1)};
  if (rules.window > 0) shape.before = rules.window - 1;
  if (rules.documents.empty()) return shape;
  shape.longest = std::ranges::max(rules.documents, {}, &Document::length).length;
  shape.ends = rules.ends.defined() ? rules.ends : upload({document_ends(rules.documents)}, q.device()).front();
  return shape;
}

std::shared_ptr<const KeptAttention> device_attention(const Tensor& q, const Tensor& k, const AttentionRules& rules,
                                                      double dropout) {
  if (dropout > 0 || rules.softcap > 0) return nullptr;
  if (rules.sinks.defined()) {
    if (at::GradMode::is_enabled()) return nullptr;
    AttentionRules without = rules;
    without.sinks.reset();
    auto found = device_attention(q, k, without, dropout);
    return found != nullptr ? std::make_shared<WithSinks>(std::move(found)) : nullptr;
  }
  if (rules.choice.by != nullptr) return rules.choice.by;
  if (!q.is_cuda() || !at::isReducedFloatingType(q.scalar_type())) return nullptr;
  const bool whole = rules.documents.empty() && !has_window(q, rules), flash = knows_flash(q, rules);
  if (whole && !(flash && rules.choice.any_length) && torch_takes_cudnn(q, k, rules)) return std::make_shared<Cudnn>();
  return flash ? std::make_shared<Flash>() : nullptr;
}

std::shared_ptr<const KeptAttention> kept_attention(const Tensor& q, const Tensor& k, const AttentionRules& rules,
                                                    double dropout) {
  if (auto found = device_attention(q, k, rules, dropout)) return found;
  return attention_is_in_blocks(q, rules, dropout) ? std::make_shared<InBlocks>() : nullptr;
}

}  // namespace tierflow::models
