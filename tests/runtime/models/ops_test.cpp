// The fused CPU operations in bf16 against their formulas in fp64.
#include "runtime/models/ops.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/loss.h>

#include <array>

#include "runtime/models/attention.h"
#include "runtime/models/attention_kernels.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using models::Tensor;

Tensor random(at::IntArrayRef shape, double scale = 1.0) {
  return (torch::randn(shape) * scale).to(torch::kBFloat16);
}
Tensor leaf(const Tensor& x) {
  return x.to(torch::kDouble).requires_grad_();
}

// Within one rounding to bf16 of each element, and a little for cancellation.
void expect_rounded(const Tensor& got, const Tensor& exact, double roundings = 1.0) {
  const Tensor g = got.to(torch::kDouble), e = exact.detach();
  const Tensor allowed = e.abs() * (roundings * 0x1p-8) + 1e-3 * e.abs().max();
  EXPECT_TRUE(((g - e).abs() <= allowed).all().item<bool>()) << "by " << (g - e).abs().max().item<double>();
}

class Widths : public ::testing::TestWithParam<std::int64_t> {
 protected:
  Widths() { torch::manual_seed(3); }
};

TEST_P(Widths, rms_norm) {
  const std::int64_t n = GetParam();
  for (const NormKind kind : {NormKind::rms, NormKind::rms_wide, NormKind::rms_plus_one}) {
    const Tensor x = random({5, 7, n}), w = random({n}), d = random({5, 7, n}), residual = random({5, 7, n});
    Tensor rstd;
    const Tensor out = models::rms_norm(x, w, 1e-5, kind, &rstd);
    const Tensor x64 = leaf(x), w64 = leaf(w);
    const Tensor exact = models::rms_norm(x64, w64, 1e-5, kind);
    expect_rounded(out, exact, kind == NormKind::rms ? 2.0 : 1.0);
    exact.backward(d.to(torch::kDouble));
    Tensor sum = torch::ones({n});
    const Tensor d_x = models::rms_norm_backward(d, x, rstd, w, sum, kind, residual);
    expect_rounded(d_x, x64.grad() + residual.to(torch::kDouble));
    EXPECT_LT(relative_error(sum - 1, w64.grad()), 4e-3);
    expect_rounded(models::rms_norm_backward(d, x, rstd, w, {}, kind), x64.grad());
    // Of a sum, which takes the place of what is added: as one operation after the other. With autograd it takes none.
    Tensor added = residual.clone();
    const Tensor sum_of_both = x + residual;
    const void* const place = added.data_ptr();
    EXPECT_TRUE(
        torch::equal(models::rms_norm_of_sum(x, added, w, 1e-5, kind), models::rms_norm(sum_of_both, w, 1e-5, kind)));
    EXPECT_TRUE(torch::equal(added, sum_of_both));
    EXPECT_EQ(added.data_ptr(), place);
    const Tensor kept = residual.clone().requires_grad_();
    added = kept;
    models::rms_norm_of_sum(x, added, w, 1e-5, kind).sum().backward();
    EXPECT_TRUE(torch::equal(added.detach(), sum_of_both));
    EXPECT_TRUE(torch::equal(kept.detach(), residual));
    EXPECT_TRUE(kept.grad().defined());
  }
}

TEST_P(Widths, gated) {
  const std::int64_t n = GetParam();
  for (const Activation activation :
       {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::relu2}) {
    Tensor gate = random({3, n}, 4.0), up = random({3, n}), d = random({3, n});
    const Tensor gate64 = leaf(gate), up64 = leaf(up);
    const Tensor exact = models::gated(gate64, up64, activation);
    const double roundings = activation == Activation::silu ? 1.0 : 3.0;  // in one kernel, or of each operation
    expect_rounded(models::gated(gate, up, activation), exact, roundings);
    exact.backward(d.to(torch::kDouble));
    expect_rounded(models::activate_backward(d, up, activation),
                   torch::autograd::grad({models::activate(up64, activation)}, {up64}, {d.to(torch::kDouble)})[0], 3.0);
    models::gated_backward(gate, up, d, activation);
    expect_rounded(gate, gate64.grad(), roundings);
    expect_rounded(up, up64.grad(), roundings);
    expect_rounded(d, exact, roundings);
  }
}

