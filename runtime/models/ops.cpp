#include "runtime/models/ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <tuple>

#include "runtime/models/grain.h"
#include "runtime/models/kernels.h"
#include "runtime/models/products.h"
#include "runtime/models/random_numbers.h"
#include "runtime/models/row_kernels.h"

namespace tierflow::models {
namespace {

constexpr std::int64_t kTile = 1 << 22;  // elements of a weight-gradient tile

// The CPU's kernels apply.
template <class... Tensors>
bool fused(const Tensor& first, const Tensors&... others) {
  return first.is_cpu() && row_kernels::is_plain(first) && (row_kernels::is_plain(others) && ...);
}

std::uint16_t* bits(const Tensor& t) {
  return t.defined() ? static_cast<std::uint16_t*>(t.data_ptr()) : nullptr;
}

double offset_of(NormKind kind) {
  return kind == NormKind::rms_plus_one ? 1.0 : 0.0;
}
kernels::RmsRule rule_of(NormKind kind) {
  return {.rounded_first = kind == NormKind::rms, .offset = static_cast<float>(offset_of(kind))};
}

// A device's row kernel for it.
std::optional<kernels::Gate> gate_of(Activation activation) {
  if (activation == Activation::silu) return kernels::Gate::silu;
  if (activation == Activation::gelu_tanh) return kernels::Gate::gelu_tanh;
  return std::nullopt;
}

// added: undefined, or what becomes x + added.
Tensor fused_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps, kernels::RmsRule rule,
                      Tensor* rstd) {
  if (row_kernels::are_on(x.device())) return row_kernels::rms_norm(x, added, weight, eps, rule, rstd);
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  Tensor out = at::empty_like(x);
  if (rstd != nullptr) *rstd = at::empty({rows}, x.options().dtype(at::kFloat));
  float* r = rstd != nullptr ? rstd->mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, rows, grain_rows(n), [&](std::int64_t begin, std::int64_t end) {
    kernels::rms_norm(bits(x) + begin * n, added.defined() ? bits(added) + begin * n : nullptr, bits(weight),
                      bits(out) + begin * n, r != nullptr ? r + begin : nullptr, end - begin, n,
                      static_cast<float>(eps), rule);
  });
  return out;
}

// work(first row, rows, a sum of n for each of `sums`, null for an undefined one) for blocks of rows set by the shape;
// their sums are added block after block: the same bits on any number of threads.
template <std::size_t N, class Work>
void add_by_blocks(std::int64_t rows, std::int64_t n, const Tensor (&sums)[N], Work work) {
  const auto [block, blocks] = row_kernels::norm_blocks(rows, n, 64);
  Tensor partial[N];
  std::array<float*, N> partials{};
  for (std::size_t i = 0; i < N; ++i) {
    if (!sums[i].defined()) continue;
    partial[i] = at::zeros({blocks, n}, at::kFloat);
    partials[i] = partial[i].template mutable_data_ptr<float>();
  }
  at::parallel_for(0, blocks, 1, [&, block = block](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      std::array<float*, N> of_block = partials;
      for (float*& place : of_block) place = place != nullptr ? place + b * n : nullptr;
      work(b * block, std::min(block, rows - b * block), std::span<float* const>(of_block));
    }
  });
  for (std::size_t i = 0; i < N; ++i) {
    if (!sums[i].defined()) continue;
    for (std::int64_t b = 1; b < blocks; ++b) kernels::add(partials[i], partials[i] + b * n, n);
    sums[i].add_(partial[i][0]);
  }
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, NormKind kind, Tensor* rstd) {
  if (row_kernels::take(x, weight) || fused(x, weight)) return fused_rms_norm(x, {}, weight, eps, rule_of(kind), rstd);
  const Tensor wide = x.to(wide_type(x));
  const Tensor r = at::rsqrt(wide.pow(2).mean(-1, true) + eps);
  if (rstd != nullptr) *rstd = r.detach();
  if (kind == NormKind::rms) return weight * (wide * r).to(x.scalar_type());
  return ((wide * r) * (weight.to(wide.scalar_type()) + offset_of(kind))).to(x.scalar_type());
}

Tensor rms_norm_of_sum(const Tensor& x, Tensor& added, const Tensor& weight, double eps, NormKind kind, Tensor* rstd) {
  if (row_kernels::take(x, added, weight) || fused(x, added, weight))
    return fused_rms_norm(x, added, weight, eps, rule_of(kind), rstd);
  added = x + added;
  return rms_norm(added, weight, eps, kind, rstd);
}

