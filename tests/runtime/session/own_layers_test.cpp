// Layers of one's own of which a part is trained: frozen weights, learning rates by name, and adapters over a base that
// streams; the same bits in memory and from storage, and those of a plain graph.
#include <gtest/gtest.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <fstream>
#include <memory>

#include "runtime/planning/loading.h"
#include "runtime/session/layers.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kWidth = 32, kInner = 512, kVocabulary = 96, kBlocks = 3, kSteps = 4;

struct Table : Layer {
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kVocabulary, kWidth));
  Carry forward(const Carry&, const Shared& shared) override { return {table(shared.ids)}; }
};
struct Block : Layer {
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  Linear up = register_module("up", Linear(kWidth, kInner));
  torch::nn::Sequential rest = register_module(
      "rest", torch::nn::Sequential(torch::nn::GELU(), Linear(torch::nn::LinearOptions(kInner, kWidth).bias(false))));
  Carry forward(const Carry& carry, const Shared&) override { return {carry[0] + rest->forward(up(norm(carry[0])))}; }
};
struct Loss : Layer {
  Linear out = register_module("out", Linear(kWidth, kVocabulary));
  Carry forward(const Carry& carry, const Shared& shared) override {
    const auto sum = torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
    return {torch::nn::functional::cross_entropy(out(carry[0]).to(torch::kFloat32).flatten(0, 1),
                                                 shared.labels.flatten(), sum)};
  }
};

Layers layers(int blocks = kBlocks) {
  Layers all;
  all.add("embed", [] { return std::make_shared<Table>(); })
      .repeat(blocks, "blocks", [] { return std::make_shared<Block>(); })
      .add("head", [] { return std::make_shared<Loss>(); });
  return all;
}

const std::vector<std::string> kAdapted{"blocks.0.up",     "blocks.0.rest.1", "blocks.1.up",
                                        "blocks.1.rest.1", "blocks.2.up",     "blocks.2.rest.1"};

// With that of the last layer, which has the loss: only by name.
const std::vector<std::string> kAllLinear{"up", "rest.1", "out"};

std::vector<std::string> adapted_modules(const Model& model) {
  std::vector<std::string> modules;
  for (const UnitSpec& unit : model.spec().units)
    for (const TensorSpec& tensor : unit.tensors)
      if (adapter_part(tensor) == AdapterPart::a) modules.push_back(linear_module(tensor));
  return modules;
}

std::vector<std::string> trained(const Model& model) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : model.spec().units)
    for (const TensorSpec& tensor : unit.tensors)
      if (tensor.trainable) names.push_back(tensor.name);
  return names;
}