// All dimensions of a head rotate, or the first ones; pairs of halves, or of neighbours.
TEST_P(Widths, rope) {
  const std::int64_t rotated = 2 * GetParam();
  for (const std::int64_t dim : {rotated, rotated + 6}) {
    for (const bool interleaved : {false, true}) {
      const Tensor x = random({2, 9, 3, dim}), d = random({2, 9, 3, dim});
      const Tensor angle = torch::rand({9, rotated / 2}) * 6;
      const Tensor cos = angle.cos().to(torch::kBFloat16).to(torch::kFloat),
                   sin = angle.sin().to(torch::kBFloat16).to(torch::kFloat);
      const Tensor x64 = leaf(x);
      const Tensor exact = models::rope(x64, cos, sin, {interleaved});
      EXPECT_TRUE(torch::equal(exact.narrow(3, rotated, dim - rotated), x64.narrow(3, rotated, dim - rotated)));
      exact.backward(d.to(torch::kDouble));
      expect_rounded(models::rope(x.clone(), cos, sin, {interleaved}), exact);
      expect_rounded(models::rope(d.clone(), cos, sin, {interleaved}, -1.0), x64.grad());
      // Tables that are not rounded to the model's type.
      const Tensor fine_cos = angle.cos(), fine_sin = angle.sin();
      const Tensor exact_fine = models::rope(x64.detach(), fine_cos, fine_sin, {interleaved, false});
      expect_rounded(models::rope(x.clone(), fine_cos, fine_sin, {interleaved, false}), exact_fine);
      // Two tensors at once.
      Tensor both[] = {x.clone(), d.narrow(2, 0, 2).clone()};
      models::rope(both[0], both[1], cos, sin, {interleaved}, -1.0, {});
      EXPECT_TRUE(torch::equal(both[0], models::rope(x.clone(), cos, sin, {interleaved}, -1.0)));
      EXPECT_TRUE(torch::equal(both[1], models::rope(d.narrow(2, 0, 2).clone(), cos, sin, {interleaved}, -1.0)));
      // Positions choose rows of the tables, as tables of each row of x do.
      const Tensor positions = torch::stack({torch::arange(9).remainder(4), torch::arange(8, -1, -1)});
      for (const Tensor& of : {x, leaf(x)}) {
        const auto one = [&](std::int64_t row) {
          const Tensor at = positions[row];
          return models::rope(of.detach().narrow(0, row, 1).clone(), cos.index_select(0, at), sin.index_select(0, at),
                              {interleaved});
        };
        const Tensor rows = torch::cat({one(0), one(1)});
        const Tensor every_cos = torch::embedding(cos, positions), every_sin = torch::embedding(sin, positions);
        EXPECT_TRUE(torch::equal(models::rope(of.detach().clone(), cos, sin, {interleaved}, 1.0, positions), rows));
        EXPECT_TRUE(torch::equal(models::rope(of.detach().clone(), every_cos, every_sin, {interleaved}), rows));
      }
    }
  }
}

TEST_P(Widths, cross_entropy) {
  const std::int64_t vocab = GetParam();
  Tensor logits = random({6, vocab}, 5.0);
  Tensor labels = torch::randint(vocab, {6}, torch::kLong);
  labels[2] = -100;
  const Tensor logits64 = leaf(logits);
  const Tensor exact = torch::nn::functional::cross_entropy(
      logits64, labels, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kNone));
  Tensor losses = torch::empty({6}, torch::kDouble);
  models::cross_entropy(logits, labels, losses, 0.5, false);
  EXPECT_TRUE(torch::allclose(losses, exact, 1e-6, 1e-6)) << (losses - exact).abs().max();
  EXPECT_TRUE(torch::equal(logits.to(torch::kDouble), logits64)) << "evaluation leaves the logits";
  (exact.sum() * 0.5).backward();
  models::cross_entropy(logits, labels, losses, 0.5, true);
  EXPECT_TRUE(torch::allclose(losses, exact, 1e-6, 1e-6));
  EXPECT_TRUE(torch::allclose(logits.to(torch::kDouble), logits64.grad(), 0x1p-8, 1e-6));
  EXPECT_TRUE((logits[2] == 0).all().item<bool>());
  // The expression that runs where the kernel does not.
  Tensor wide = logits64.detach().clone(), wide_losses = torch::empty({6}, torch::kDouble);
  models::cross_entropy(wide, labels, wide_losses, 0.5, true);
  EXPECT_TRUE(torch::allclose(wide, logits64.grad()));
}

INSTANTIATE_TEST_SUITE_P(models, Widths, ::testing::Values(1, 8, 31, 64, 100, 5000));

TEST(Ops, non_finite_values_stay) {
  Tensor logits = random({2, 64});
  logits[0][3] = NAN;
  logits[1][3] = INFINITY;
  Tensor losses = torch::empty({2}, torch::kDouble);
  models::cross_entropy(logits, torch::tensor({1, 2}), losses, 1.0, true);
  EXPECT_FALSE(std::isfinite(losses[0].item<double>()));
  EXPECT_FALSE(std::isfinite(losses[1].item<double>()));
  Tensor x = random({1, 64}), w = random({64});
  x[0][5] = NAN;
  EXPECT_TRUE(models::rms_norm(x, w, 1e-5).isnan().all().item<bool>());
  EXPECT_TRUE(models::gated(x, w.unsqueeze(0).contiguous(), Activation::silu)[0][5].isnan().item<bool>());
}