Tensor rms_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& rstd, const Tensor& weight,
                         const Tensor& sum, NormKind kind, const Tensor& residual) {
  if (row_kernels::take(d_out, x, weight, residual) && row_kernels::take_sum(sum))
    return row_kernels::rms_norm_backward(d_out, x, rstd, weight, sum, rule_of(kind), residual);
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  if (!fused(d_out, x, weight, residual)) {
    const Tensor r = rstd.view([&] {
      auto shape = x.sizes().vec();
      shape.back() = 1;
      return shape;
    }());
    const Tensor xhat = x.to(wide_type(x)) * r;
    const Tensor d = d_out.to(wide_type(x));
    const Tensor seen = kind == NormKind::rms ? xhat.to(x.scalar_type()) : xhat;
    if (sum.defined()) sum.add_((d * seen).reshape({rows, n}).sum(0));
    const Tensor dw = d * (weight.to(wide_type(x)) + offset_of(kind));
    Tensor d_x = (dw - xhat * (dw * xhat).mean(-1, true)) * r;
    if (residual.defined()) d_x = d_x + residual;
    return d_x.to(x.scalar_type());
  }
  Tensor d_x = at::empty_like(x);
  add_by_blocks(rows, n, {sum}, [&](std::int64_t first, std::int64_t count, std::span<float* const> partials) {
    kernels::rms_norm_backward(bits(d_out) + first * n, bits(x) + first * n, rstd.const_data_ptr<float>() + first,
                               bits(weight), residual.defined() ? bits(residual) + first * n : nullptr,
                               bits(d_x) + first * n, partials[0], count, n, rule_of(kind));
  });
  return d_x;
}

// On the CPU, ATen takes parameters in bf16 to mean that statistics and sums over rows are kept in bf16: it gets them
// in fp32, and the sums are made here.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Tensor* mean, Tensor* rstd) {
  const Tensor w = x.is_cpu() ? weight.to(wide_type(x)) : weight;
  const Tensor b = x.is_cpu() && bias.defined() ? bias.to(wide_type(x)) : bias;
  if (mean == nullptr) return at::layer_norm(x, {x.size(-1)}, w, b, eps);
  Tensor out;
  std::tie(out, *mean, *rstd) = at::native_layer_norm(x, {x.size(-1)}, w, b, eps);
  return out;
}

Tensor layer_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                           const Tensor& weight, const Tensor& bias, const Tensor& weight_sum, const Tensor& bias_sum) {
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  if (!x.is_cpu()) {
    const auto [d_x, d_weight, d_bias] = at::native_layer_norm_backward(
        d_out, x, {n}, mean, rstd, weight, bias, {true, weight_sum.defined(), bias_sum.defined()});
    if (weight_sum.defined()) weight_sum.add_(d_weight);
    if (bias_sum.defined()) bias_sum.add_(d_bias);
    return d_x;
  }
  if (fused(d_out, x)) {
    add_by_blocks(
        rows, n, {weight_sum, bias_sum}, [&](std::int64_t first, std::int64_t count, std::span<float* const> partials) {
          kernels::layer_norm_sums(bits(d_out) + first * n, bits(x) + first * n, mean.const_data_ptr<float>() + first,
                                   rstd.const_data_ptr<float>() + first, partials[0], partials[1], count, n);
        });
  } else {
    const Tensor d = d_out.to(wide_type(x));
    if (weight_sum.defined()) weight_sum.add_((d * (x.to(wide_type(x)) - mean) * rstd).reshape({rows, n}).sum(0));
    if (bias_sum.defined()) bias_sum.add_(d.reshape({rows, n}).sum(0));
  }
  return std::get<0>(
      at::native_layer_norm_backward(d_out, x, {n}, mean, rstd, weight.to(wide_type(x)), {}, {true, false, false}));
}

