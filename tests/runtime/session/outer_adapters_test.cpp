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

Steps trained(const Model& model, const SessionOptions& options) {
  Session session(model, options, {.weight_decay = 0.1});
  Steps run{.first = masters_of(session)};
  for (int step = 0; step < kSteps; ++step) run.losses.push_back(session.step(batches(2, step), 1e-2).loss);
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

// Tiles round sums of gradients elsewhere; what they compute is the same.
TEST(OuterAdaptersInTiles, TakeTheCourseOfWholeOnes) {
  const Model one = adapted(Tiling{}), three = adapted(kTiles);
  const Steps whole = trained(one, resident(2)), tiled = trained(three, resident(2));
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
    EXPECT_LT(apart, 0.1 * far) << name;
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