TEST(Ops, a_label_beyond_the_vocabulary_is_an_error) {
  Tensor logits = random({2, 8}), losses = torch::empty({2}, torch::kDouble);
  EXPECT_ANY_THROW(models::cross_entropy(logits, torch::tensor({1, 8}), losses, 1.0, true));
}

TEST(Ops, layer_norms_sum_in_fp32) {
  const std::int64_t n = 96;
  const Tensor x = random({64, 64, n}, 3.0) + 1, w = random({n}), d = random({64, 64, n});
  for (const Tensor& bias : {random({n}), Tensor()}) {
    Tensor mean, rstd;
    const Tensor out = models::layer_norm(x, w, bias, 1e-5, &mean, &rstd);
    EXPECT_TRUE(torch::equal(out, models::layer_norm(x, w, bias, 1e-5)));
    const Tensor x64 = leaf(x), w64 = leaf(w), b64 = leaf(bias.defined() ? bias : torch::zeros({n}));
    const Tensor exact = torch::layer_norm(x64, {n}, w64, b64, 1e-5);
    expect_rounded(out, exact);
    exact.backward(d.to(torch::kDouble));
    // Rows that do not lie together take ATen's operations.
    for (const Tensor& gradient : {d, d.transpose(0, 1).contiguous().transpose(0, 1)}) {
      Tensor sum = torch::ones({n}), bias_sum = bias.defined() ? torch::ones({n}) : Tensor();
      const Tensor d_x = models::layer_norm_backward(gradient, x, mean, rstd, w, bias, sum, bias_sum);
      EXPECT_LT(relative_error(d_x, x64.grad()), 2e-3);
      EXPECT_LT(relative_error(sum - 1, w64.grad()), 1e-5);
      if (bias.defined()) {
        EXPECT_LT(relative_error(bias_sum - 1, b64.grad()), 1e-5);
      }
      EXPECT_TRUE(torch::equal(d_x, models::layer_norm_backward(gradient, x, mean, rstd, w, bias, {}, {})));
    }
  }
}

TEST(Ops, products_add_into_fp32) {
  const Tensor a = random({50, 70}), b = random({50, 30});
  Tensor sum = torch::full({70, 30}, 2.0);
  models::add_product(sum, a, b);
  const Tensor exact = a.to(torch::kDouble).t().mm(b.to(torch::kDouble));
  EXPECT_LT(relative_error(sum - 2, exact), 4e-3);
  Tensor rows = torch::zeros({70});
  models::add_rows(rows, a);
  EXPECT_LT(relative_error(rows, a.to(torch::kDouble).sum(0)), 1e-6);
}

TEST(Ops, rows_add_at_their_tokens) {
  const Tensor d = random({40, 33}), ids = torch::randint(5, {40}, torch::kLong);
  const Tensor sum = torch::ones({5, 33}), exact = torch::ones({5, 33}, torch::kDouble);
  models::add_rows_at(sum, ids, d);
  models::add_rows_at(exact, ids, d);
  EXPECT_LT(relative_error(sum, exact), 1e-6);
  EXPECT_ANY_THROW(models::add_rows_at(sum, ids + 1, d));
}

// As processors that do not multiply bf16 have it; here on every one.
TEST(Attention, multiplies_pairs_in_fp32) {
  torch::manual_seed(5);
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{64, 128, 80}, {5, 24, 128}, {1, 2, 2}, {63, 66, 64}}) {
    SCOPED_TRACE(::testing::Message() << m << " x " << k << " x " << n);
    const Tensor wider = random({m, k + 3}), a = wider.narrow(1, 0, k), b = random({k, n});
    const Tensor pairs = b.view({k / 2, 2, n}).transpose(1, 2).contiguous();
    const Tensor before = torch::randn({m, n}), exact = torch::mm(leaf(a), leaf(b)).detach();
    for (const bool add : {false, true}) {
      const Tensor c = add ? before.clone() : torch::full({m, n}, NAN);
      models::kernels::multiply_pairs(m, n, k, static_cast<const std::uint16_t*>(a.const_data_ptr()), a.stride(0),
                                      static_cast<const std::uint16_t*>(pairs.const_data_ptr()),
                                      c.mutable_data_ptr<float>(), add);
      const Tensor wanted = add ? exact + before : exact;
      EXPECT_LT((c - wanted).abs().max().item<double>(), 1e-5 * static_cast<double>(k));
    }
  }
}

