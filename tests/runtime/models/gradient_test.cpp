// Gradients of the stages against plain autograd over the whole model, in fp64.
#include <torch/nn/functional/loss.h>

#include "runtime/spec/adapters.h"
#include "runtime/spec/expert_adapters.h"
#include "tests/runtime/models/plain.h"

namespace tierflow::testing {
namespace {

torch::Tensor plain_loss(const ResidentModel& m, const std::vector<Weights>& units, const MicroBatch& batch,
                         std::uint64_t seed) {
  return torch::nn::functional::cross_entropy(
      plain_logits(m, units, batch, seed).flatten(0, 1), batch.labels.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kSum));
}

class Gradient : public EveryModel {};

void expect_plain_gradients(const Case& which, double scale, std::uint64_t seed, const Tiling& tiling = {}) {
  ResidentModel m = resident(which, torch::kDouble, 0.2, tiling);
  const MicroBatch tokens = batch(2, 24);
  const double loss = m.forward_backward(tokens, scale, true, seed);

  std::vector<Weights> leaves = m.units;
  for (auto& unit : leaves) {
    for (auto& weight : unit) weight = weight.detach().clone().requires_grad_();
  }
  const torch::Tensor plain = plain_loss(m, leaves, tokens, seed);
  EXPECT_NEAR(loss, plain.item<double>(), 1e-9 * plain.item<double>());
  (plain * scale).backward();
  for (std::size_t u = 0; u < leaves.size(); ++u) {
    for (std::size_t t = 0; t < leaves[u].size(); ++t) {
      const std::string& name = m.spec().units[u].tensors[t].name;
      if (!m.spec().units[u].tensors[t].trainable) continue;
      ASSERT_TRUE(leaves[u][t].grad().defined()) << name;
      // The bias of k moves every score of a query by the same amount: its gradient is nothing but rounding.
      const double size = leaves[u][t].grad().norm().item<double>();
      if (name.ends_with("k_proj.bias") && size < 1e-6) continue;
      EXPECT_GT(size, 0) << name;
      EXPECT_LT(relative_error(m.gradients[u][t], leaves[u][t].grad()), 1e-6) << name;
    }
  }
}

TEST_P(Gradient, is_plain_autograds) {
  expect_plain_gradients(GetParam(), 0.25, 0);
}

INSTANTIATE_TEST_SUITE_P(models, Gradient, ::testing::ValuesIn(cases()), case_name);

class DropoutGradient : public EveryModel {};

// The same seeds give the same masks in the forward and in the recomputation.
TEST_P(DropoutGradient, is_plain_autograds) {
  expect_plain_gradients(GetParam(), 1.0, 40);
}

TEST_P(DropoutGradient, is_plain_autograds_in_tiles) {
  expect_plain_gradients(GetParam(), 0.5, 60, kTiled);
}

INSTANTIATE_TEST_SUITE_P(models, DropoutGradient, ::testing::ValuesIn(cases("0.3")), case_name);

// A block's own backward against the recomputation by autograd that every LayeredModel has.
class BlockBackward : public EveryModel {};

void expect_default_backward(ResidentModel m, std::size_t stage, torch::ScalarType type) {
  const MicroBatch tokens = batch(2, 40);
  const Shared shared = m.model->share(tokens, torch::kCPU);
  const std::vector<Carry> inputs = m.forward(shared, true);
  Carry d_out, by_hand;  // between stages of experts the gradient by hand is fp32 but for the hidden states
  for (const torch::Tensor& out : inputs[stage + 1]) {
    d_out.push_back(out.is_floating_point() ? torch::randn_like(out) : torch::Tensor());
    if (!d_out.back().defined()) {
      by_hand.emplace_back();
      continue;
    }
    by_hand.push_back(by_hand.empty() ? d_out.back() : d_out.back().to(torch::kFloat));
  }
  const int s = static_cast<int>(stage);
  const auto unit = static_cast<std::size_t>(m.spec().stages[stage].units.front());
  const Carry own = m.model->backward(s, m.bind(s, m.units), m.bind(s, m.gradients),
                                      taken_by_backward(m.spec().stages[stage], inputs[stage]), shared, by_hand);
  const std::vector<torch::Tensor> of_own = m.gradients[unit];
  for (auto& gradient : m.gradients[unit]) gradient = torch::zeros_like(gradient);
  const Carry plain =
      m.model->LayeredModel::backward(s, m.bind(s, m.units), m.bind(s, m.gradients), inputs[stage], shared, d_out);
  const double tolerance = type == torch::kFloat ? 1e-4 : 3e-2;
  EXPECT_EQ(own[0].scalar_type(), type);
  ASSERT_EQ(own.size(), plain.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    ASSERT_EQ(own[i].defined(), plain[i].defined());
    if (!own[i].defined()) continue;
    EXPECT_LT(relative_error(own[i], plain[i]), tolerance) << i;
  }
  for (std::size_t t = 0; t < of_own.size(); ++t) {
    const std::string& name = m.spec().units[unit].tensors[t].name;
    if (name.ends_with("k_proj.bias")) continue;
    EXPECT_LT(relative_error(of_own[t], m.gradients[unit][t]), tolerance) << name;
  }
}

// Whether rounding may send a token to another expert.
bool chooses(const ModelSpec& spec, std::size_t stage) {
  return spec.stages[stage].experts > 0 && spec.stages[stage].first_expert == 0;
}

TEST_P(BlockBackward, is_the_default_in_fp32_and_bf16) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const ModelSpec whole = parse_model_spec(GetParam().json, GetParam().name),
                    tiled = parse_model_spec(GetParam().json, GetParam().name, kTiled);
    const bool exact = type == torch::kFloat;
    if (exact || !chooses(whole, 1)) expect_default_backward(resident(GetParam(), type), 1, type);
    for (std::size_t stage = 0; stage < tiled.stages.size(); ++stage)
      if (tiled.stages[stage].block == 0 && (exact || !chooses(tiled, stage)))
        expect_default_backward(resident(GetParam(), type, 0.2, kTiled), stage, type);
  }
}

