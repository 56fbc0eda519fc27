// Products of bf16 in fp32 tiles, which CPUs without a bf16 product of torch's take; here on every CPU.
#include "runtime/models/products.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace tierflow::testing {
namespace {

using at::Tensor;

Tensor some(at::IntArrayRef shape) {
  return torch::randn(shape).to(torch::kBFloat16);
}

// Rounded once: half a unit of bf16's eight bits, and what fp32 sums lose.
void expect_rounded_once(const Tensor& found, const Tensor& exact, double of_sum) {
  EXPECT_EQ(found.scalar_type(), torch::kBFloat16);
  const Tensor most = exact.abs() / 256 + of_sum;
  EXPECT_TRUE((found.to(torch::kDouble) - exact).abs().le(most).all().item<bool>());
}

struct Shape {
  std::int64_t m, k, n;
};

class Products : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { torch::manual_seed(1); }
  const std::int64_t m = GetParam().m, k = GetParam().k, n = GetParam().n;
  const double of_sum = 1e-6 * static_cast<double>(k);
};

TEST_P(Products, AreRoundedOnce) {
  const Tensor a = some({m, k}), b = some({k, n}), bias = some({n}), before = some({m, n});
  const Tensor exact = torch::mm(a.to(torch::kDouble), b.to(torch::kDouble));
  const Tensor across = a.t().contiguous().t(), right = b.t().contiguous().t();
  for (const Tensor& left : {a, across})
    for (const Tensor& with : {b, right}) {
      Tensor out = torch::full({m, n}, NAN, torch::kBFloat16);
      models::product_in_tiles(out, left, with, false, {});
      expect_rounded_once(out, exact, of_sum);
      models::product_in_tiles(out, left, with, false, bias);
      expect_rounded_once(out, exact + bias.to(torch::kDouble), of_sum);
      out.copy_(before);
      models::product_in_tiles(out, left, with, true, {});
      expect_rounded_once(out, exact + before.to(torch::kDouble), of_sum);
    }
}

// Wherever operands and result lie, and into rows and columns of something wider.
TEST_P(Products, HaveTheSameBitsAnywhere) {
  const Tensor a = some({m, k}), b = some({k, n});
  Tensor first = torch::empty({m, n}, torch::kBFloat16);
  models::product_in_tiles(first, a, b, false, {});
  for (const std::int64_t offset : {1, 3}) {
    const Tensor moved_a =
                     torch::empty({m * k + offset}, torch::kBFloat16).narrow(0, offset, m * k).view({m, k}).copy_(a),
                 moved_b = torch::empty({k, n + offset}, torch::kBFloat16).narrow(1, offset, n).copy_(b);
    const Tensor wide = torch::zeros({m, n + 2 * offset}, torch::kBFloat16), out = wide.narrow(1, offset, n);
    models::product_in_tiles(out, moved_a, moved_b, false, {});
    EXPECT_TRUE(torch::equal(out, first));
    EXPECT_EQ(wide.narrow(1, 0, offset).abs().sum().item<double>() +
                  wide.narrow(1, n + offset, offset).abs().sum().item<double>(),
              0);
  }
}

TEST_P(Products, AreDifferentiable) {
  for (const bool biased : {false, true}) {
    std::vector<Tensor> leaves{some({m, 1, k}), some({n, k}), some({n})}, exact;
    for (Tensor& leaf : leaves) {
      exact.push_back(leaf.to(torch::kDouble).requires_grad_());
      leaf.requires_grad_();
    }
    const Tensor d = some({m, 1, n});
    const Tensor out = models::linear_map_in_tiles(leaves[0], leaves[1], biased ? leaves[2] : Tensor()),
                 wanted = torch::linear(exact[0], exact[1], biased ? exact[2] : Tensor());
    EXPECT_EQ(out.sizes(), wanted.sizes());
    expect_rounded_once(out.detach(), wanted.detach(), of_sum);
    out.backward(d);
    wanted.backward(d.to(torch::kDouble));
    expect_rounded_once(leaves[0].grad(), exact[0].grad(), 1e-6 * static_cast<double>(n));
    expect_rounded_once(leaves[1].grad(), exact[1].grad(), 1e-6 * static_cast<double>(m));
    ASSERT_EQ(leaves[2].grad().defined(), biased);
    if (biased) expect_rounded_once(leaves[2].grad(), exact[2].grad(), 0.05 * std::sqrt(static_cast<double>(m)));
  }
}

// One element; odd sizes; more columns and rows than a tile has; an operand of which a tile holds few rows; a low rank.
INSTANTIATE_TEST_SUITE_P(Shapes, Products,
                         ::testing::Values(Shape{1, 1, 1}, Shape{7, 33, 5}, Shape{1100, 24, 2100}, Shape{90, 30000, 75},
                                           Shape{5000, 4, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.m) + "x" + std::to_string(info.param.k) + "x" +
                                  std::to_string(info.param.n);
                         });

// Without a bf16 product torch takes over 100 times as long.
TEST(Speed, Bf16IsNotAnOrderSlowerThanFp32) {
  const auto seconds = [](torch::ScalarType type) {
    const Tensor a = torch::randn({512, 512}).to(type), b = torch::randn({512, 512}).to(type);
    double best = 1e9;
    for (int i = 0; i < 10; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      models::matrix_product(a, b);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
  };
  EXPECT_LT(seconds(torch::kBFloat16), 10 * seconds(torch::kFloat));
}

}  // namespace
}  // namespace tierflow::testing
