// The load-balancing loss, against its formula under autograd.
#include "runtime/models/router_balance.h"

#include "runtime/models/router.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using models::add_gradient;
using models::balance_routing;
using models::route;
using models::route_backward;
using models::RouterBalance;
using models::RouterLoads;
using models::Routing;

constexpr std::int64_t kTokens = 12, kExperts = 5;

const ExpertsSpec& spec() {
  static const ExpertsSpec spec{.count = kExperts, .per_token = 2, .normalised = true, .rounded = false};
  return spec;
}

torch::Tensor logits_of_layer(int layer) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(40 + layer);
  return torch::randn({kTokens, kExperts}, generator, torch::kDouble) * 2;
}

// Two micro-batches in one computation: rows of 4 tokens with 3 and 4 before the padding, and 4 tokens of the other.
RouterBalance of_both() {
  RouterBalance balance;
  balance.parts = {{.micro_batch = 0, .begin = 0, .length = 3},
                   {.micro_batch = 0, .begin = 4, .length = 4},
                   {.micro_batch = 1, .begin = 8, .length = 4}};
  balance.found.resize(2);
  return balance;
}
const std::vector<std::vector<std::int64_t>> kCounted{{0, 1, 2, 4, 5, 6, 7}, {8, 9, 10, 11}};

// As the formula has it, over all layers of one micro-batch.
torch::Tensor plain_loss(const std::vector<torch::Tensor>& logits, std::size_t micro_batch) {
  const torch::Tensor counted = torch::tensor(kCounted[micro_batch]);
  std::vector<torch::Tensor> scores, taken;
  for (const torch::Tensor& layer : logits) {
    scores.push_back(torch::softmax(layer.index_select(0, counted), 1));
    taken.push_back(torch::zeros_like(scores.back())
                        .scatter_(1, std::get<1>(scores.back().topk(spec().per_token, 1)), 1.0)
                        .detach());
  }
  return kExperts * (torch::cat(taken).mean(0) * torch::cat(scores).mean(0)).sum();
}

struct Step {
  std::vector<RouterLoads> loads = std::vector<RouterLoads>(2);
  std::vector<Routing> routings;
};
Step forward(const std::vector<torch::Tensor>& logits) {
  const torch::NoGradGuard no_grad;
  Step step;
  for (const torch::Tensor& layer : logits) {
    RouterBalance balance = of_both();
    step.routings.push_back(route(spec(), layer));
    balance_routing(step.routings.back(), &balance);
    for (std::size_t i = 0; i < 2; ++i) step.loads[i].add(balance.found[i]);
  }
  return step;
}

TEST(RouterBalance, IsTheFormulasLossOverAllLayersOfEachMicroBatch) {
  const std::vector<torch::Tensor> logits{logits_of_layer(0), logits_of_layer(1), logits_of_layer(2)};
  const Step step = forward(logits);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(step.loads[i].tokens, 3 * static_cast<std::int64_t>(kCounted[i].size()));
    EXPECT_NEAR(step.loads[i].loss(), plain_loss(logits, i).item<double>(), 1e-12);
  }
}

// By hand, and where autograd finds the gradient of the scores, beside what comes to them through the weights.
TEST(RouterBalance, HasTheFormulasGradientInEachLayer) {
  const double factors[] = {0.7, -1.3};
  std::vector<torch::Tensor> logits, by_autograd;
  for (int layer = 0; layer < 2; ++layer) logits.push_back(logits_of_layer(layer).requires_grad_());
  const torch::Tensor d_weights = logits_of_layer(7).narrow(1, 0, 2).contiguous();
  torch::Tensor whole = factors[0] * plain_loss(logits, 0) + factors[1] * plain_loss(logits, 1);
  for (const torch::Tensor& layer : logits) whole = whole + (route(spec(), layer).weights * d_weights).sum();
  whole.backward();
  const Step step = forward(logits);
  RouterBalance balance = of_both();
  for (std::size_t i = 0; i < 2; ++i) balance.gradients.push_back(step.loads[i].gradient(factors[i]));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const torch::Tensor expected = logits[layer].grad();
    const torch::Tensor by_hand = route_backward(spec(), step.routings[layer], d_weights, &balance);
    EXPECT_LT((by_hand - expected).abs().max().item<double>(), 1e-12);
    EXPECT_GT((route_backward(spec(), step.routings[layer], d_weights) - expected).abs().max().item<double>(), 1e-3);
    const torch::Tensor again = logits[layer].detach().clone().requires_grad_();
    const Routing routing = route(spec(), again);
    balance_routing(routing, &balance);
    (routing.weights * d_weights).sum().backward();
    EXPECT_LT((again.grad() - expected).abs().max().item<double>(), 1e-12);
  }
}

TEST(RouterBalance, OfPaddingAloneIsZero) {
  const torch::NoGradGuard no_grad;
  RouterBalance balance;
  balance.found.resize(1);
  balance_routing(route(spec(), logits_of_layer(0)), &balance);
  EXPECT_EQ(balance.found[0].tokens, 0);
  EXPECT_EQ(balance.found[0].loss(), 0);
  EXPECT_EQ(balance.found[0].gradient(1), std::vector<double>(kExperts));
}

}  // namespace
}  // namespace tierflow::testing
