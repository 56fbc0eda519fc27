#include "runtime/models/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "runtime/models/attention_kernels.h"
#include "runtime/models/device_attention.h"
#include "runtime/models/torch_attention.h"

namespace tierflow::models {
namespace {

using at::Tensor;
using kernels::kKeys;
using kernels::kQueries;
using Bits = std::uint16_t;

void multiply_by_brgemm(std::int64_t m, std::int64_t n, std::int64_t k, const Bits* a, std::int64_t a_stride,
                        const Bits* b, float* c, bool add) {
  at::native::cpublas::brgemm(m, n, k, a_stride, n, n, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c, /*is_vnni=*/true);
}

// Whether the processor multiplies bf16, and torch by that.
bool has_brgemm() {
  static const bool has = [] {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx512bf16")) return false;
#else
    return false;
#endif
    try {
      std::vector<Bits> a(64 * 64), b(64 * 64);
      std::vector<float> c(64 * 64);
      multiply_by_brgemm(64, 64, 64, a.data(), 64, b.data(), c.data(), false);
      at::native::cpublas::brgemm_release();
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return has;
}

// c [m, n] (+)= a [m, k] b, with b in pairs [k / 2][n][2]; c dense.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, const Bits* a, std::int64_t a_stride, const Bits* b,
              float* c, bool add) {
  (has_brgemm() ? multiply_by_brgemm : kernels::multiply_pairs)(m, n, k, a, a_stride, b, c, add);
}

// Ends a thread's products.
void end_products() {
  if (has_brgemm()) at::native::cpublas::brgemm_release();
}

// Rows of one head of x [batch, sequence, heads, dim].
struct Heads {
  Bits* data;
  std::int64_t batch_stride, stride, head_stride;
  explicit Heads(const Tensor& x)
      : data(static_cast<Bits*>(x.data_ptr())),
        batch_stride(x.stride(0)),
        stride(x.stride(1)),
        head_stride(x.stride(2)) {}
  Bits* at(std::int64_t batch, std::int64_t head, std::int64_t row = 0) const {
    return data + batch * batch_stride + head * head_stride + row * stride;
  }
};

struct Shape {
  std::int64_t batch, length, heads, kv_heads, dim;
  const std::int64_t* first_seen;
  std::int64_t first_seen_stride;  // between rows
  float scale;                     // of scores
  Shape(const Tensor& q, const Tensor& k, const Tensor& seen, double scale)
      : batch(q.size(0)),
        length(q.size(1)),
        heads(q.size(2)),
        kv_heads(k.size(2)),
        dim(q.size(3)),
        first_seen(seen.const_data_ptr<std::int64_t>()),
        first_seen_stride(seen.size(0) == 1 ? 0 : length),
        scale(static_cast<float>(scale)) {}
  std::int64_t query_blocks() const { return (length + kQueries - 1) / kQueries; }
  std::int64_t key_blocks() const { return (length + kKeys - 1) / kKeys; }
  // The first key that each query of `row` sees, from query `first` on.
  const std::int64_t* seen_by(std::int64_t row, std::int64_t first) const {
    return first_seen + row * first_seen_stride + first;
  }
  // Blocks of keys that some query of [first, first + rows) of `row` sees: [first, second).
  std::pair<std::int64_t, std::int64_t> keys_of(std::int64_t row, std::int64_t first, std::int64_t rows) const {
    return {*seen_by(row, first) / kKeys, (first + rows - 1) / kKeys + 1};
  }
};

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

// The first key that each query sees, never falling within a row: int64 [rows, length], or one row for all.
Tensor first_keys(const Tensor& q, const AttentionRules& rules) {
  const std::int64_t batch = q.size(0), length = q.size(1), window = rules.window > 0 ? rules.window : length;
  const Tensor keys = at::empty({rules.documents.empty() ? 1 : batch, length}, at::kLong);
  std::int64_t* first = keys.mutable_data_ptr<std::int64_t>();
  const auto fill = [&](const Document& document) {
    const std::int64_t end = document.begin + document.length;
    for (std::int64_t query = document.begin; query < end; ++query)
      first[document.row * length + query] = std::max(document.begin, query - window + 1);
  };
  if (rules.documents.empty()) fill({.length = length});
  for (const Document& document : rules.documents) fill(document);
  return keys;
}

Tensor dense_rows(const Tensor& x) {
  return x.stride(3) == 1 && x.stride(2) % 2 == 0 ? x : x.contiguous();
}

}  // namespace

double AttentionRules::scale_of(std::int64_t head_dim) const {
  return scale > 0 ? scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

std::vector<Document> in_chunks(const std::vector<Document>& documents, std::int64_t rows, std::int64_t length,
                                std::int64_t chunk) {
  if (chunk <= 0) return documents;
  std::vector<Document> whole = documents;
  if (documents.empty())
    for (std::int64_t row = 0; row < rows; ++row) whole.push_back({.row = row, .length = length});
  if (std::ranges::all_of(whole, [&](const Document& each) { return each.length <= chunk; })) return documents;
  std::vector<Document> parts;
  for (const Document& each : whole)
    for (std::int64_t first = 0; first < each.length; first += chunk)
      parts.push_back({.row = each.row, .begin = each.begin + first, .length = std::min(chunk, each.length - first)});
  return parts;
}

namespace {

// fp32 on the CPU, or undefined.
Tensor wide_sinks(const Tensor& sinks) {
  return sinks.defined() ? sinks.detach().to(at::kFloat).contiguous() : sinks;
}

BlockAttention in_blocks(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& seen, double scale,
                         const Tensor& sinks_in) {
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const Shape s(q, k, seen, scale);
  const std::int64_t packed = s.key_blocks() * kKeys * s.dim;  // elements of one head's keys
  const Tensor keys = at::empty({s.batch * s.kv_heads, packed}, q.options());
  const Tensor values = at::empty_like(keys);
  const Tensor out = at::empty({s.batch, s.length, s.heads, s.dim}, q.options());
  const Tensor lse = at::empty({s.batch, s.heads, s.length}, q.options().dtype(at::kFloat));
  const Heads qs(q), ks(k), vs(v), outs(out);
  Bits* key_pairs = static_cast<Bits*>(keys.data_ptr());
  Bits* value_pairs = static_cast<Bits*>(values.data_ptr());
  float* lses = lse.mutable_data_ptr<float>();
  const Tensor sinks = wide_sinks(sinks_in);
  const float* sink = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;

  at::parallel_for(0, s.batch * s.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t first = 0; first < s.length; first += kKeys) {
        const std::int64_t rows = std::min(kKeys, s.length - first), b = i / s.kv_heads, head = i % s.kv_heads;
        kernels::pack_transposed(ks.at(b, head, first), ks.stride, rows, s.dim, key_pairs + i * packed + first * s.dim,
                                 kKeys);
        kernels::pack(vs.at(b, head, first), vs.stride, rows, s.dim, value_pairs + i * packed + first * s.dim, kKeys);
      }
    }
  });
  at::parallel_for(0, s.batch * s.heads * s.query_blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(size(kQueries * kKeys)), sums(size(kQueries * s.dim)), most(size(kQueries)),
        total(size(kQueries));
    std::vector<Bits> p(size(kQueries * kKeys));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % s.query_blocks() * kQueries, head = i / s.query_blocks() % s.heads,
                         b = i / s.query_blocks() / s.heads, rows = std::min(kQueries, s.length - first);
      const std::int64_t source = (b * s.kv_heads + head / (s.heads / s.kv_heads)) * packed;
      std::fill(sums.begin(), sums.end(), 0.0F);
      // A sink is what the running softmax begins with.
      std::fill(total.begin(), total.end(), sink != nullptr ? 1.0F : 0.0F);
      std::fill(most.begin(), most.end(), sink != nullptr ? sink[head] : -std::numeric_limits<float>::infinity());
      const auto [key_begin, key_end] = s.keys_of(b, first, rows);
      for (std::int64_t block = key_begin; block < key_end; ++block) {
        const std::int64_t at = source + block * kKeys * s.dim;
        multiply(rows, kKeys, s.dim, qs.at(b, head, first), qs.stride, key_pairs + at, scores.data(), false);
        kernels::softmax_step(scores.data(), p.data(), most.data(), total.data(), sums.data(), rows, s.dim, s.scale,
                              {first, block * kKeys, s.seen_by(b, first), rows});
        multiply(rows, s.dim, kKeys, p.data(), kKeys, value_pairs + at, sums.data(), true);
      }
      kernels::softmax_end(sums.data(), most.data(), total.data(), outs.at(b, head, first), outs.stride,
                           lses + (b * s.heads + head) * s.length + first, rows, s.dim);
    }
    end_products();
  });
  return {out, lse};
}