// With adapters of experts, whose own backward and autograd's come from the same forward.
TEST_P(BlockBackward, is_the_default_with_adapters_of_experts) {
  for (const Tiling& tiling : {Tiling{}, Tiling{.block_elements = 1, .experts = 2}}) {
    ModelSpec spec = parse_model_spec(GetParam().json, GetParam().name, tiling);
    if (spec.config.experts.count == 0 || turns_experts_in_peft(spec.config)) return;
    add_adapters(spec, {.rank = 3, .alpha = 6, .parameters = {"gate_up_proj", "down_proj"}});
    for (const auto type : {torch::kFloat, torch::kBFloat16})
      for (std::size_t stage = 0; stage < spec.stages.size(); ++stage) {
        if (spec.stages[stage].block != 0 || (type == torch::kBFloat16 && chooses(spec, stage))) continue;
        ResidentModel model(spec, type);
        model.randomise(17);
        expect_default_backward(std::move(model), stage, type);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(models, BlockBackward, ::testing::ValuesIn(cases()), case_name);

TEST(Gradients, undefined_ones_are_left_out) {
  ResidentModel m = resident(cases()[0], torch::kDouble);
  const MicroBatch tokens = batch(1, 16);
  m.forward_backward(tokens, 1.0);
  const std::vector<std::vector<torch::Tensor>> all = m.gradients;
  for (auto& unit : m.gradients) {
    for (auto& gradient : unit) gradient = torch::zeros_like(gradient);
  }
  m.gradients[0][0] = torch::Tensor();
  for (auto& gradient : m.gradients[1]) gradient = torch::Tensor();
  m.forward_backward(tokens, 1.0);
  for (std::size_t t = 0; t < all[2].size(); ++t) EXPECT_TRUE(torch::equal(m.gradients[2][t], all[2][t]));
}

}  // namespace
}  // namespace tierflow::testing
