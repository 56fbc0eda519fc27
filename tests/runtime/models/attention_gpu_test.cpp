// What a device computes in bf16 against fp64 on the host: each way of attention, and a GPU's products that are added
// to an fp32 sum. The CPU's attention is here to show that the comparison holds. Skips what the machine has not.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cmath>

#include "runtime/device/device_memory.h"
#include "runtime/models/device_attention.h"
#include "runtime/models/gradients.h"
#include "runtime/models/torch_attention.h"
#include "swap/device.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

constexpr double kTolerance = 2e-2;  // of the norm of what is exact

// Named as a gtest parameter.
class AttentionOn : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (on_gpu()) {
      if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
      DeviceMemory::cuda();  // loads torch's library
      const int major = swap::cuda_device_info(0).value().major;
      large_card_ = major == 9 || major == 10;
    }
    at::globalContext().setDeterministicAlgorithms(false, false);
    torch::manual_seed(6);
  }
  static bool on_gpu() { return GetParam() == "cuda"; }
  // Torch gives cuDNN to Hopper and to Blackwell's large cards, for heads as large as its version can. Empty: either.
  std::string whole_rows_by(std::int64_t dim) const {
    if (!on_gpu()) return "blocks";
    return !large_card_ ? "flash" : dim <= 128 ? "cudnn" : "";
  }
  static std::string others_by() { return on_gpu() ? "flash" : "blocks"; }
  static Tensor there(const Tensor& x) { return x.to(on_gpu() ? torch::kCUDA : torch::kCPU); }

  struct Inputs {
    Inputs(std::int64_t rows, std::int64_t length, std::int64_t dim) {
      for (const std::int64_t heads : {4, 2, 2, 4})
        all.push_back(torch::randn({rows, length, heads, dim}).to(torch::kBFloat16));
    }
    std::vector<Tensor> all;  // q, k, v and the gradient of the result
  };
  static std::vector<Tensor> exact_of(const Inputs& inputs, models::AttentionRules rules);
  static void expect_kept(const Inputs& inputs, const models::AttentionRules& rules, const std::string& by,
                          double tolerance = kTolerance);

 private:
  bool large_card_ = false;
};

void expect_near(const Tensor& got, const Tensor& exact, const char* what, double tolerance = kTolerance) {
  ASSERT_EQ(got.sizes(), exact.sizes()) << what;
  const double distance = (got.cpu().to(torch::kDouble) - exact).norm().item<double>();
  EXPECT_LT(distance, tolerance * exact.norm().item<double>()) << what << " of norm " << exact.norm().item<double>();
}

// The result and the gradients of q, k, v and the sinks, in fp64.
std::vector<Tensor> AttentionOn::exact_of(const Inputs& inputs, models::AttentionRules rules) {
  std::vector<Tensor> leaves;
  for (int i = 0; i < 3; ++i) leaves.push_back(inputs.all[i].to(torch::kDouble).requires_grad_());
  if (rules.sinks.defined()) rules.sinks = rules.sinks.to(torch::kDouble).requires_grad_();
  const Tensor out = models::torch_attention(leaves[0], leaves[1], leaves[2], rules, 0.0);
  out.backward(inputs.all[3].to(torch::kDouble));
  std::vector<Tensor> found = {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
  if (rules.sinks.defined()) found.push_back(rules.sinks.grad());
  return found;
}

constexpr const char* kNames[] = {"out", "d_q", "d_k", "d_v", "d_sinks"};

// What kept attention does, forward and backward.
void AttentionOn::expect_kept(const Inputs& inputs, const models::AttentionRules& rules, const std::string& by,
                              double tolerance) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> at;
  for (const Tensor& x : inputs.all) at.push_back(there(x));
  models::AttentionRules rules_there = rules;
  if (rules.sinks.defined()) rules_there.sinks = there(rules.sinks);
  const auto kept = models::kept_attention(at[0], at[1], rules_there, 0.0);
  ASSERT_NE(kept, nullptr);
  if (!by.empty()) {
    EXPECT_EQ(kept->name(), by);
  }
  const models::BlockAttention forward = kept->forward(at[0], at[1], at[2], rules_there);
  const models::AttentionGradient d = kept->backward(at[3], at[0], at[1], at[2], forward, rules_there);
  std::vector<Tensor> exact;
  {
    const torch::AutoGradMode with_grad(true);
    exact = exact_of(inputs, rules);
  }
  const std::vector<Tensor> got = {forward.out, d.q, d.k, d.v, d.sinks};
  for (std::size_t i = 0; i < exact.size(); ++i) expect_near(got[i], exact[i], kNames[i], tolerance);
}

TEST_P(AttentionOn, HasTheValuesOfTheHost) {
  const Tensor sinks = torch::randn({4});
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t length : {128, 192, 300})
      for (const std::int64_t window : {0, 20})
        for (const bool with_sinks : {false, true}) {
          SCOPED_TRACE(::testing::Message() << "heads of " << dim << ", " << length << " tokens, window " << window
                                            << (with_sinks ? ", sinks" : ""));
          const models::AttentionRules rules{.window = window, .sinks = with_sinks ? sinks : Tensor()};
          expect_kept(Inputs(2, length, dim), rules, window == 0 ? whole_rows_by(dim) : others_by());
        }
  }
}