AttentionGradient in_blocks_backward(const Tensor& d_out_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                     const BlockAttention& forward, const Tensor& seen, double scale,
                                     const Tensor& sinks_in) {
  const Tensor d_out = dense_rows(d_out_in), q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const Shape s(q, k, seen, scale);
  AttentionGradient gradient{.q = at::empty({s.batch, s.length, s.heads, s.dim}, q.options()),
                             .k = at::empty({s.batch, s.length, s.kv_heads, s.dim}, q.options()),
                             .v = at::empty({s.batch, s.length, s.kv_heads, s.dim}, q.options())};
  const Heads qs(q), ks(k), vs(v), outs(forward.out), d_outs(d_out), d_qs(gradient.q), d_ks(gradient.k),
      d_vs(gradient.v);
  const float* lses = forward.lse.const_data_ptr<float>();
  const std::int64_t group = s.heads / s.kv_heads, padded = s.key_blocks() * kKeys;
  const Tensor sinks = wide_sinks(sinks_in),
               d_sinks = sinks.defined() ? at::zeros({s.batch, s.heads}, sinks.options()) : sinks;
  const float* sink = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
  float* d_sink = sinks.defined() ? d_sinks.mutable_data_ptr<float>() : nullptr;

  // A thread owns whole heads of keys: their sums over queries and grouped heads have one order. Products are of
  // transposed scores [keys, queries], so that only the gradient of the scores is needed both ways.
  at::parallel_for(0, s.batch * s.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    const auto floats = [](std::int64_t n) { return std::vector<float>(size(n)); };
    const auto words = [](std::int64_t n) { return std::vector<Bits>(size(n)); };
    auto d_k = floats(padded * s.dim), d_v = floats(padded * s.dim), d_q = floats(s.dim * kQueries);
    auto scores = floats(kKeys * kQueries), d_p = floats(kKeys * kQueries), lse = floats(kQueries),
         delta = floats(kQueries);
    auto keys = words(padded * s.dim), p = words(kKeys * kQueries), d_s = words(kKeys * kQueries),
         d_s_pairs = words(kKeys * kQueries);
    auto q_across = words(s.dim * kQueries), d_across = words(s.dim * kQueries);  // right operands over dim
    auto q_down = words(s.dim * kQueries), d_down = words(s.dim * kQueries);      // right operands over queries
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / s.kv_heads, kv = i % s.kv_heads;
      std::fill(d_k.begin(), d_k.end(), 0.0F);
      std::fill(d_v.begin(), d_v.end(), 0.0F);
      for (std::int64_t first = 0; first < s.length; first += kKeys) {
        kernels::transpose(ks.at(b, kv, first), ks.stride, std::min(kKeys, s.length - first), s.dim,
                           keys.data() + first * s.dim, kKeys);
      }
      for (std::int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        for (std::int64_t first = 0; first < s.length; first += kQueries) {
          const std::int64_t rows = std::min(kQueries, s.length - first);
          kernels::pack_transposed(qs.at(b, head, first), qs.stride, rows, s.dim, q_across.data(), kQueries);
          kernels::pack_transposed(d_outs.at(b, head, first), d_outs.stride, rows, s.dim, d_across.data(), kQueries);
          kernels::pack(qs.at(b, head, first), qs.stride, rows, s.dim, q_down.data(), kQueries);
          kernels::pack(d_outs.at(b, head, first), d_outs.stride, rows, s.dim, d_down.data(), kQueries);
          std::fill(lse.begin(), lse.end(), std::numeric_limits<float>::infinity());
          std::copy_n(lses + (b * s.heads + head) * s.length + first, rows, lse.begin());
          std::fill(delta.begin(), delta.end(), 0.0F);
          kernels::row_products(d_outs.at(b, head, first), d_outs.stride, outs.at(b, head, first), outs.stride,
                                delta.data(), rows, s.dim);
          if (sink != nullptr) {
            float& sum = d_sink[b * s.heads + head];
            for (std::size_t i = 0; i < size(rows); ++i) sum -= std::exp(sink[head] - lse[i]) * delta[i];
          }
          std::fill(d_q.begin(), d_q.end(), 0.0F);
          const auto [key_begin, key_end] = s.keys_of(b, first, rows);
          for (std::int64_t block = key_begin; block < key_end; ++block) {
            const std::int64_t key = block * kKeys, count = std::min(kKeys, s.length - key);
            multiply(count, kQueries, s.dim, ks.at(b, kv, key), ks.stride, q_across.data(), scores.data(), false);
            multiply(count, kQueries, s.dim, vs.at(b, kv, key), vs.stride, d_across.data(), d_p.data(), false);
            kernels::attention_gradient(scores.data(), d_p.data(), lse.data(), delta.data(), p.data(), d_s.data(),
                                        d_s_pairs.data(), count, s.scale, {first, key, s.seen_by(b, first), rows});
            multiply(count, s.dim, kQueries, p.data(), kQueries, d_down.data(), d_v.data() + key * s.dim, true);
            multiply(count, s.dim, kQueries, d_s.data(), kQueries, q_down.data(), d_k.data() + key * s.dim, true);
            multiply(s.dim, kQueries, kKeys, keys.data() + key * s.dim, kKeys, d_s_pairs.data(), d_q.data(), true);
          }
          kernels::round_transposed(d_q.data(), d_qs.at(b, head, first), d_qs.stride, rows, s.dim);
        }
      }
      kernels::round_rows(d_k.data(), d_ks.at(b, kv), d_ks.stride, s.length, s.dim);
      kernels::round_rows(d_v.data(), d_vs.at(b, kv), d_vs.stride, s.length, s.dim);
    }
    end_products();
  });
  if (d_sinks.defined()) gradient.sinks = d_sinks.sum(0);
  return gradient;
}

