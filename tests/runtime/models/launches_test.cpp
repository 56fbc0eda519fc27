// How many kernels a CUDA device is asked to launch, counted without one: on torch's meta device, where reading a value
// throws. Of a model of Llama 3.1 8B's shapes and 8,192 tokens. A figure is what is launched now and may fall; the
// goals are, with attention's own kernels, 14 of a block's forward, 30 of its backward, 63 of the head. Copies that
// attention takes here, where torch's textbook stands in for its fused operators, count too.
#include "tests/runtime/models/launches.h"

#include "runtime/models/ops.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

constexpr std::int64_t kRows = 2, kLength = 4096;

struct MetaModel {
  explicit MetaModel(const std::string& architecture = "LlamaForCausalLM")
      : model(make_model(parse_model_spec(R"({"architectures": [")" + architecture + R"("], "vocab_size": 128256,
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5})",
                                          "model", Tiling::none()))) {
    const MicroBatch batch{.ids = torch::zeros({kRows, kLength}, torch::kLong),
                           .labels = torch::zeros({kRows, kLength}, torch::kLong)};
    shared = model->share(batch, torch::kMeta);
  }

  int stage_of(StageKind kind) const {
    int stage = 0;
    while (model->spec().stages.at(static_cast<std::size_t>(stage)).kind != kind) ++stage;
    return stage;
  }
  std::vector<torch::Tensor> tensors(int stage, torch::ScalarType type) const {
    std::vector<torch::Tensor> all;
    for (const int unit : model->spec().stages.at(static_cast<std::size_t>(stage)).units)
      for (const TensorSpec& tensor : model->spec().units[static_cast<std::size_t>(unit)].tensors)
        all.push_back(torch::empty(tensor.shape, torch::device(torch::kMeta).dtype(type)));
    return all;
  }
  Weights weights(int stage) const { return tensors(stage, torch::kBFloat16); }
  // By CUDA's rule, which is one product for each weight; torch has none with an fp32 result on meta.
  Gradients sums(int stage) const {
    std::vector<torch::Tensor> sums = tensors(stage, torch::kFloat);
    const std::size_t count = sums.size();
    return {std::move(sums), std::vector<bool>(count, true),
            [](const torch::Tensor&, const torch::Tensor& a, const torch::Tensor& b, Order) { at::mm(a.t(), b); }};
  }
  torch::Tensor hidden() const {
    return torch::empty({kRows, kLength, 4096}, torch::device(torch::kMeta).dtype(torch::kBFloat16));
  }

  std::unique_ptr<LayeredModel> model;
  Shared shared;
};

void expect_at_most(const Launches& launches, std::size_t most, std::size_t attentions) {
  std::string list;
  for (const auto& [name, times] : launches.by_name()) list += "\n  " + name + " " + std::to_string(times);
  EXPECT_LE(launches.count(), most) << list;
  EXPECT_EQ(launches.attentions(), attentions);
}

TEST(Launches, CountsWhatMakesKernels) {
  const torch::Tensor x = torch::empty({4, 8}, torch::device(torch::kMeta).dtype(torch::kBFloat16));
  const Launches launches;
  const torch::Tensor y = x.t().contiguous().view({-1}) + 1;              // a copy and a sum
  const torch::Tensor z = at::linear(x, at::zeros({3, 8}, x.options()));  // zeros, a product
  const torch::Tensor norm = models::rms_norm(x, x.select(0, 0), 1e-5);   // one of our own
  EXPECT_EQ(launches.count(), 5) << ::testing::PrintToString(launches.by_name());
  EXPECT_EQ(launches.by_name().at("tierflow::rms_norm"), 1);
  EXPECT_ANY_THROW(x.sum().item<double>());
  EXPECT_ANY_THROW(x.cpu());
}

struct BlockLaunches {
  const char* architecture;
  std::size_t forward, backward;
};
class LaunchesOf : public ::testing::TestWithParam<BlockLaunches> {};

TEST_P(LaunchesOf, ABlock) {
  const MetaModel of(GetParam().architecture);
  const int stage = of.stage_of(StageKind::block);
  const Weights weights = of.weights(stage);
  const Gradients sums = of.sums(stage);
  Carry carry = {of.hidden()};
  std::unique_ptr<KeptActivations> kept;
  {
    const Launches launches;
    kept = of.model->forward_keeping(stage, weights, carry, of.shared);
    expect_at_most(launches, GetParam().forward, 1);
  }
  const Launches launches;
  of.model->backward_kept(stage, weights, sums, {of.hidden()}, of.shared, {of.hidden()}, std::move(kept));
  expect_at_most(launches, GetParam().backward, 0);
}

INSTANTIATE_TEST_SUITE_P(models, LaunchesOf,
                         ::testing::Values(BlockLaunches{"LlamaForCausalLM", 13, 28},
                                           BlockLaunches{"GemmaForCausalLM", 13, 28}));

TEST(Launches, OfTheHead) {
  const MetaModel of;
  const int stage = of.stage_of(StageKind::head);
  const Weights weights = of.weights(stage);
  const Gradients sums = of.sums(stage);
  const Launches launches;
  of.model->head_loss_and_backward(weights, sums, {of.hidden()}, of.shared, 1.0);
  expect_at_most(launches, 39, 0);
}

TEST(Launches, OfTheEmbedding) {
  const MetaModel of;
  const Launches launches;
  of.model->backward(0, of.weights(0), of.sums(0), {}, of.shared, {of.hidden()});
  expect_at_most(launches, 4, 0);
}

}  // namespace
}  // namespace tierflow::testing
