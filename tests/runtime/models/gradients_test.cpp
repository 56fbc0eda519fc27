// Sums that stand for zeros, and the products that come first.
#include "runtime/models/gradients.h"

#include <cmath>
#include <set>

#include "runtime/models/ops.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

Tensor poison(at::IntArrayRef shape, torch::ScalarType type = torch::kFloat) {
  return torch::full(shape, NAN, type);
}

// The rule of CUDA with what the CPU has: a product whose result is wide, without a rounding before it is added.
struct WideProducts {
  int first = 0, later = 0;
  std::int64_t elements_first = 0;
  ProductRule rule() {
    return [this](const Tensor& sum, const Tensor& a, const Tensor& b, Order order) {
      const Tensor product = torch::mm(a.t().to(sum.scalar_type()), b.to(sum.scalar_type()));
      Tensor into = sum;
      if (order == Order::first) {
        ++first;
        elements_first += sum.numel();
        into.copy_(product);
      } else {
        ++later;
        into.add_(product);
      }
    };
  }
};

TEST(FreshSums, a_first_product_overwrites_and_later_ones_add) {
  torch::manual_seed(2);
  const Tensor a = torch::randn({20, 6}).to(torch::kBFloat16), b = torch::randn({20, 5}).to(torch::kBFloat16);
  const Tensor exact = torch::mm(a.t().to(torch::kFloat), b.to(torch::kFloat));
  WideProducts products;
  const Gradients sums({poison({6, 5}), poison({6, 5}), poison({3})}, {true, false, true}, products.rule());
  sums.add_product(0, a, b);
  EXPECT_TRUE(torch::equal(sums[0], exact)) << "not rounded to bf16";
  sums.add_product(0, a, b);
  EXPECT_TRUE(torch::equal(sums[0], exact + exact));
  EXPECT_EQ(products.first, 1);
  EXPECT_EQ(products.later, 1);
  sums.add_product(1, a, b);
  EXPECT_TRUE(sums[1].isnan().all().item<bool>()) << "it held values: they stay in the sum";
  sums.add_product(-1, a, b);
  sums.zero_untouched();
  EXPECT_TRUE(torch::equal(sums[0], exact + exact)) << "zeroed once";
  EXPECT_TRUE(torch::equal(sums[2], torch::zeros({3}))) << "nobody touched it";
}

TEST(FreshSums, whoever_looks_finds_zeros_and_later_products_add) {
  const Tensor a = torch::ones({2, 3}), b = torch::ones({2, 4});
  WideProducts products;
  Gradients sums({poison({3, 4}), poison({4}), poison({2}), Tensor()}, {true, true, true, true}, products.rule());
  EXPECT_TRUE(sums.wants(1));
  EXPECT_FALSE(sums.wants(3));
  EXPECT_FALSE(sums.wants(-1));
  EXPECT_TRUE(torch::equal(at_position(sums, 1), torch::zeros({4})));
  sums[1].add_(1);
  EXPECT_TRUE(torch::equal(sums[1], torch::ones({4}))) << "zeros are written once";
  sums.add_product(sums[0].narrow(0, 0, 3), a, b);  // a part of it: what else lies there is 0
  EXPECT_EQ(products.first, 0);
  EXPECT_TRUE(torch::equal(sums[0], torch::full({3, 4}, 2.0)));
  sums.set(2, torch::full({2}, 5.0));
  EXPECT_TRUE(torch::equal(sums.tensors()[2], torch::full({2}, 5.0))) << "what was put there holds values";
}

TEST(FreshSums, without_a_rule_products_are_rounded) {
  torch::manual_seed(2);
  const Tensor a = torch::randn({20, 6}).to(torch::kBFloat16), b = torch::randn({20, 5}).to(torch::kBFloat16);
  const Tensor expected = torch::zeros({6, 5});
  models::add_product(expected, a, b);
  const Gradients held{torch::zeros({6, 5})}, fresh({poison({6, 5})}, {true}, {});
  held.add_product(0, a, b);
  fresh.add_product(0, a, b);
  EXPECT_TRUE(torch::equal(held[0], expected));
  EXPECT_TRUE(torch::equal(fresh[0], expected));
  EXPECT_FALSE(products_overwrite(torch::kCPU)) << "the CPU's bits are those of this rule";
  const Gradients of_cpu = gradients_on(torch::kCPU, {torch::zeros({6, 5})}, {});
  of_cpu.add_product(0, a, b);
  EXPECT_TRUE(torch::equal(of_cpu[0], expected));
}

