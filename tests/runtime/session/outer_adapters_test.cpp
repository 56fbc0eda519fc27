// Adapters beside the head and the table of tokens, whole and in tiles: the same bits in memory and from storage, and
// what they are without tiles.
#include <gtest/gtest.h>

#include "runtime/models/causal_model.h"
#include "runtime/session/session.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 4;
const AdapterConfig kOuter{.rank = 4, .alpha = 8, .targets = {"q_proj", "lm_head", "embed_tokens"}};
const Tiling kTiles{.vocabulary_elements = 32 * 40};  // three of each

Model adapted(const Tiling& tiling, const AdapterConfig& config = kOuter, const std::string& more = "") {
  const ModelSpec spec = parse_model_spec(llama_json("GraniteForCausalLM", R"(, "embedding_multiplier": 3.0,
    "logits_scaling": 2.0)" + more),
                                          "granite", tiling);
  return with_adapters({make_model(spec), initial(11)}, config, 5);
}

struct Steps {
  std::vector<double> losses;
  std::vector<std::vector<float>> first, masters;
};

Steps trained(const Model& model, const SessionOptions& options, const AdamW& adamw = {.weight_decay = 0.1},
              double lr = 1e-2) {
  Session session(model, options, adamw);
  Steps run{.first = masters_of(session)};
  for (int step = 0; step < kSteps; ++step) run.losses.push_back(session.step(batches(2, step), lr).loss);
  run.losses.push_back(session.evaluate(batches(2, 50)).loss);
  run.masters = masters_of(session);
  std::size_t i = 0;
  for (const UnitSpec& unit : model.spec().units)
    for (const TensorSpec& tensor : unit.tensors) {
      EXPECT_EQ(run.masters[i] == run.first[i], !tensor.trainable) << tensor.name;
      EXPECT_EQ(tensor.trainable, is_adapter(tensor)) << tensor.name;
      ++i;
    }
  return run;
}

class OuterAdapters : public ::testing::TestWithParam<bool> {
 protected:
  Tiling tiling() const { return GetParam() ? kTiles : Tiling{}; }
};

TEST_P(OuterAdapters, StreamedIsResident) {
  for (const double dropout : {0.0, 0.3}) {
    AdapterConfig config = kOuter;
    config.dropout = dropout;
    const Model model = adapted(tiling(), config);
    const Folder folder;
    SessionOptions options = streamed(resident(2), folder);
    options.chaos_seed = 7;
    const Steps expected = trained(model, resident(2)), found = trained(model, options);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_TRUE(found.masters == expected.masters);
  }
}

TEST_P(OuterAdapters, AreWhereTheyBelong) {
  const Model model = adapted(tiling());
  std::map<std::string, std::vector<std::int64_t>> rows;
  for (const UnitSpec& unit : model.spec().units)
    for (const TensorSpec& tensor : unit.tensors)
      if (is_adapter(tensor) && tensor.name.find("q_proj") == std::string::npos)
        rows[tensor.name].push_back(tensor.shape.front());
  const std::vector<std::int64_t> all =
      GetParam() ? std::vector<std::int64_t>{32, 32, 32} : std::vector<std::int64_t>{96};
  const std::map<std::string, std::vector<std::int64_t>> expected{
      {"base_model.model.lm_head.lora_A.weight", {4}},
      {"base_model.model.lm_head.lora_B.weight", all},
      {"base_model.model.model.embed_tokens.lora_embedding_A", all},
      {"base_model.model.model.embed_tokens.lora_embedding_B", {32}}};
  EXPECT_EQ(rows, expected);
}

INSTANTIATE_TEST_SUITE_P(Tiles, OuterAdapters, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "tiled" : "whole"); });

// Where the masters of a tensor have come from their first values.
std::vector<float> moved(const Model& model, const Steps& run, const std::string& name) {
  std::size_t i = 0;
  for (const UnitSpec& unit : model.spec().units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (tensor.name.ends_with(name)) {
        std::vector<float> way = run.masters[i];
        for (std::size_t at = 0; at < way.size(); ++at) way[at] -= run.first[i][at];
        return way;
      }
      ++i;
    }
  return {};
}

// A model's tensors, tiles put together, by name.
std::map<std::string, torch::Tensor> by_name(const ResidentModel& model,
                                             const std::vector<std::vector<torch::Tensor>>& units) {
  std::map<std::string, std::vector<torch::Tensor>> parts;
  for (std::size_t u = 0; u < units.size(); ++u)
    for (std::size_t t = 0; t < units[u].size(); ++t)
      if (units[u][t].defined()) parts[model.spec().units[u].tensors[t].name].push_back(units[u][t]);
  std::map<std::string, torch::Tensor> whole;
  for (const auto& [name, tensors] : parts) whole[name] = torch::cat(tensors);
  return whole;
}

ResidentModel with_values(const ModelSpec& spec, torch::ScalarType type,
                          const std::map<std::string, torch::Tensor>& values) {
  ResidentModel model(spec, type);
  for (std::size_t u = 0; u < model.units.size(); ++u)
    for (std::size_t t = 0; t < model.units[u].size(); ++t) {
      const TensorSpec& tensor = spec.units[u].tensors[t];
      model.units[u][t].copy_(values.at(tensor.name).narrow(0, tensor.first_row, tensor.shape.front()));
    }
  return model;
}

