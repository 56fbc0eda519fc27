// Which experts a token takes, and experts that none or all tokens take.
#include "runtime/models/router.h"

#include <cmath>

#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using models::assign;
using models::Assignment;
using models::route;
using models::Routing;

TEST(Router, OfEqualScoresTheFirstExpertIsHigher) {
  const ExpertsSpec spec{.count = 40, .per_token = 3};
  const Routing routing = route(spec, torch::zeros({2, 40}));
  EXPECT_TRUE(torch::equal(routing.chosen, torch::tensor({{0, 1, 2}, {0, 1, 2}})));
  torch::Tensor logits = torch::zeros({1, 40});
  logits[0][17] = 1;
  EXPECT_TRUE(torch::equal(route(spec, logits).chosen, torch::tensor({{17, 0, 1}})));
}

TEST(Router, WeightsAreScoresOrSumToOneAndAreRounded) {
  const torch::Tensor logits = torch::tensor({{0.F, 1.F, 2.F, 3.F}}), scores = torch::softmax(logits, 1);
  ExpertsSpec spec{.count = 4, .per_token = 2, .rounded = false};
  EXPECT_TRUE(torch::equal(route(spec, logits).weights, torch::stack({scores[0][3], scores[0][2]}).unsqueeze(0)));
  spec.normalised = true;
  EXPECT_NEAR(route(spec, logits).weights.sum().item<double>(), 1, 1e-6);
  spec.rounded = true;
  const torch::Tensor rounded = route(spec, logits.to(torch::kBFloat16)).weights;
  EXPECT_EQ(rounded.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(rounded, rounded.to(torch::kBFloat16).to(torch::kFloat)));
}

// GLM-4.5's: the best two of a group count, corrected; weights are the scores as they are.
TEST(Router, SigmoidsAreCorrectedToChooseAlone) {
  const ExpertsSpec spec{.count = 6,
                         .per_token = 2,
                         .normalised = true,
                         .sigmoid = true,
                         .corrected = true,
                         .groups = 3,
                         .groups_taken = 1,
                         .scale = 2.5,
                         .rounded = false};
  const torch::Tensor logits = torch::tensor({{0.F, 1.F, 5.F, -9.F, 2.F, 2.F}});
  const Routing plain = route(spec, logits, torch::zeros({6}));
  EXPECT_TRUE(torch::equal(plain.chosen, torch::tensor({{4, 5}})));
  EXPECT_TRUE(torch::allclose(plain.weights, torch::full({1, 2}, 1.25)));
  const Routing corrected = route(spec, logits, torch::tensor({0.F, 0.F, 0.F, 1.F, 0.F, 0.F}));
  EXPECT_TRUE(torch::equal(corrected.chosen, torch::tensor({{3, 2}})));
  const torch::Tensor scores = torch::sigmoid(torch::tensor({-9.F, 5.F}));
  EXPECT_TRUE(torch::allclose(corrected.weights[0], 2.5 * scores / scores.sum()));
}

// Llama 4's, whose sigmoids of large logits are all 1.
TEST(Router, SigmoidsAreChosenByTheirLogits) {
  const ExpertsSpec spec{.count = 4, .per_token = 2, .sigmoid = true};
  const Routing routing = route(spec, torch::tensor({{30.F, 40.F, 50.F, 2.F}}));
  EXPECT_TRUE(torch::equal(routing.chosen, torch::tensor({{2, 1}})));
  EXPECT_TRUE(torch::equal(routing.weights, torch::ones({1, 2})));
}

// sigmoid() makes 1 and 0 of infinities, softmax() 0 of one below: neither may pass for a score.
TEST(Router, OneInfinityIsNoScore) {
  for (const bool sigmoid : {false, true})
    for (const float logit : {HUGE_VALF, -HUGE_VALF}) {
      const ExpertsSpec spec{.count = 4, .per_token = 2, .sigmoid = sigmoid, .rounded = false};
      const torch::Tensor logits = torch::tensor({{0.F, logit, 2.F, 3.F}, {0.F, 1.F, 2.F, 3.F}});
      const torch::Tensor weights = route(spec, logits).weights;
      EXPECT_TRUE(weights[0].isnan().any().item<bool>()) << sigmoid << ' ' << logit;
      EXPECT_TRUE(weights[1].isfinite().all().item<bool>()) << sigmoid << ' ' << logit;
    }
}

TEST(Router, TokensOfAnExpertAreAscendingWhereverTheyChoseIt) {
  const ExpertsSpec spec{.count = 4, .per_token = 2};
  const Assignment found = assign(spec, torch::tensor({{3, 0}, {0, 1}, {3, 1}}));
  EXPECT_EQ(found.begin, (std::vector<std::int64_t>{0, 2, 4, 4, 6}));
  EXPECT_TRUE(torch::equal(found.tokens, torch::tensor({0, 1, 1, 2, 0, 2})));
  EXPECT_TRUE(torch::equal(found.places, torch::tensor({1, 2, 3, 5, 0, 4})));
}

torch::Tensor& tensor_called(const ResidentModel& m, std::vector<std::vector<torch::Tensor>>& of,
                             const std::string& name) {
  for (std::size_t u = 0; u < of.size(); ++u)
    for (std::size_t t = 0; t < of[u].size(); ++t)
      if (m.spec().units[u].tensors[t].name == name) return of[u][t];
  throw std::logic_error("no tensor " + name);
}

// A router of zeros sends every token to the first experts: the others have a gradient of zero, and it is right.
TEST(Router, ExpertsWithoutTokensHaveAGradientOfZero) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    ResidentModel m = resident(case_called("mixtral"), torch::kDouble, 0.2, tiling);
    const std::string layer = "model.layers.0.block_sparse_moe.";
    tensor_called(m, m.units, layer + "gate.weight").zero_();
    const double loss = m.forward_backward(batch(2, 24), 1.0);
    EXPECT_TRUE(std::isfinite(loss));
    EXPECT_GT(tensor_called(m, m.gradients, layer + "experts.0.w1.weight").norm().item<double>(), 0);
    for (const char* none : {"experts.2.w1.weight", "experts.3.w2.weight"})
      EXPECT_EQ(tensor_called(m, m.gradients, layer + none).norm().item<double>(), 0) << none;
    EXPECT_GT(tensor_called(m, m.gradients, layer + "gate.weight").norm().item<double>(), 0);
  }
}

TEST(Router, ALogitThatIsNoNumberMakesALossThatIsNone) {
  ResidentModel m = resident(case_called("mixtral"), torch::kBFloat16);
  tensor_called(m, m.units, "model.layers.1.block_sparse_moe.gate.weight").fill_(NAN);
  EXPECT_FALSE(std::isfinite(m.forward_backward(batch(2, 24), 1.0)));
}

}  // namespace
}  // namespace tierflow::testing
