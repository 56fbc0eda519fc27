// A model in tiles is the model: the same loss to rounding, the same gradients, whatever the type.
#include "runtime/models/ops.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

// The whole model's weights, or gradients, by checkpoint name.
using ByName = std::map<std::string, torch::Tensor>;
ByName by_name(const ResidentModel& m, const std::vector<std::vector<torch::Tensor>>& units) {
  std::map<std::string, std::vector<torch::Tensor>> parts;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t t = 0; t < units[u].size(); ++t) parts[m.spec().units[u].tensors[t].name].push_back(units[u][t]);
  }
  ByName whole;
  for (const auto& [name, tensors] : parts) whole[name] = torch::cat(tensors);
  return whole;
}

ResidentModel in_tiles(const Case& which, const ResidentModel& whole, torch::ScalarType type) {
  ResidentModel tiled(parse_model_spec(which.json, which.name, kTiled), type);
  ByName weights = by_name(whole, whole.units);
  for (std::size_t u = 0; u < tiled.units.size(); ++u) {
    for (std::size_t t = 0; t < tiled.units[u].size(); ++t) {
      const TensorSpec& tensor = tiled.spec().units[u].tensors[t];
      tiled.units[u][t].copy_(weights.at(tensor.name).narrow(0, tensor.first_row, tensor.shape.front()));
    }
  }
  return tiled;
}

class Tiles : public EveryModel {};

TEST_P(Tiles, give_the_whole_models_loss_and_gradients) {
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    ResidentModel whole = resident(GetParam(), type), tiled = in_tiles(GetParam(), whole, type);
    ASSERT_GT(tiled.stages(), whole.stages() + 6);
    const MicroBatch tokens = batch(3, 40);
    const double loss = whole.forward_backward(tokens, 0.25);
    const double exact = type == torch::kDouble ? 1e-12 : type == torch::kFloat ? 1e-6 : 1e-3;
    EXPECT_NEAR(tiled.forward_backward(tokens, 0.25), loss, exact * loss);
    const double tolerance = type == torch::kDouble ? 1e-10 : type == torch::kFloat ? 1e-4 : 3e-2;
    const ByName expected = by_name(whole, whole.gradients);
    for (const auto& [name, gradient] : by_name(tiled, tiled.gradients)) {
      if (name.ends_with("k_proj.bias")) continue;
      EXPECT_EQ(gradient.sizes(), expected.at(name).sizes()) << name;
      EXPECT_LT(relative_error(gradient, expected.at(name)), tolerance) << name;
    }
  }
}

TEST_P(Tiles, evaluation_is_trainings_loss) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16, 0.2, kTiled);
  const MicroBatch tokens = batch(2, 24);
  const Shared shared = m.model->share(tokens, torch::kCPU);
  const auto inputs = m.forward(shared, true, 9);
  EXPECT_EQ(m.model->head_scores(m.bind(m.stages() - 1, m.units), inputs.back(), shared).loss_sum,
            m.forward_backward(tokens, 1.0, true, 9));
}

TEST_P(Tiles, labels_that_do_not_count_give_nothing) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16, 0.2, kTiled);
  MicroBatch tokens = batch(1, 16);
  tokens.labels.fill_(-100);
  EXPECT_EQ(m.forward_backward(tokens, 1.0), 0.0);
  for (const auto& unit : m.gradients) {
    for (const auto& gradient : unit) EXPECT_EQ(gradient.abs().sum().item<double>(), 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(models, Tiles, ::testing::ValuesIn(cases()), case_name);

// Logits as far apart as bf16 has them, in an order that raises the largest tile after tile and lowers it again.
TEST(SoftmaxTiles, stand_large_logits) {
  const std::int64_t width = 40;
  torch::Tensor logits = torch::zeros({6, 3 * width}, torch::kDouble);
  for (std::int64_t row = 0; row < 6; ++row) {
    for (std::int64_t tile = 0; tile < 3; ++tile)
      logits[row]
          .narrow(0, tile * width, width)
          .copy_(torch::randn({width}) * 2 + (row % 2 ? 90.0 : -90.0) * tile * row);
  }
  logits = logits.to(torch::kBFloat16);
  const torch::Tensor labels = torch::tensor({0L, 45L, 119L, -100L, 40L, 79L});
  const torch::Tensor exact = logits.to(torch::kDouble);
  const torch::Tensor counts = labels.ge(0);
  const torch::Tensor log_p = torch::log_softmax(exact, 1);
  const torch::Tensor losses = -log_p.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1) * counts;
  const torch::Tensor one_hot = torch::one_hot(labels.clamp_min(0), 3 * width).to(torch::kDouble);
  const torch::Tensor gradient = 0.5 * (log_p.exp() - one_hot) * counts.unsqueeze(1);
  for (const auto type : {torch::kBFloat16, torch::kFloat}) {
    const torch::Tensor sums = models::no_softmax_sums(6, torch::kCPU);
    const auto tile = [&](std::int64_t i) { return logits.narrow(1, i * width, width).to(type).contiguous(); };
    for (std::int64_t i = 0; i < 3; ++i) models::softmax_sums(tile(i), labels, i * width, sums);
    EXPECT_LT((models::softmax_losses(sums, labels) - losses).abs().max().item<double>(), 1e-4);
    const torch::Tensor factors = models::softmax_factors(sums, labels, 0.5);
    for (std::int64_t i = 0; i < 3; ++i) {
      torch::Tensor d = tile(i);
      models::softmax_gradient(d, labels, i * width, factors);
      const torch::Tensor expected = gradient.narrow(1, i * width, width);
      EXPECT_LT((d.to(torch::kDouble) - expected).abs().max().item<double>(), type == torch::kFloat ? 1e-5 : 2e-3);
    }
  }
}

// Of several columns with the largest logit the first counts, wherever tiles begin.
TEST(SoftmaxTiles, the_first_of_the_largest_is_a_hit) {
  const std::int64_t width = 40;
  torch::Tensor logits = torch::randn({6, 3 * width});
  const std::vector<std::vector<std::int64_t>> largest = {{3}, {17, 50}, {41, 44, 100}, {119}, {80, 81}, {0, 40}};
  for (std::int64_t row = 0; row < 6; ++row)
    for (const std::int64_t column : largest[static_cast<std::size_t>(row)]) logits[row][column] = 9;
  const torch::Tensor first = torch::tensor({3L, 17L, 41L, 119L, 80L, 0L}),
                      later = torch::tensor({4L, 50L, 44L, -100L, 81L, 40L});
  for (const auto type : {torch::kBFloat16, torch::kFloat}) {
    for (const bool right : {true, false}) {
      const torch::Tensor& labels = right ? first : later;
      const torch::Tensor sums = models::no_softmax_sums(6, torch::kCPU);
      for (std::int64_t i = 0; i < 3; ++i)
        models::softmax_sums(logits.narrow(1, i * width, width).to(type).contiguous(), labels, i * width, sums);
      EXPECT_TRUE(torch::equal(models::softmax_hits(sums, labels), torch::full({6}, right, torch::kBool)));
    }
  }
}

}  // namespace
}  // namespace tierflow::testing