// Of one micro-batch, against what follows from the gradients of merged weights W + s B A (of the table: W + s A B^T).
TEST(OuterAdaptersInTiles, HaveTheGradientsOfMergedWeights) {
  const ModelSpec whole_spec = adapted(Tiling{}).spec(), tiled_spec = adapted(kTiles).spec();
  const std::string head = "base_model.model.lm_head.", table = "base_model.model.model.embed_tokens.";
  const double scale = 2.0;  // alpha / rank
  for (const auto type : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    ResidentModel first(whole_spec, type);
    first.randomise(17);
    const std::map<std::string, torch::Tensor> values = by_name(first, first.units);
    const auto value = [&](const std::string& name) { return values.at(name).to(torch::kDouble); };
    std::map<std::string, torch::Tensor> merged;
    for (const auto& [name, tensor] : values) {
      if (name.starts_with("base_model.")) continue;
      merged[name] = tensor.to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
      const std::string module = "base_model.model." + name.substr(0, name.rfind('.'));
      if (values.contains(module + ".lora_A.weight"))
        merged[name] += scale * torch::mm(value(module + ".lora_B.weight"), value(module + ".lora_A.weight"));
      if (values.contains(module + ".lora_embedding_A"))
        merged[name] += scale * torch::mm(value(module + ".lora_embedding_A"), value(module + ".lora_embedding_B").t());
    }
    ModelSpec base = whole_spec;
    for (UnitSpec& unit : base.units) std::erase_if(unit.tensors, is_adapter);
    ResidentModel one = with_values(base, torch::kDouble, merged);
    const MicroBatch tokens = batch(3, 40);
    const double loss = one.forward_backward(tokens, 0.25);
    const std::map<std::string, torch::Tensor> d = by_name(one, one.gradients);
    const torch::Tensor d_head = scale * d.at("lm_head.weight"), d_table = scale * d.at("model.embed_tokens.weight");
    const std::map<std::string, torch::Tensor> expected{
        {head + "lora_A.weight", torch::mm(value(head + "lora_B.weight").t(), d_head)},
        {head + "lora_B.weight", torch::mm(d_head, value(head + "lora_A.weight").t())},
        {table + "lora_embedding_A", torch::mm(d_table, value(table + "lora_embedding_B"))},
        {table + "lora_embedding_B", torch::mm(d_table.t(), value(table + "lora_embedding_A"))}};
    std::map<std::string, torch::Tensor> in_whole;
    for (const ModelSpec* spec : {&whole_spec, &tiled_spec}) {
      ResidentModel model = with_values(*spec, type, values);
      const double found_loss = model.forward_backward(tokens, 0.25);
      const std::map<std::string, torch::Tensor> found = by_name(model, model.gradients);
      const double exact = type == torch::kDouble ? 1e-11 : type == torch::kFloat ? 1e-5 : 2e-2;
      EXPECT_NEAR(found_loss, loss, exact * loss);
      for (const auto& [name, gradient] : expected)
        // What bf16 rounds on the way is the same, but for the sums of tiles.
        EXPECT_LT(relative_error(found.at(name),
                                 type == torch::kBFloat16 && !in_whole.empty() ? in_whole.at(name) : gradient),
                  type == torch::kBFloat16 && in_whole.empty() ? 0.2 : exact)
            << name << (spec == &tiled_spec ? " in tiles, " : ", ") << type;
      in_whole = found;
    }
  }
}

// Tiles round sums of gradients elsewhere; what they compute is the same. Where AdamW's eps is far above the gradients
// a weight's way is a multiple of them. With the usual one it is their signs: of the few that rounding turns, all of
// it.
TEST(OuterAdaptersInTiles, TakeTheCourseOfWholeOnes) {
  const Model one = adapted(Tiling{}), three = adapted(kTiles);
  const AdamW proportional{.eps = 1};
  const Steps whole = trained(one, resident(2), proportional, 0.5),
              tiled = trained(three, resident(2), proportional, 0.5);
  for (std::size_t i = 0; i < whole.losses.size(); ++i)
    EXPECT_NEAR(tiled.losses[i], whole.losses[i], 2e-3 * whole.losses[i]);
  for (const char* name : {"lm_head.lora_A.weight", "lora_embedding_B"}) {  // the sums of what all tiles add
    const std::vector<float> way = moved(one, whole, name), other = moved(three, tiled, name);
    ASSERT_EQ(way.size(), other.size());
    double apart = 0, far = 0;
    for (std::size_t i = 0; i < way.size(); ++i) {
      apart += (way[i] - other[i]) * (way[i] - other[i]);
      far += way[i] * way[i];
    }
    EXPECT_LT(apart, 3e-3 * far) << name;
  }
}

// A frozen model's adapters are learnt with: the loss of a repeated batch falls further than without them.
TEST(OuterAdaptersInTiles, LearnARepeatedBatch) {
  for (const char* target : {"lm_head", "embed_tokens"}) {
    AdapterConfig config = kOuter;
    config.targets = {target};
    Session session(adapted(kTiles, config), resident(2));
    std::vector<double> losses;
    for (int step = 0; step < 30; ++step) losses.push_back(session.step(batches(2, 0), 2e-2).loss);
    EXPECT_LT(losses.back(), 0.9 * losses.front()) << target;
  }
}

}  // namespace
}  // namespace tierflow::testing
