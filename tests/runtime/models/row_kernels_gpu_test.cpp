// A GPU's row kernels give the bits of the CPU's. Skips without one.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "runtime/device/device_memory.h"
#include "runtime/models/embedding.h"
#include "runtime/models/ops.h"
#include "runtime/models/row_kernels.h"
#include "runtime/models/top_logits.h"
#include "swap/device.h"

namespace tierflow::testing {
namespace {

using models::Tensor;

struct Width {
  std::int64_t n;
};
void PrintTo(const Width& width, std::ostream* out) {
  *out << width.n;
}

// Of rows that are whole packs of sixteen bytes, and that are not.
class RowKernelsOnGpu : public ::testing::TestWithParam<Width> {
 protected:
  void SetUp() override {
    if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
    DeviceMemory::cuda();  // loads torch's library
    torch::manual_seed(7);
    ASSERT_TRUE(models::row_kernels::are_on(torch::kCUDA)) << "this build has no kernels for the card that is here";
  }
  static std::int64_t n() { return GetParam().n; }
  static Tensor random(at::IntArrayRef shape, double scale = 1.0) {
    return (torch::randn(shape) * scale).to(torch::kBFloat16);
  }
  static Tensor there(const Tensor& x) { return x.to(torch::kCUDA); }
};

void expect_same_bits(const Tensor& here, const Tensor& there, const char* what) {
  ASSERT_TRUE(there.is_cuda()) << what;
  const Tensor back = there.cpu();
  ASSERT_EQ(here.sizes(), back.sizes()) << what;
  EXPECT_TRUE(torch::equal(here.contiguous().view(torch::kByte), back.contiguous().view(torch::kByte))) << what;
}

TEST_P(RowKernelsOnGpu, RmsNorm) {
  for (const NormKind kind : {NormKind::rms, NormKind::rms_wide, NormKind::rms_plus_one})
    for (const bool with_residual : {true, false}) {
      const std::int64_t rows = 67;
      const Tensor x = random({rows, n()}), w = random({n()}), d = random({rows, n()}),
                   residual = with_residual ? random({rows, n()}) : Tensor();
      Tensor rstd, rstd_there;
      const Tensor out = models::rms_norm(x, w, 1e-5, kind, &rstd);
      expect_same_bits(out, models::rms_norm(there(x), there(w), 1e-5, kind, &rstd_there), "out");
      expect_same_bits(rstd, rstd_there, "rstd");
      Tensor sum_here = residual.defined() ? residual.clone() : d.clone(), its_there = there(sum_here);
      expect_same_bits(models::rms_norm_of_sum(x, sum_here, w, 1e-5, kind),
                       models::rms_norm_of_sum(there(x), its_there, there(w), 1e-5, kind), "out of a sum");
      expect_same_bits(sum_here, its_there, "x + added");
      const Tensor sum = torch::randn({n()}), sum_there = there(sum);
      const Tensor d_x = models::rms_norm_backward(d, x, rstd, w, sum, kind, residual);
      expect_same_bits(d_x,
                       models::rms_norm_backward(there(d), there(x), rstd_there, there(w), sum_there, kind,
                                                 with_residual ? there(residual) : Tensor()),
                       "d_x");
      // Blocks of rows are the CPU's where it needs no more of them.
      if (n() >= 2048)
        expect_same_bits(sum, sum_there, "d_w");
      else
        EXPECT_TRUE(torch::allclose(sum, sum_there.cpu(), 1e-5, 1e-5));
    }
}

TEST_P(RowKernelsOnGpu, Rope) {
  const std::int64_t half = std::min<std::int64_t>(n(), 64);
  for (const std::int64_t dim : {2 * half, 2 * half + 8})
    for (const bool interleaved : {false, true})
      for (const bool rounded : {false, true}) {
        const Tensor x = random({2, 9, 3, dim}), cos = torch::randn({9, half}), sin = torch::randn({9, half});
        const Tensor positions = torch::stack({torch::arange(9).remainder(4), torch::arange(8, -1, -1)});
        for (const Tensor& of : {Tensor(), positions})
          expect_same_bits(models::rope(x.clone(), cos, sin, {interleaved, rounded}, -1.0, of),
                           models::rope(there(x), there(cos), there(sin), {interleaved, rounded}, -1.0,
                                        of.defined() ? there(of) : of),
                           "rope");
        Tensor q = x.clone(), k = random({2, 9, 2, dim}), q_there = there(q), k_there = there(k);
        models::rope(q, k, cos, sin, {interleaved, rounded}, 1.0, positions);
        models::rope(q_there, k_there, there(cos), there(sin), {interleaved, rounded}, 1.0, there(positions));
        expect_same_bits(q, q_there, "q");
        expect_same_bits(k, k_there, "k");
      }
}

TEST_P(RowKernelsOnGpu, Swiglu) {
  Tensor gate = random({33, n()}, 4), up = random({33, n()}), d = random({33, n()});
  Tensor gate_there = there(gate), up_there = there(up), d_there = there(d);
  expect_same_bits(models::gated(gate, up, Activation::silu), models::gated(gate_there, up_there, Activation::silu),
                   "out");
  models::gated_backward(gate, up, d, Activation::silu);
  models::gated_backward(gate_there, up_there, d_there, Activation::silu);
  expect_same_bits(gate, gate_there, "d_gate");
  expect_same_bits(up, up_there, "d_up");
  expect_same_bits(d, d_there, "out again");
}

// The CPU's are torch's operations: gelu may lie on the other side of a rounding.
TEST_P(RowKernelsOnGpu, Geglu) {
  Tensor gate = random({33, n()}, 4), up = random({33, n()}), d = random({33, n()});
  Tensor gate_there = there(gate), up_there = there(up), d_there = there(d);
  const auto expect_near = [](const Tensor& here, const Tensor& of_card, const char* what) {
    EXPECT_TRUE(torch::allclose(of_card.cpu().to(torch::kFloat), here.to(torch::kFloat), 0x1p-6, 1e-6)) << what;
  };
  expect_near(models::gated(gate, up, Activation::gelu_tanh),
              models::gated(gate_there, up_there, Activation::gelu_tanh), "out");
  models::gated_backward(gate, up, d, Activation::gelu_tanh);
  models::gated_backward(gate_there, up_there, d_there, Activation::gelu_tanh);
  expect_near(gate, gate_there, "d_gate");
  expect_near(up, up_there, "d_up");
  expect_near(d, d_there, "out again");
}

// Logarithms and exponentials in double are those of the device's library: the losses, and the label's gradient, within
// its last place.
TEST_P(RowKernelsOnGpu, Losses) {
  const std::int64_t rows = 19;
  const Tensor logits = random({rows, n()}, 5);
  Tensor labels = torch::randint(n(), {rows}, torch::kLong);
  labels[2] = -100;
  const Tensor at_label = labels.clamp_min(0).unsqueeze(1);
  const auto expect_gradient = [&](const Tensor& here, const Tensor& of_card, const char* what) {
    const Tensor back = of_card.cpu();
    EXPECT_TRUE(torch::allclose(here.gather(1, at_label).to(torch::kFloat), back.gather(1, at_label).to(torch::kFloat),
                                0x1p-7, 0))
        << what;
    expect_same_bits(here.scatter(1, at_label, 0), of_card.scatter(1, there(at_label), 0), what);
  };
  for (const bool gradient : {false, true}) {
    Tensor here = logits.clone(), of_card = there(logits);
    const Tensor losses = torch::empty({rows}, torch::kDouble), losses_there = there(losses);
    models::cross_entropy(here, labels, losses, 0.37, gradient);
    models::cross_entropy(of_card, there(labels), losses_there, 0.37, gradient);
    EXPECT_TRUE(torch::allclose(losses, losses_there.cpu(), 1e-14, 1e-14));
    expect_gradient(here, of_card, "cross_entropy");
  }
  const Tensor sums = models::no_softmax_sums(rows, torch::kCPU), sums_there = there(sums);
  for (std::int64_t first : {std::int64_t{0}, n()}) {
    models::softmax_sums(logits + static_cast<double>(first > 0), labels, first, sums);
    models::softmax_sums(there(logits + static_cast<double>(first > 0)), there(labels), first, sums_there);
  }
  EXPECT_TRUE(torch::allclose(sums, sums_there.cpu(), 1e-14, 1e-14));
  EXPECT_TRUE(torch::equal(sums.select(1, 3), sums_there.cpu().select(1, 3)));
  Tensor here = logits.clone(), of_card = there(logits);
  const Tensor factors = models::softmax_factors(sums, labels, 0.37);
  EXPECT_TRUE(torch::allclose(factors, models::softmax_factors(sums_there, there(labels), 0.37).cpu(), 1e-14, 1e-14));
  models::softmax_gradient(here, labels, 0, factors);
  models::softmax_gradient(of_card, there(labels), 0, there(factors));
  expect_gradient(here, of_card, "softmax_gradient");
}

TEST_P(RowKernelsOnGpu, TopLogits) {
  const models::TopLogits top = models::no_top_logits(5, 7, torch::kCPU),
                          top_there = models::no_top_logits(5, 7, torch::kCUDA);
  for (const std::int64_t first : {std::int64_t{0}, n()}) {
    const Tensor logits = random({5, n()});
    models::top_logits(logits, first, top);
    models::top_logits(there(logits), first, top_there);
  }
  expect_same_bits(top.values, top_there.values, "values");
  expect_same_bits(top.ids, top_there.ids, "ids");
}

// Without atomics, so in the order of the tokens; tokens of other tiles are left out.
TEST_P(RowKernelsOnGpu, RowsAddAtTheirTokens) {
  const Tensor d = random({300, n()}), ids = torch::randint(9, {300}, torch::kLong);
  const Tensor sum = torch::randn({9, n()}), sum_there = there(sum), tile = torch::randn({4, n()}),
               tile_there = there(tile);
  models::add_rows_at(sum, ids, d);
  models::add_rows_at(sum_there, there(ids), there(d));
  expect_same_bits(sum, sum_there, "sum");
  models::add_rows_within(tile, ids - 3, d);
  models::add_rows_within(tile_there, there(ids - 3), there(d));
  expect_same_bits(tile, tile_there, "tile");
}

INSTANTIATE_TEST_SUITE_P(models, RowKernelsOnGpu,
                         ::testing::Values(Width{1}, Width{31}, Width{64}, Width{100}, Width{4096}, Width{9003}));

}  // namespace
}  // namespace tierflow::testing
