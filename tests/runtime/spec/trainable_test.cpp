#include "runtime/spec/trainable.h"

#include <gmock/gmock.h>

#include "runtime/spec/adapters.h"
#include "runtime/spec/packing.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/spec/small_llama.h"

namespace tierflow {
namespace {

using ::testing::ElementsAre;
using testing::expect_refusal;
using testing::small_llama;

std::vector<std::string> trained(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (tensor.trainable) names.push_back(tensor.name);
  return names;
}
std::vector<std::string> trained_by(const TrainableConfig& config) {
  ModelSpec spec = small_llama();
  set_trainable(spec, config);
  ModelSpec again = small_llama();
  if (!spec.trainable_json.empty()) set_trainable_again(again, spec.trainable_json);
  EXPECT_EQ(trained(again), trained(spec));
  return trained(spec);
}

TEST(Trainable, ByNameByWhatIsLeftOutAndByLayers) {
  EXPECT_EQ(trained_by({}).size(), 3U * 9 + 3);
  EXPECT_THAT(trained_by({.trainable = {"embed_tokens"}}), ElementsAre("model.embed_tokens.weight"));
  EXPECT_THAT(trained_by({.trainable = {"layers\\.[02]\\..*q_proj", "lm_head"}}),
              ElementsAre("model.layers.0.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight",
                          "lm_head.weight"));
  EXPECT_THAT(trained_by({.trainable = {"layers\\.1"}, .freeze = {"_proj", "input_"}}),
              ElementsAre("model.layers.1.post_attention_layernorm.weight"));
  const auto last = trained_by({.last_layers = 2});
  EXPECT_EQ(last.size(), 2U * 9);
  for (const std::string& name : last)
    EXPECT_TRUE(name.starts_with("model.layers.1.") || name.starts_with("model.layers.2."));
}

TEST(Trainable, WhatCannotBeIsRefused) {
  const auto expect_refused = [](const TrainableConfig& config, std::string_view words) {
    ModelSpec spec = small_llama();
    expect_refusal(io::ErrorKind::usage, {words}, [&] { set_trainable(spec, config); });
  };
  expect_refused({.trainable = {"lm_head", "wte"}}, "no tensor has \"wte\" in its name; there are");
  expect_refused({.freeze = {"wte"}}, "model.embed_tokens.weight, model.layers.0.self_attn.q_proj");
  expect_refused({.freeze = {"."}}, "no tensor is left");
  expect_refused({.freeze = {"("}}, "no regular expression");
  expect_refused({.freeze = {std::string(1001, 'x')}}, "longer than 1000");
  expect_refused({.last_layers = 4}, "the model has 3");
}

TEST(Trainable, LearningRatesByName) {
  ModelSpec spec = small_llama();
  set_learning_rates(spec, {{"q_proj", 2}, {"layers\\.0", 0.5}});
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const bool q = tensor.name.find("q_proj") != std::string::npos;
      const bool first = tensor.name.find("layers.0") != std::string::npos;
      EXPECT_EQ(tensor.lr_scale, q ? 2 : first ? 0.5 : 1) << tensor.name;
    }
  const PackedModel packed = pack(spec, Precision::fp32_master_adam8);
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (const PackedTensor& tensor : packed.units[unit].tensors)
      EXPECT_EQ(tensor.lr_scale, spec.units[unit].tensors[static_cast<std::size_t>(tensor.tensor)].lr_scale);
  EXPECT_THROW(set_learning_rates(spec, {{"wte", 2}}), Exception);
  EXPECT_THROW(set_learning_rates(spec, {{"q_proj", -1}}), Exception);
  // Of adapters, the frozen base is not asked.
  ModelSpec adapted = small_llama();
  add_adapters(adapted, {.rank = 2});
  set_learning_rates(adapted, {{"lora_B", 16}});
  EXPECT_THROW(set_learning_rates(adapted, {{"q_proj\\.weight", 16}}), Exception);
}

}  // namespace
}  // namespace tierflow