struct BlockAttentionFunction : torch::autograd::Function<BlockAttentionFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& seen, double scale, const std::optional<Tensor>& sinks_if_any) {
    const Tensor sinks = sinks_if_any.value_or(Tensor());
    BlockAttention result = in_blocks(q, k, v, seen, scale, sinks);
    context->saved_data["scale"] = scale;
    context->save_for_backward({q, k, v, result.out, result.lse, seen, sinks});
    return result.out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& d_out) {
    const auto saved = context->get_saved_variables();
    const Tensor& sinks = saved[6];
    AttentionGradient d = in_blocks_backward(d_out[0], saved[0], saved[1], saved[2], {saved[3], saved[4]}, saved[5],
                                             context->saved_data["scale"].toDouble(), sinks);
    return {d.q, d.k, d.v, Tensor(), Tensor(), sinks.defined() ? d.sinks.to(sinks.scalar_type()) : sinks};
  }
};

}  // namespace

BlockAttention attention_in_blocks(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRules& rules) {
  return in_blocks(q, k, v, first_keys(q, rules), rules.scale_of(q.size(3)), rules.sinks);
}

AttentionGradient attention_in_blocks_backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                               const BlockAttention& forward, const AttentionRules& rules) {
  return in_blocks_backward(d_out, q, k, v, forward, first_keys(q, rules), rules.scale_of(q.size(3)), rules.sinks);
}