Tensor rope(Tensor x, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign, const Tensor& positions) {
  if (row_kernels::take(x)) {
    row_kernels::rope(x, {}, cos, sin, rule, sign, positions);
    return x;
  }
  const std::int64_t heads = x.size(2), dim = x.size(3), half = cos.size(-1);
  const Tensor c = rule.rounded ? cos.to(x.scalar_type()) : cos, s = rule.rounded ? sin.to(x.scalar_type()) : sin;
  if (!fused(x)) {
    const auto by_token = [&](const Tensor& table) {
      return (positions.defined() ? at::embedding(table, positions) : table).unsqueeze(-2).to(wide_type(x));
    };
    const Tensor cos_heads = by_token(c), sin_heads = by_token(s) * sign;
    const Tensor turning = x.narrow(-1, 0, 2 * half).to(wide_type(x));
    const Tensor low = rule.interleaved ? turning.slice(-1, 0, std::nullopt, 2) : turning.narrow(-1, 0, half);
    const Tensor high = rule.interleaved ? turning.slice(-1, 1, std::nullopt, 2) : turning.narrow(-1, half, half);
    const Tensor turned_low = low * cos_heads - high * sin_heads, turned_high = high * cos_heads + low * sin_heads;
    const Tensor turned = (rule.interleaved ? at::stack({turned_low, turned_high}, -1).flatten(-2)
                                            : at::cat({turned_low, turned_high}, -1))
                              .to(x.scalar_type());
    return 2 * half == dim ? turned : at::cat({turned, x.narrow(-1, 2 * half, dim - 2 * half)}, -1);
  }
  const Tensor cos32 = c.to(at::kFloat).contiguous(), sin32 = s.to(at::kFloat).contiguous();
  const Tensor rows = positions.defined() ? positions.contiguous() : positions;
  const float* cp = cos32.const_data_ptr<float>();
  const float* sp = sin32.const_data_ptr<float>();
  const std::int64_t* row = rows.defined() ? rows.const_data_ptr<std::int64_t>() : nullptr;
  const kernels::RopeShape shape{cos32.numel() / half, heads, dim, 2 * half, rule.interleaved};
  at::parallel_for(0, x.size(0) * x.size(1), grain_rows(heads * dim), [&](std::int64_t begin, std::int64_t end) {
    kernels::rope(bits(x) + begin * heads * dim, cp, sp, row, begin, end - begin, shape, static_cast<float>(sign));
  });
  return x;
}

void rope(Tensor& q, Tensor& k, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign,
          const Tensor& positions) {
  if (row_kernels::take(q, k)) return row_kernels::rope(q, k, cos, sin, rule, sign, positions);
  for (Tensor* x : {&q, &k}) *x = rope(std::move(*x), cos, sin, rule, sign, positions);
}

Tensor activate(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return at::silu(x);
    case Activation::gelu:
      return at::gelu(x);
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::relu2:
      return at::relu(x).square();
    case Activation::relu:
      break;
  }
  return at::relu(x);
}

Tensor activate_backward(const Tensor& d_out, const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return at::silu_backward(d_out, x);
    case Activation::gelu:
      return at::gelu_backward(d_out, x);
    case Activation::gelu_tanh:
      return at::gelu_backward(d_out, x, "tanh");
    case Activation::relu2:
      return d_out * (at::relu(x) * 2);
    case Activation::relu:
      break;
  }
  return at::threshold_backward(d_out, x, 0);
}

Tensor gated(const Tensor& gate, const Tensor& up, Activation activation) {
  if (const auto by = gate_of(activation); by && row_kernels::take(gate, up)) return row_kernels::gated(*by, gate, up);
  if (activation != Activation::silu || !fused(gate, up)) return activate(gate, activation) * up;
  Tensor out = at::empty_like(gate);
  at::parallel_for(0, gate.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernels::swiglu(bits(gate) + begin, bits(up) + begin, bits(out) + begin, end - begin);
  });
  return out;
}

void gated_backward(Tensor& gate, Tensor& up, Tensor& d_out, Activation activation) {
  if (const auto by = gate_of(activation); by && row_kernels::take(gate, up, d_out))
    return row_kernels::gated_backward(*by, gate, up, d_out);
  if (activation != Activation::silu || !fused(gate, up, d_out)) {
    const Tensor active = activate(gate, activation);
    const Tensor out = active * up;
    gate = activate_backward(d_out * up, gate, activation);
    up = d_out * active;
    d_out = out;
    return;
  }
  at::parallel_for(0, gate.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_backward(bits(gate) + begin, bits(up) + begin, bits(d_out) + begin, end - begin);
  });
}

Tensor gated(const Tensor& gate, const Tensor& up, const ClampedGate& clamped) {
  const Tensor g = gate.clamp_max(clamped.limit);
  return (up.clamp(-clamped.limit, clamped.limit) + 1) * (g * at::sigmoid(g * clamped.sharpness));
}

void gated_backward(Tensor& gate, Tensor& up, Tensor& d_out, const ClampedGate& clamped) {
  const auto [sharpness, limit] = clamped;
  const Tensor out = gated(gate, up, clamped);
  const Tensor d = d_out.to(wide_type(d_out)), g = gate.to(d.scalar_type()).clamp_max(limit);
  const Tensor open = at::sigmoid(g * sharpness);
  const Tensor d_up = (d * g * open).mul_(up.abs().le(limit));
  const Tensor slope = (1 - open).mul_(g).mul_(sharpness).add_(1).mul_(open).mul_(gate.le(limit));
  gate = (up.clamp(-limit, limit).to(d.scalar_type()) + 1).mul_(slope).mul_(d).to(gate.scalar_type());
  up = d_up.to(up.scalar_type());
  d_out = out;
}

