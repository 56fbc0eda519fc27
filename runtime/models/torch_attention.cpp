#include "runtime/models/torch_attention.h"

#include <ATen/ATen.h>

#include <limits>
#include <optional>
#include <vector>

#include "runtime/models/products.h"

namespace tierflow::models {
namespace {

using at::Tensor;

// x [batch, sequence, heads, dim] as [batch, heads * groups, sequence, dim]: each head `groups` times.
Tensor repeated(const Tensor& x, std::int64_t groups) {
  const Tensor heads = x.transpose(1, 2);
  if (groups == 1) return heads;
  return heads.unsqueeze(2).expand({x.size(0), x.size(2), groups, x.size(1), x.size(3)}).flatten(1, 2);
}

// Whether a query sees a key, [sequence, sequence].
Tensor seen_within(const Tensor& q, std::int64_t window) {
  const std::int64_t length = q.size(1);
  Tensor seen = at::ones({length, length}, q.options().dtype(at::kBool).requires_grad(false)).tril_();
  return window > 0 ? seen.triu_(1 - window) : seen;
}

// Attention of whole rows with capped scores: transformers' eager attention of Gemma 2.
Tensor capped_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRules& rules,
                        double dropout) {
  const std::int64_t groups = q.size(2) / k.size(2);
  Tensor scores = at::matmul(q.transpose(1, 2), repeated(k, groups).transpose(2, 3)) * rules.scale_of(q.size(3));
  scores = at::tanh(scores / rules.softcap) * rules.softcap;
  scores = scores.masked_fill(seen_within(q, rules.window).logical_not(), -std::numeric_limits<double>::infinity());
  const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor weights = at::softmax(scores, -1, wide).to(q.scalar_type());
  if (dropout > 0) weights = at::dropout(weights, dropout, true);
  return at::matmul(weights, repeated(v, groups)).transpose(1, 2);
}

// x [batch, sequence, heads, dim] with a token of zeros ahead of the others and eight further dimensions, a multiple
// that fast kernels know. The first of these holds `value` [heads] for all tokens but that one.
Tensor widened(const Tensor& x, const Tensor& value) {
  const Tensor column = value.view({1, 1, -1, 1}).expand({x.size(0), x.size(1), x.size(2), 1});
  return at::constant_pad_nd(at::cat({x, column}, 3), {0, 7, 0, 0, 1, 0});
}

// torch's attention of whole rows, in the layouts it knows. A sink becomes the score of a key of its own, which a token
// ahead of the others has in a further dimension; a query of that token keeps the causal mask square.
Tensor attention_of_rows(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const AttentionRules& rules,
                         double dropout) {
  if (rules.softcap > 0) return capped_attention(q_in, k_in, v_in, rules, dropout);
  const std::int64_t groups = q_in.size(2) / k_in.size(2), length = q_in.size(1), dim = q_in.size(3);
  const bool sinks = rules.sinks.defined();
  const double scale = rules.scale_of(dim);
  Tensor q = q_in, k = k_in, v = v_in;
  if (sinks) {
    const Tensor none = at::zeros({k.size(2)}, k.options().requires_grad(false));
    q = widened(q, (rules.sinks / scale).to(q.scalar_type()));
    k = widened(k, none);
    v = widened(v, none);
    k.select(1, 0).select(2, dim).fill_(1);
  }
  std::optional<Tensor> mask;
  if (rules.window > 0 && rules.window < length) {
    mask = seen_within(q, rules.window);
    if (sinks) mask->select(1, 0).fill_(true);
  }
  // CUDA's kernels that take a mask know no grouped heads, nor does what the CPU runs with dropout.
  const bool apart = groups > 1 && ((mask && !q.is_cpu()) || dropout > 0);
  const Tensor out = at::scaled_dot_product_attention(q.transpose(1, 2), repeated(k, apart ? groups : 1),
                                                      repeated(v, apart ? groups : 1), mask, dropout,
                                                      /*is_causal=*/!mask, scale, groups > 1 && !apart)
                         .transpose(1, 2);
  return sinks ? out.narrow(1, 1, length).narrow(3, 0, dim) : out;
}

// While it lives torch does not take cuDNN, which plans for each new length, in half a second, and whose gradients with
// a mask may be NaN (pytorch issue 196678). For the one thread that computes on a GPU.
class WithoutCudnn {
 public:
  WithoutCudnn() { at::globalContext().setSDPUseCuDNN(false); }
  ~WithoutCudnn() { at::globalContext().setSDPUseCuDNN(enabled_); }
  WithoutCudnn(const WithoutCudnn&) = delete;
  WithoutCudnn& operator=(const WithoutCudnn&) = delete;

 private:
  const bool enabled_ = at::globalContext().userEnabledCuDNNSDP();
};

}  // namespace

Tensor torch_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRules& rules, double dropout) {
  if (multiplied_in_fp32(q)) {
    const auto wide = at::kFloat;
    return torch_attention(q.to(wide), k.to(wide), v.to(wide), rules, dropout).to(q.scalar_type());
  }
  std::optional<WithoutCudnn> without;
  if (q.is_cuda()) without.emplace();
  if (rules.documents.empty()) return attention_of_rows(q, k, v, rules, dropout);
  std::vector<Tensor> parts;
  for (const Document& document : rules.documents) {
    const auto part = [&](const Tensor& x) {
      return x.narrow(0, document.row, 1).narrow(1, document.begin, document.length);
    };
    parts.push_back(attention_of_rows(part(q), part(k), part(v), rules, dropout));
  }
  return at::cat(parts, 1).view(q.sizes());
}

}  // namespace tierflow::models