bool attention_is_in_blocks(const Tensor& q, const AttentionRules& rules, double dropout) {
  return q.is_cpu() && q.scalar_type() == at::kBFloat16 && dropout <= 0 && rules.softcap <= 0 && q.size(3) % 2 == 0;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRules& rules, double dropout) {
  const auto say = [&](std::string_view name) {
    if (rules.choice.ran != nullptr) rules.choice.ran->emplace(name);
  };
  if (const auto by = device_attention(q, k, rules, dropout)) {
    say(by->name());
    return by->forward(q, k, v, rules).out;
  }
  const bool in_blocks_here = attention_is_in_blocks(q, rules, dropout);
  say(in_blocks_here ? "blocks" : "torch");
  if (!in_blocks_here) return torch_attention(q, k, v, rules, dropout);
  const auto wants = [](const Tensor& x) { return x.defined() && x.requires_grad(); };
  const bool differentiate = at::GradMode::is_enabled() && (wants(q) || wants(k) || wants(v) || wants(rules.sinks));
  const Tensor seen = first_keys(q, rules);
  const double scale = rules.scale_of(q.size(3));
  const auto sinks = rules.sinks.defined() ? std::optional(rules.sinks) : std::nullopt;
  return differentiate ? BlockAttentionFunction::apply(q, k, v, seen, scale, sinks)
                       : in_blocks(q, k, v, seen, scale, rules.sinks).out;
}

}  // namespace tierflow::models