Tensor token_rows(const Tensor& hidden) {
  return hidden.detach().reshape({-1, hidden.size(-1)});
}

Tensor with_dropout(const Tensor& x, double p, bool training) {
  if (!training || p <= 0) return x;
  return std::get<0>(dropped(x, p));
}

void add_product(const Tensor& sum, const Tensor& a, const Tensor& b) {
  if (!sum.defined()) return;
  const std::int64_t m = a.size(1), n = b.size(1);
  std::int64_t tile = std::max<std::int64_t>(64, kTile / std::max<std::int64_t>(1, n));
  if (!a.is_cpu()) tile = (tile + 127) / 128 * 128;  // matrix products want each tile to begin at 16 bytes
  Tensor product = at::empty({std::min(tile, m), n}, b.options());
  for (std::int64_t row = 0; row < m; row += tile) {
    const std::int64_t count = std::min(tile, m - row);
    Tensor part = product.narrow(0, 0, count);
    matrix_product_into(part, a.narrow(1, row, count).t(), b);
    sum.narrow(0, row, count).add_(part);
  }
}

void add_rows(const Tensor& sum, const Tensor& a) {
  if (sum.defined()) sum.add_(a.sum(at::IntArrayRef{0}, false, wide_type(a)));
}

void add_rows_at(const Tensor& sum, const Tensor& ids, const Tensor& d) {
  if (!sum.defined()) return;
  if (row_kernels::take(d) && row_kernels::take_sum(sum)) return row_kernels::add_rows_at(sum, ids, d);
  if (!fused(d) || !row_kernels::take_sum(sum)) {
    sum.index_add_(0, ids, d.to(sum.scalar_type()));
    return;
  }
  const Tensor index = ids.contiguous();
  const std::int64_t* id = index.const_data_ptr<std::int64_t>();
  const std::int64_t tokens = d.size(0), n = d.size(1), vocab = sum.size(0);
  TORCH_CHECK_INDEX(std::all_of(id, id + tokens, [&](std::int64_t i) { return i >= 0 && i < vocab; }),
                    "a token is beyond the vocabulary of ", vocab);
  float* total = sum.mutable_data_ptr<float>();
  at::parallel_for(
      0, n, std::max<std::int64_t>(16, kGrain / std::max<std::int64_t>(1, tokens)),
      [&](std::int64_t begin, std::int64_t end) { kernels::add_rows_at(total, bits(d), id, tokens, n, begin, end); });
}

void cross_entropy(Tensor& logits, const Tensor& labels, Tensor losses, double scale, bool gradient) {
  if (row_kernels::take(logits)) return row_kernels::cross_entropy(logits, labels, losses, scale, gradient);
  const std::int64_t rows = logits.size(0), vocab = logits.size(1);
  if (fused(logits)) {
    const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
    TORCH_CHECK(std::all_of(label, label + rows, [&](std::int64_t l) { return l < vocab; }),
                "a label is beyond the vocabulary of ", vocab);
    double* loss = losses.mutable_data_ptr<double>();
    at::parallel_for(0, rows, grain_rows(vocab), [&](std::int64_t begin, std::int64_t end) {
      kernels::cross_entropy(bits(logits) + begin * vocab, label + begin, loss + begin, end - begin, vocab,
                             static_cast<float>(scale), gradient);
    });
    return;
  }
  const std::int64_t slice = std::max<std::int64_t>(1, kSoftmaxSlice / vocab);
  for (std::int64_t first = 0; first < rows; first += slice) {
    const std::int64_t count = std::min(slice, rows - first);
    Tensor part = logits.narrow(0, first, count);
    const Tensor label = labels.narrow(0, first, count).unsqueeze(1);
    const Tensor counts = label.ge(0);
    const Tensor index = label.clamp_min(0);
    const Tensor wide = part.to(wide_type(part));
    const Tensor norm = at::logsumexp(wide, at::IntArrayRef{1}, true);
    losses.narrow(0, first, count).copy_(((norm - wide.gather(1, index)) * counts).squeeze(1));
    if (!gradient) continue;
    Tensor d = at::exp(wide - norm);
    d.scatter_add_(1, index, at::full_like(norm, -1.0));
    part.copy_(d.mul_(counts).mul_(scale));
  }
}

}  // namespace tierflow::models