// The gradients of one micro-batch, as the layers make them and, within 3% of their norm, as a graph of everything
// does.
TEST(OwnLayers, AdaptersHaveTheGradientsOfAPlainGraph) {
  const Model model = with_adapters(layers().build(9), {.rank = 4, .alpha = 6, .targets = kAllLinear}, 5);
  const ModelSpec& spec = model.spec();
  std::map<std::string, torch::Tensor> values;
  std::vector<Weights> weights(spec.units.size());
  std::vector<Gradients> sums;
  torch::manual_seed(3);
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit) {
    sums.emplace_back(spec.units[unit].tensors.size());
    for (std::size_t i = 0; i < spec.units[unit].tensors.size(); ++i) {
      const TensorSpec& tensor = spec.units[unit].tensors[i];
      torch::Tensor value = torch::empty(tensor.shape);
      if (is_adapter(tensor))
        value.normal_(0, 0.2);
      else
        model.weights(tensor, 0, {value.data_ptr<float>(), static_cast<std::size_t>(value.numel())});
      value = value.to(torch::kBFloat16);
      weights[unit].push_back(value);
      values[tensor.name] = value.clone().requires_grad_(tensor.trainable);
      EXPECT_EQ(tensor.trainable, is_adapter(tensor)) << tensor.name;
      if (tensor.trainable) sums[unit].set(i, torch::zeros(tensor.shape));
    }
  }
  const MicroBatch batch = batches(1, 0).front();
  double loss = 0;
  {
    const torch::NoGradGuard no_grad;
    const Shared shared = model.layers->share(batch, torch::kCPU);
    const int last = static_cast<int>(spec.stages.size()) - 1;
    std::vector<Carry> inputs{{}};
    for (int stage = 0; stage < last; ++stage)
      inputs.push_back(model.layers->forward(stage, weights[stage], inputs.back(), shared, true));
    HeadResult head = model.layers->head_loss_and_backward(weights[last], sums[last], inputs[last], shared, 1.0);
    loss = head.loss_sum.item<double>();
    Carry d = std::move(head.d_carry);
    for (int stage = last - 1; stage >= 0; --stage)
      d = model.layers->backward(stage, weights[stage], sums[stage], inputs[stage], shared, d);
  }
  const auto linear = [&](const torch::Tensor& x, const std::string& module, bool biased) {
    const std::string adapter = "base_model.model." + module;
    const torch::Tensor low = torch::linear(x, values.at(adapter + ".lora_A.weight") * (6.0 / 4));
    return torch::nn::functional::linear(x, values.at(module + ".weight"),
                                         biased ? values.at(module + ".bias") : torch::Tensor()) +
           torch::linear(low, values.at(adapter + ".lora_B.weight"));
  };
  torch::Tensor hidden = torch::embedding(values.at("embed.table.weight"), batch.ids);
  for (int i = 0; i < kBlocks; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    const torch::Tensor normed =
        torch::layer_norm(hidden, {kWidth}, values.at(block + ".norm.weight"), values.at(block + ".norm.bias"));
    hidden = hidden + linear(torch::gelu(linear(normed, block + ".up", true)), block + ".rest.1", false);
  }
  const torch::Tensor logits = linear(hidden, "head.out", true);
  const torch::Tensor expected =
      torch::nn::functional::cross_entropy(logits.to(torch::kFloat32).flatten(0, 1), batch.labels.flatten(),
                                           torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  expected.backward();
  EXPECT_NEAR(loss, expected.item<double>(), 1e-3 * loss);
  int compared = 0;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t i = 0; i < spec.units[unit].tensors.size(); ++i) {
      const TensorSpec& tensor = spec.units[unit].tensors[i];
      if (!tensor.trainable) continue;
      // Up to where bf16 rounds on the way back.
      const torch::Tensor theirs = values.at(tensor.name).grad().to(torch::kFloat32);
      EXPECT_LT((sums[unit][i] - theirs).norm().item<double>(), 3e-2 * theirs.norm().item<double>()) << tensor.name;
      EXPECT_GT(sums[unit][i].abs().max().item<double>(), 0) << tensor.name;
      ++compared;
    }
  EXPECT_EQ(compared, 4 * kBlocks + 2);
}

struct Steps {
  std::vector<double> losses;
  std::vector<std::vector<float>> masters;
};

// Trains, and looks that what is frozen stays as it was and what is trained does not.
void train(Session& session, std::int64_t up_to, Steps& run) {
  const std::vector<std::vector<float>> first = masters_of(session);
  if (session.waits_for_gradient()) session.begin_with_gradient(batches(2, 0));
  run.losses.resize(static_cast<std::size_t>(session.steps()));  // a step is committed beside the next one
  while (session.steps() < up_to)
    run.losses.push_back(session.step(batches(2, static_cast<int>(session.steps())), 1e-2).loss);
  run.masters = masters_of(session);
  std::size_t i = 0;
  for (const UnitSpec& unit : session.model().spec().units)
    for (const TensorSpec& tensor : unit.tensors) {
      const AdapterPart part = adapter_part(tensor);
      const bool begun = part == AdapterPart::initial_a || part == AdapterPart::initial_b;
      EXPECT_TRUE(begun || (run.masters[i] == first[i]) != tensor.trainable) << tensor.name;
      ++i;
    }
}

struct Choice {
  const char* name;
  std::function<Model()> model;
};
void PrintTo(const Choice& choice, std::ostream* out) {
  *out << choice.name;
}

Model adapted(const AdapterConfig& config, WeightFormat base = WeightFormat::bf16) {
  const Model model = layers().build(9);
  return with_adapters(base == WeightFormat::bf16 ? model : with_base_format(model, base), config, 5);
}

const std::vector<Choice> kChoices{
    {"lora", [] { return adapted({.rank = 4, .alpha = 8}); }},
    {"lora_over_nf4", [] { return adapted({.rank = 4, .alpha = 8}, WeightFormat::nf4_double); }},
    {"lora_over_int8", [] { return adapted({.rank = 4, .alpha = 8}, WeightFormat::int8); }},
    {"dropout", [] { return adapted({.rank = 4, .alpha = 8, .dropout = 0.3}); }},
    {"the_last_too", [] { return adapted({.rank = 4, .alpha = 8, .targets = kAllLinear}); }},
    {"the_last_alone",
     [] { return adapted({.rank = 4, .alpha = 8, .dropout = 0.3, .dora = true, .targets = {"out"}}); }},
    {"dora", [] { return adapted({.rank = 4, .alpha = 8, .dora = true}); }},
    {"pissa", [] { return adapted({.rank = 4, .alpha = 8, .init = AdapterInit::pissa}); }},
    {"lora_ga", [] { return adapted({.rank = 4, .alpha = 8, .init = AdapterInit::lora_ga}); }},
    {"with_a_module_saved", [] { return adapted({.rank = 4, .alpha = 8, .saved = {"norm"}}); }},
    {"frozen",
     [] {
       return with_trainable(layers().build(9), {.freeze = {"embed", "blocks\\.0\\."}});
     }},
    {"last_layers", [] { return with_trainable(layers().build(9), {.last_layers = 2}); }},
};