TEST_P(AttentionOn, DocumentsAttendToThemselvesAlone) {
  const MicroBatch rows = packed({{150, 149, 1}, {300}, {258, 5, 37}});
  const Tensor sinks = torch::randn({4});
  for (const std::int64_t dim : {64, 128})
    for (const std::int64_t window : {0, 20})
      for (const bool with_sinks : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "heads of " << dim << ", window " << window << (with_sinks ? ", sinks" : ""));
        const models::AttentionRules rules{
            .window = window, .documents = rows.documents(), .sinks = with_sinks ? sinks : Tensor()};
        expect_kept(Inputs(3, 300, dim), rules, others_by());
      }
}

// Lengths that differ from call to call: nothing that is planned for each.
TEST_P(AttentionOn, RowsOfAnyLengthNeedNoPlan) {
  models::AttentionRules rules;
  rules.choice.any_length = true;
  expect_kept(Inputs(1, 77, 128), rules, others_by());
}

// Each query finds every key about 140 below zero, so that the exponential of a score of zero, as padding has it, would
// overflow beside theirs: cuDNN's gradients were NaN (pytorch issue 196678). The lengths fill half of a tile of 128.
TEST_P(AttentionOn, ScoresFarBelowZeroHaveFiniteGradients) {
  for (const std::int64_t dim : {64, 128})
    for (const std::int64_t length : {64, 192, 704}) {
      SCOPED_TRACE(::testing::Message() << "heads of " << dim << ", " << length << " tokens");
      Inputs inputs(2, length, dim);
      const double apart = std::sqrt(140 / std::sqrt(static_cast<double>(dim)));
      inputs.all[0] += 2 * apart;
      inputs.all[1] -= apart / 2;  // the sum in d_q that cancels is small
      {
        const torch::NoGradGuard no_grad;
        const auto on_host = models::kept_attention(inputs.all[0], inputs.all[1], {}, 0.0);
        const Tensor lse = on_host->forward(inputs.all[0], inputs.all[1], inputs.all[2], {}).lse;
        ASSERT_LT(lse.max().item<float>(), -88.8F);
      }
      expect_kept(inputs, {}, whole_rows_by(dim), 5e-2);
    }
}

// What has no kept attention: many short documents, softcaps, sinks where autograd is on.
TEST_P(AttentionOn, OfTorchHasTheValuesOfTheHost) {
  const MicroBatch short_ones = packed({std::vector<std::int64_t>(75, 4), std::vector<std::int64_t>(75, 4)});
  const Tensor sinks = torch::randn({4});
  for (const std::int64_t window : {0, 20})
    for (const int kind : {0, 1, 2}) {
      SCOPED_TRACE(::testing::Message() << "kind " << kind << ", window " << window);
      const Inputs inputs(2, 300, 64);
      models::AttentionRules rules{.window = window};
      if (kind == 0) rules.documents = short_ones.documents();
      if (kind == 1) rules.softcap = 5;
      if (kind == 2) rules.sinks = sinks;
      const std::vector<Tensor> exact = exact_of(inputs, rules);
      std::vector<Tensor> leaves;
      for (int i = 0; i < 3; ++i) leaves.push_back(there(inputs.all[i]).clone().requires_grad_());
      if (kind == 2) rules.sinks = there(sinks).clone().requires_grad_();
      const Tensor out = models::attention(leaves[0], leaves[1], leaves[2], rules, 0.0);
      out.backward(there(inputs.all[3]));
      std::vector<Tensor> got = {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
      if (kind == 2) got.push_back(rules.sinks.grad());
      for (std::size_t i = 0; i < exact.size(); ++i) expect_near(got[i], exact[i], kNames[i]);
    }
}

INSTANTIATE_TEST_SUITE_P(All, AttentionOn, ::testing::Values("cpu", "cuda"),
                         [](const auto& info) { return info.param; });

// Also of one row (an adapter of rank 1), into a matrix that lies transposed, and of no tokens.
TEST(ProductsOnGpu, AreAddedInFp32) {
  if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
  DeviceMemory::cuda();  // loads torch's library
  torch::manual_seed(6);
  for (const auto& [tokens, m, n] : {std::tuple{64, 48, 80}, {8192, 256, 130}, {100, 1, 64}, {100, 64, 1}, {0, 8, 16}})
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << m << " x " << n
                                        << (transposed ? ", transposed" : ""));
      const Tensor a = torch::randn({tokens, m}).to(torch::kBFloat16),
                   b = torch::randn({tokens, n}).to(torch::kBFloat16);
      const Tensor there =
          transposed ? torch::full({n, m}, NAN, torch::kCUDA).t() : torch::full({m, n}, NAN, torch::kCUDA);
      const Tensor exact = a.to(torch::kDouble).t().mm(b.to(torch::kDouble));
      for (const int times : {1, 2, 3}) {
        product_in_fp32(there, a.to(torch::kCUDA), b.to(torch::kCUDA), times == 1 ? Order::first : Order::later);
        const Tensor difference = there.cpu().to(torch::kDouble) - times * exact;
        EXPECT_LE(difference.norm().item<double>(), 1e-5 * times * exact.norm().item<double>()) << times;
      }
    }
}

}  // namespace
}  // namespace tierflow::testing