TEST(FreshSums, of_a_region_what_no_sum_covers_is_zeros) {
  const Tensor region = poison({40});
  const auto sum = [&](std::int64_t first, at::IntArrayRef shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    return region.narrow(0, first, count).view(shape);
  };
  const Tensor elsewhere = poison({4});
  const std::vector<Tensor> sums = {sum(16, {2, 5}), Tensor(), sum(3, {7}), elsewhere};
  begin_region(region, sums, /*overwritten=*/true);
  for (std::int64_t i = 0; i < 40; ++i) {
    const bool covered = (i >= 3 && i < 10) || (i >= 16 && i < 26);
    EXPECT_EQ(std::isnan(region[i].item<float>()), covered) << i;
  }
  EXPECT_TRUE(elsewhere.isnan().all().item<bool>());
  begin_region(region, sums, /*overwritten=*/false);
  EXPECT_TRUE(torch::equal(region, torch::zeros({40})));
}

// Every stage of every family, with sums that hold NaN and stand for zeros, over two micro-batches.
class FreshModel : public EveryModel {};

TEST_P(FreshModel, has_the_gradients_of_sums_that_begin_with_zeros) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    ResidentModel plain = resident(GetParam(), torch::kDouble, 0.2, tiling),
                  fresh = resident(GetParam(), torch::kDouble, 0.2, tiling);
    const MicroBatch tokens[] = {batch(2, 24), packed({{20, 4}, {9, 15}})};
    for (const MicroBatch& batch : tokens) plain.forward_backward(batch, 0.5);
    for (auto& unit : fresh.gradients)
      for (Tensor& sum : unit) sum.fill_(NAN);
    WideProducts products;
    std::set<int> begun;  // units: a tied table's sum goes on from the head's
    for (const MicroBatch& batch : tokens) {
      const Shared shared = fresh.model->share(batch, torch::kCPU);
      const std::vector<Carry> inputs = fresh.forward(shared, true);
      Carry d;
      for (int stage = fresh.stages() - 1; stage >= 0; --stage) {
        const auto at = static_cast<std::size_t>(stage);
        std::vector<bool> begins;
        std::set<int> here;
        for (const int unit : fresh.spec().stages[at].units) {
          const bool first = &batch == tokens && !begun.contains(unit);
          here.insert(unit);
          begins.resize(begins.size() + fresh.units[static_cast<std::size_t>(unit)].size(), first);
        }
        begun.merge(here);
        const Gradients sums(fresh.bind(stage, fresh.gradients), begins, products.rule());
        const Weights weights = fresh.bind(stage, fresh.units);
        torch::manual_seed(static_cast<std::uint64_t>(stage));
        d = stage + 1 == fresh.stages()
                ? fresh.model->head_loss_and_backward(weights, sums, inputs.back(), shared, 0.5).d_carry
                : fresh.model->backward(stage, weights, sums, taken_by_backward(fresh.spec().stages[at], inputs[at]),
                                        shared, d);
        sums.zero_untouched();
      }
    }
    for (std::size_t u = 0; u < plain.gradients.size(); ++u)
      for (std::size_t t = 0; t < plain.gradients[u].size(); ++t)
        EXPECT_LT(relative_error(fresh.gradients[u][t], plain.gradients[u][t]), 1e-9)
            << fresh.spec().units[u].tensors[t].name;
    if (GetParam().name != "llama" || !tiling.vocabulary_elements) continue;
    // Of a dense decoder every matrix of a block is begun by a product.
    std::int64_t matrices = 0;
    for (const int unit : fresh.spec().stages[1].units)
      for (const TensorSpec& tensor : fresh.spec().units[static_cast<std::size_t>(unit)].tensors)
        matrices += tensor.shape.size() == 2 ? 1 : 0;
    EXPECT_GE(products.first, 2 * matrices);
  }
}

INSTANTIATE_TEST_SUITE_P(models, FreshModel, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace tierflow::testing