class OwnChoices : public ::testing::TestWithParam<Choice> {};

TEST_P(OwnChoices, StreamedIsResidentAndGoesOnToTheBit) {
  Steps expected;
  {
    Session session(GetParam().model(), resident(2), {.weight_decay = 0.1});
    train(session, kSteps, expected);
  }
  const Folder folder;
  SessionOptions options = streamed(resident(2), folder);
  options.host_memory =
      (trains_adapters_alone(GetParam().model().spec()) ? 190 : 300) * 1024 + loading_bytes(GetParam().model().spec());
  options.keep_store = true;
  options.commit_every = 1;
  Steps found;
  for (const std::int64_t up_to : {2, kSteps}) {
    Session session(GetParam().model(), options, {.weight_decay = 0.1});
    train(session, up_to, found);
    if (up_to == kSteps) session.discard();
    options.resume = true;
  }
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_TRUE(found.masters == expected.masters);
}

// With as much RAM as the adapters and their state take, which is too little for the base.
class OwnBases : public ::testing::TestWithParam<WeightFormat> {};
TEST_P(OwnBases, AreReadAndNeverWritten) {
  const Model plain = layers(12).build(9);
  const Model model = with_adapters(GetParam() == WeightFormat::bf16 ? plain : with_base_format(plain, GetParam()),
                                    {.rank = 1, .alpha = 2, .targets = kAllLinear}, 5);
  const Folder folder;
  SessionOptions options = streamed(resident(2), folder);
  options.clip.reset();  // no gradient waits
  options.host_memory = 160 * 1024 + loading_bytes(model.spec());
  std::unique_ptr<Session> session;
  const auto on_storage = [&](bool trained) {
    const SessionPlan& plan = session->plan();
    std::uint64_t bytes = 0;
    for (const swap::Chunk& chunk : plan.layout->chunks()) {
      const bool in_memory =
          plan.arrangement.hi_resident[chunk.id] && (!trained || plan.arrangement.state_resident[chunk.id]);
      if (chunk.trainable == trained && !in_memory) bytes += chunk.word_bytes();
    }
    return bytes;
  };
  do {
    session.reset();
    options.host_memory += 24 * 1024;
    session = opened(model, options);
  } while (session == nullptr || on_storage(true) != 0);
  const std::uint64_t base = on_storage(false);
  ASSERT_GT(base, GetParam() == WeightFormat::bf16 ? 100'000U : 30'000U);
  const auto moved = [&](swap::Lane lane) { return session->lanes()[static_cast<std::size_t>(lane)].bytes; };
  const std::uint64_t read = moved(swap::Lane::disk_read), written = moved(swap::Lane::disk_write),
                      on_drives = session->bytes_written();
  for (int step = 0; step < kSteps; ++step) session->step(batches(2, step), 1e-2);
  EXPECT_GT(moved(swap::Lane::disk_read) - read, (kSteps - 1) * base);
  EXPECT_EQ(moved(swap::Lane::disk_write) - written, 0U);
  EXPECT_EQ(session->bytes_written() - on_drives, 0U);
}
INSTANTIATE_TEST_SUITE_P(Each, OwnBases, ::testing::Values(WeightFormat::bf16, WeightFormat::nf4_double),
                         [](const auto& info) {
                           std::string name = weight_format_name(info.param);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

INSTANTIATE_TEST_SUITE_P(Each, OwnChoices, ::testing::ValuesIn(kChoices),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(OwnLayers, ThePartThatIsTrainedIsChosenByNameAndFromTheEnd) {
  const Model all = layers().build(9);
  EXPECT_EQ(adapted_modules(with_adapters(all, {.rank = 2}, 0)), kAdapted);
  EXPECT_EQ(adapted_modules(with_adapters(all, {.rank = 2, .exclude = {"up"}}, 0)).size(), 3U);
  EXPECT_EQ(adapted_modules(with_adapters(all, {.rank = 2, .target_pattern = "blocks\\.[01]\\.up"}, 0)),
            (std::vector<std::string>{"blocks.0.up", "blocks.1.up"}));
  EXPECT_EQ(adapted_modules(with_adapters(all, {.rank = 2, .targets = {"head.out"}}, 0)),
            (std::vector<std::string>{"head.out"}));
  for (const std::string& name : trained(with_trainable(all, {.last_layers = 2})))
    EXPECT_TRUE(name.starts_with("blocks.1.") || name.starts_with("blocks.2.")) << name;
  EXPECT_EQ(trained(with_trainable(all, {.trainable = {"out"}})),
            (std::vector<std::string>{"head.out.weight", "head.out.bias"}));
  // Twice the rate of everything is twice the rate.
  const auto run_of = [](const Model& model, double lr) {
    Session session(model, resident(2));
    for (int step = 0; step < 3; ++step) session.step(batches(2, step), lr);
    return masters_of(session);
  };
  EXPECT_TRUE(run_of(with_learning_rates(all, {{".", 2}}), 1e-3) == run_of(all, 2e-3));
  EXPECT_FALSE(run_of(with_learning_rates(all, {{"blocks", 2}}), 1e-3) == run_of(all, 2e-3));
}

TEST(OwnLayers, WhatCannotBeDoneIsSaid) {
  struct Plain : Layer {
    torch::nn::Linear product = register_module("product", torch::nn::Linear(kWidth, kWidth));
    Carry forward(const Carry& carry, const Shared&) override { return {product(carry[0])}; }
  };
  const Model model = layers().build();
  const auto expect_refused = [](const Model& model, const AdapterConfig& config, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { with_adapters(model, config, 0); });
  };
  expect_refused(model, {.targets = {"q_proj"}}, "no linear layer is called q_proj");
  expect_refused(model, {.targets = {"table"}}, "embed.table is no tierflow::Linear");
  expect_refused(model, {.layers = {0}}, "have names, not numbers");
  expect_refused(model, {.init = AdapterInit::galore}, "projected gradients are for the models of load()");
  const Model plain = Layers()
                          .add("embed", [] { return std::make_shared<Table>(); })
                          .add("plain", [] { return std::make_shared<Plain>(); })
                          .add("head", [] { return std::make_shared<Loss>(); })
                          .build();
  expect_refused(plain, {}, "no layer but the last has a tierflow::Linear");
  expect_refused(plain, {.targets = {"product"}}, "plain.product is no tierflow::Linear");
  expect_refusal(io::ErrorKind::usage, {"no tensor has \"nothing\" in its name"},
                 [&] { with_trainable(model, {.freeze = {"nothing"}}); });
  // Of a torch::nn::Linear the weight can be stored in fewer bytes all the same; a table stays as it is.
  const Model stored = with_base_format(plain, WeightFormat::nf4);
  for (const UnitSpec& unit : stored.spec().units)
    for (const TensorSpec& tensor : unit.tensors)
      EXPECT_EQ(tensor.format == WeightFormat::nf4, tensor.name == "plain.product.weight") << tensor.name;
}

TEST(OwnLayers, TheFolderIsReadAgainOverABaseFromAFolder) {
  const Folder folder;
  const std::filesystem::path base = folder.path / "base", adapter = folder.path / "adapter";
  const auto loss_of = [](const Model& model) {
    Session session(model, resident(2));
    return session.evaluate(batches(2, 7)).loss;
  };
  double trained_base = 0, adapted = 0;
  {
    Session session(layers().build(9), resident(2));
    for (int step = 0; step < 3; ++step) session.step(batches(2, step), 1e-2);
    trained_base = session.evaluate(batches(2, 7)).loss;
    session.export_hf(base);
  }
  const Model loaded = layers().load(base);
  EXPECT_EQ(loss_of(loaded), trained_base);
  {
    Session session(with_adapters(loaded, {.rank = 4, .alpha = 8}, 5), resident(2));
    EXPECT_EQ(session.evaluate(batches(2, 7)).loss, trained_base);  // B begins with zeros
    for (int step = 0; step < kSteps; ++step) session.step(batches(2, step), 1e-2);
    adapted = session.evaluate(batches(2, 7)).loss;
    session.export_adapter(adapter, base);
  }
  EXPECT_NE(adapted, trained_base);
  EXPECT_EQ(loss_of(with_adapters(loaded, adapter)), adapted);
  std::ifstream file(adapter / "adapter_config.json");
  const std::string config((std::istreambuf_iterator<char>(file)), {});
  for (const std::string& module : kAdapted) EXPECT_NE(config.find('"' + module + '"'), std::string::npos) << config;
  Layers other;
  other.add("embed", [] { return std::make_shared<Table>(); }).add("head", [] { return std::make_shared<Loss>(); });
  expect_refusal(io::ErrorKind::input, {"blocks.0.norm.bias is not a parameter of the model"},
                 [&] { other.load(base); });
}

}  // namespace
}  // namespace tierflow::testing