// bf16 on the CPU, and torch's attention in fp64, against the textbook.
TEST(Attention, is_the_textbooks_and_repeats) {
  struct Shape {
    std::int64_t batch, length, heads, kv_heads, dim, window;
    bool sinks = false;
  };
  torch::manual_seed(4);
  for (const Shape& s :
       {Shape{2, 70, 4, 4, 16, 0}, Shape{2, 70, 4, 2, 16, 9}, Shape{1, 300, 6, 1, 64, 0}, Shape{1, 300, 2, 2, 64, 100},
        Shape{3, 1, 2, 1, 8, 0}, Shape{1, 257, 3, 3, 80, 300}, Shape{2, 129, 4, 2, 128, 1}, Shape{1, 64, 2, 2, 2, 64},
        Shape{2, 70, 4, 2, 16, 0, true}, Shape{2, 300, 4, 1, 64, 100, true}, Shape{1, 130, 2, 2, 24, 130, true},
        Shape{3, 1, 4, 2, 8, 0, true}}) {
    SCOPED_TRACE(::testing::Message() << "length " << s.length << " dim " << s.dim << " window " << s.window
                                      << (s.sinks ? " sinks" : ""));
    const Tensor of_heads = random({s.heads}, 3.0);
    const Tensor qkv = random({s.batch, s.length, s.heads + 2 * s.kv_heads, s.dim});
    const Tensor d = random({s.batch, s.length, s.heads, s.dim});
    const Tensor distance = torch::arange(s.length).unsqueeze(1) - torch::arange(s.length);
    const Tensor allowed = distance.ge(0).logical_and(distance.lt(s.window > 0 ? s.window : s.length));
    const auto textbook = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& sinks) {
      const std::int64_t group = s.heads / s.kv_heads;
      const Tensor keys = k.repeat_interleave(group, 2).transpose(1, 2),
                   values = v.repeat_interleave(group, 2).transpose(1, 2);
      const Tensor scores = q.transpose(1, 2).matmul(keys.transpose(2, 3)) / std::sqrt(static_cast<double>(s.dim));
      Tensor all = scores.masked_fill(~allowed, -INFINITY);
      if (s.sinks) all = torch::cat({all, sinks.view({1, -1, 1, 1}).expand({s.batch, -1, s.length, 1})}, -1);
      return all.softmax(-1).narrow(-1, 0, s.length).matmul(values).transpose(1, 2);
    };
    // Heads as slices of one tensor: rows are not dense.
    const auto run = [&](torch::ScalarType type, bool book) {
      const Tensor all = qkv.to(type).clone().requires_grad_();
      const Tensor q = all.narrow(2, 0, s.heads), k = all.narrow(2, s.heads, s.kv_heads),
                   v = all.narrow(2, s.heads + s.kv_heads, s.kv_heads);
      const Tensor sinks = s.sinks ? of_heads.to(type).clone().requires_grad_() : Tensor();
      const Tensor out =
          book ? textbook(q, k, v, sinks) : models::attention(q, k, v, {.window = s.window, .sinks = sinks}, 0.0);
      out.backward(d.to(type));
      const auto part = [&](std::int64_t first, std::int64_t count) { return all.grad().narrow(2, first, count); };
      return std::vector<Tensor>{out.detach(), part(0, s.heads), part(s.heads, s.kv_heads),
                                 part(s.heads + s.kv_heads, s.kv_heads),
                                 s.sinks ? sinks.grad() : torch::zeros({1}, type)};
    };
    const auto exact = run(torch::kDouble, true), torchs = run(torch::kDouble, false);
    const auto once = run(torch::kBFloat16, false), again = run(torch::kBFloat16, false);
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    const auto alone = run(torch::kBFloat16, false);
    at::set_num_threads(threads);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_TRUE(torch::equal(once[i], again[i]));
      EXPECT_TRUE(torch::equal(once[i], alone[i]));
      // A single visible key leaves q and k without a gradient but for rounding.
      if (exact[i].norm().item<double>() < 1e-9) {
        EXPECT_LT(once[i].norm().item<double>(), 0.05 * std::sqrt(static_cast<double>(once[i].numel())));
        continue;
      }
      EXPECT_LT(relative_error(torchs[i], exact[i]), 1e-10);
      EXPECT_LT(relative_error(once[i], exact[i]), 8e-3);
    }
  }
}

TEST(Attention, a_bad_value_reaches_every_query_after_it) {
  Tensor q = random({1, 200, 2, 64}), k = random({1, 200, 2, 64}), v = random({1, 200, 2, 64});
  k[0][150][0][3] = NAN;
  const Tensor out = models::attention(q, k, v, {}, 0.0);
  EXPECT_TRUE(out[0].narrow(0, 150, 50).select(1, 0).isnan().all().item<bool>());
  EXPECT_FALSE(out[0].narrow(0, 0, 150).isnan().any().item<bool>());
  EXPECT_FALSE(out[0].select(1, 1).isnan().any().item<bool>());
}

}  // namespace
}  // namespace tierflow::testing
