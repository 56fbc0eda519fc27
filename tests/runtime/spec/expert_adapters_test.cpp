// Adapters of experts' parameters: which there are, what they are called and shaped here and in PEFT's folder, and what
// is refused.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/spec/adapters.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/spec/small_llama.h"

namespace tierflow {
namespace {

using ::testing::ElementsAre;
using testing::expect_refusal;
using ::testing::IsEmpty;
using testing::small_llama;

ModelSpec model(const std::string& name, const std::string& more, const Tiling& tiling = {}) {
  return parse_model_spec(R"({"architectures": [")" + name + R"("], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2)" +
                              more + "}",
                          name, tiling);
}
ModelSpec mixtral(const Tiling& tiling = {}) {
  return model("MixtralForCausalLM", "", tiling);
}

std::vector<const TensorSpec*> adapters_of(const ModelSpec& spec) {
  std::vector<const TensorSpec*> found;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (is_expert_adapter(tensor)) found.push_back(&tensor);
  return found;
}

std::vector<std::string> names_of(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const TensorSpec* tensor : adapters_of(spec)) names.push_back(name_beside_base(*tensor));
  return names;
}

TEST(ExpertAdapters, HaveNamesAndShapesOfPeft) {
  ModelSpec spec = mixtral();
  add_adapters(spec, {.rank = 3, .alpha = 6, .parameters = {"mlp.experts.gate_up_proj", "experts.down_proj"}});
  const auto all = adapters_of(spec);
  ASSERT_EQ(all.size(), 8U);
  // Of two wrappers around one module the first parameter's is the inner one.
  EXPECT_EQ(name_beside_base(*all[0]), "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight");
  EXPECT_EQ(name_beside_base(*all[3]), "base_model.model.model.layers.0.mlp.experts.lora_B.weight");
  EXPECT_EQ(linear_module(*all[0]), "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(linear_module(*all[2]), "model.layers.0.mlp.experts.down_proj");
  EXPECT_THAT(all[0]->shape, ElementsAre(4, 3, 32));
  EXPECT_THAT(all[1]->shape, ElementsAre(4, 48, 3));
  EXPECT_THAT(shape_beside_base(*all[0]), ElementsAre(12, 32));
  EXPECT_THAT(shape_beside_base(*all[1]), ElementsAre(48, 12));
  EXPECT_THAT(shape_beside_base(*all[2]), ElementsAre(12, 24));
  EXPECT_THAT(shape_beside_base(*all[3]), ElementsAre(32, 12));
  EXPECT_EQ(all[0]->init, Init::uniform);
  EXPECT_DOUBLE_EQ(all[2]->init_std * std::sqrt(3.0), 1 / std::sqrt(24.0));
  EXPECT_EQ(all[1]->init, Init::zeros);
  EXPECT_EQ(all[1]->scale, 2.0);
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) EXPECT_EQ(tensor.trainable, is_adapter(tensor)) << tensor.name;
  const auto json = nlohmann::json::parse(adapter_config_beside_base(spec));
  EXPECT_EQ(json["target_parameters"], (std::vector<std::string>{"mlp.experts.gate_up_proj", "experts.down_proj"}));
  EXPECT_EQ(json["target_modules"], (std::vector<std::string>{"k_proj", "o_proj", "q_proj", "v_proj"}));
}

TEST(ExpertAdapters, OfMatricesThatPeftTakesTheOtherWayRoundAreRefused) {
  ModelSpec spec = model("Llama4ForCausalLM", "");
  expect_refusal(io::ErrorKind::usage,
                 {"adapters on model.layers.0.feed_forward.experts.down_proj are not supported", "Llama4ForCausalLM"},
                 [&] { add_adapters(spec, {.parameters = {"experts.down_proj"}}); });
}

TEST(ExpertAdapters, AloneAreWrappedOnce) {
  ModelSpec spec = mixtral();
  add_adapters(spec, {.rank = 3, .parameters = {"layers.1.mlp.experts.gate_up_proj"}, .parameters_alone = true});
  EXPECT_THAT(names_of(spec), ElementsAre("base_model.model.model.layers.1.mlp.experts.lora_A.weight",
                                          "base_model.model.model.layers.1.mlp.experts.lora_B.weight"));
  EXPECT_EQ(spec.units[2].name, "layers.0.mlp");
  EXPECT_EQ(spec.units[2].tensors.size(), mixtral().units[2].tensors.size());
  EXPECT_THAT(nlohmann::json::parse(spec.adapter_config_json)["target_modules"], IsEmpty());
  const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
  EXPECT_TRUE(read.parameters_alone);
  ModelSpec again = mixtral();
  add_adapters(again, read);
  EXPECT_EQ(names_of(again), names_of(spec));
}

// A stage has the factors of its experts, as rows of the folder's tensors.
TEST(ExpertAdapters, LieWithTheirExperts) {
  ModelSpec spec = mixtral({.block_elements = 1, .experts = 3});
  add_adapters(spec, {.rank = 2, .parameters = {"down_proj"}, .parameters_alone = true});
  const auto all = adapters_of(spec);
  ASSERT_EQ(all.size(), 8U);
  EXPECT_THAT(all[0]->shape, ElementsAre(3, 2, 24));
  EXPECT_THAT(all[2]->shape, ElementsAre(1, 2, 24));
  EXPECT_EQ(all[2]->name, all[0]->name);
  EXPECT_EQ(all[2]->first_element(), 3 * 2 * 24);
  EXPECT_EQ(all[3]->first_element(), 3 * 32 * 2);
  for (const TensorSpec* tensor : all)
    EXPECT_EQ(shape_beside_base(*tensor)[0], adapter_part(*tensor) == AdapterPart::a ? 8 : 32);
}

TEST(ExpertAdapters, PatternsAreForTheParametersPath) {
  ModelSpec spec = mixtral();
  add_adapters(spec, {.rank = 4,
                      .alpha = 8,
                      .rank_stabilised = true,
                      .parameters = {"gate_up_proj", "down_proj"},
                      .layers = {0},
                      .rank_pattern = {{".*\\.gate_up_proj", 9}},
                      .alpha_pattern = {{"layers.1.mlp.experts.down_proj", 2}}});
  const auto all = adapters_of(spec);
  ASSERT_EQ(all.size(), 8U);  // `layers` is for modules
  EXPECT_THAT(all[0]->shape, ElementsAre(4, 9, 32));
  EXPECT_EQ(all[1]->scale, 8 / 3.0);
  EXPECT_EQ(all[3]->scale, 8 / 2.0);
  EXPECT_EQ(all[7]->scale, 2 / 2.0);
}

TEST(ExpertAdapters, AreCalledAsTransformersHasThem) {
  for (const auto& [name, module] : {std::pair{"MixtralForCausalLM", "mlp"},
                                     {"OlmoeForCausalLM", "mlp"},
                                     {"GptOssForCausalLM", "mlp"},
                                     {"GraniteMoeForCausalLM", "block_sparse_moe"}}) {
    ModelSpec spec = model(name, R"(, "head_dim": 8)");
    add_adapters(spec, {.rank = 2, .parameters = {"down_proj"}});
    EXPECT_EQ(names_of(spec)[0], "base_model.model.model.layers.0." + std::string(module) + ".experts.lora_A.weight");
  }
}

// The weight of a linear layer is a parameter, too.
TEST(ExpertAdapters, ALinearLayerMayBeNamedByItsWeight) {
  ModelSpec spec = small_llama(), modules = small_llama();
  add_adapters(spec, {.rank = 4,
                      .alpha = 8,
                      .targets = {"k_proj"},
                      .parameters = {"q_proj.weight"},
                      .layers = {0},
                      .rank_pattern = {{"q_proj", 9}, {"layers.1.self_attn.q_proj.weight", 2}}});
  int of_q = 0;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (adapter_part(tensor) == AdapterPart::a && linear_module(tensor).ends_with("q_proj")) {
        EXPECT_EQ(tensor.shape[0], of_q == 1 ? 2 : 4) << tensor.name;  // patterns see the parameter's path
        ++of_q;
      }
  EXPECT_EQ(of_q, 3);  // in every layer
}

// PEFT takes them for experts' of transformers 4: in the folder they stand as their weights, which are read so.
TEST(ExpertAdapters, LayersThatPeftTakesForExpertsAreNamedByTheirWeights) {
  const auto glm = [] {
    return model("Glm4MoeForCausalLM", R"(, "head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 16)",
                 {.block_elements = 1, .experts = 2});
  };
  const AdapterConfig config{.rank = 4,
                             .alpha = 8,
                             .exclude = {"v_proj"},
                             .parameters = {"experts.down_proj"},
                             .rank_pattern = {{"shared_experts.up_proj", 2}}};
  ModelSpec spec = glm(), again = glm();
  add_adapters(spec, config);
  const auto json = nlohmann::json::parse(adapter_config_beside_base(spec));
  for (const auto& module : json["target_modules"])
    EXPECT_NE(module.get<std::string>().find("self_attn"), std::string::npos);
  EXPECT_EQ(json["target_modules"].size(), 2U * 3);
  EXPECT_THAT(json["target_parameters"].get<std::vector<std::string>>(),
              ::testing::UnorderedElementsAre(
                  "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
                  "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight",
                  "model.layers.1.mlp.shared_experts.up_proj.weight",
                  "model.layers.1.mlp.shared_experts.down_proj.weight", "model.layers.1.mlp.experts.down_proj"));
  add_adapters(again, parse_adapter_config(json.dump(), "x"));
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit) {
    ASSERT_EQ(again.units[unit].tensors.size(), spec.units[unit].tensors.size());
    for (std::size_t i = 0; i < spec.units[unit].tensors.size(); ++i) {
      EXPECT_EQ(again.units[unit].tensors[i].name, spec.units[unit].tensors[i].name);
      EXPECT_EQ(again.units[unit].tensors[i].shape, spec.units[unit].tensors[i].shape);
    }
  }
  EXPECT_EQ(adapter_config_beside_base(again), adapter_config_beside_base(spec));
  // With dropout there is no such way.
  ModelSpec dropped = glm();
  add_adapters(dropped, {.rank = 4, .dropout = 0.1});
  EXPECT_FALSE(nlohmann::json::parse(adapter_config_beside_base(dropped)).contains("target_parameters"));
}

// A base in another format: the adapters stay as they are.
TEST(ExpertAdapters, StayInBf16) {
  ModelSpec spec = mixtral();
  add_adapters(spec, {.rank = 2, .parameters = {"down_proj"}});
  set_base_format(spec, WeightFormat::nf4);
  for (const TensorSpec* tensor : adapters_of(spec)) EXPECT_EQ(tensor->format, WeightFormat::bf16);
}

TEST(ExpertAdapters, WhatCannotBeIsRefused) {
  const auto refused = [](std::initializer_list<std::string_view> what, AdapterConfig config,
                          ModelSpec spec = mixtral()) {
    if (config.parameters.empty()) config.parameters = {"down_proj"};
    expect_refusal(io::ErrorKind::usage, what, [&] { add_adapters(spec, config); });
  };
  refused({"no parameter of experts is called w1", "this model has mlp.experts.down_proj, mlp.experts.gate_up_proj"},
          {.parameters = {"w1", "gate_up_proj"}});
  refused({"no parameter of experts is called q_proj.bias"}, {.parameters = {"q_proj.bias"}});
  refused({"q_proj is a target both as a module and by its weight"}, {.parameters = {"q_proj.weight"}});
  for (const char* router : {"gate.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight"})
    refused({"the target parameter", "is a router's: routers have no adapters here"}, {.parameters = {router}});
  refused({"is a router's"}, {.parameters = {"router.bias"}}, model("GptOssForCausalLM", R"(, "head_dim": 8)"));
  refused({"no parameter of experts and no linear layer's weight in a block is called down_proj",
           "the model has no experts"},
          {}, small_llama());
  refused({"q_proj.weight is a target parameter, and in a module to save"},
          {.parameters = {"q_proj.weight"}, .parameters_alone = true, .saved = {"q_proj"}}, small_llama());
  refused({"the target parameter weight fits model.", "too, which has no adapter: give a longer name"},
          {.parameters = {"weight"}, .parameters_alone = true}, small_llama());
  refused({"have no dropout, in PEFT as here", "0.1"}, {.dropout = 0.1});
  refused({"have no magnitude (DoRA)"}, {.dora = true});
  for (const AdapterInit init : {AdapterInit::pissa, AdapterInit::olora, AdapterInit::lora_ga})
    refused({"begin as \"default\", not as"}, {.init = init});
  ModelSpec spec = mixtral();
  expect_refusal(io::ErrorKind::usage, {"there is nothing to adapt"},
                 [&] { add_adapters(spec, {.parameters_alone = true}); });
}

TEST(ExpertAdapters, OfAFolderAreReadAsPeftWritesThem) {
  const AdapterConfig both = parse_adapter_config(
      R"({"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]})",
      "x");
  EXPECT_THAT(both.parameters, ElementsAre("experts.down_proj"));
  EXPECT_FALSE(both.parameters_alone);
  for (const char* none : {"[]", "null"})
    EXPECT_TRUE(parse_adapter_config(R"({"peft_type": "LORA", "target_modules": )" + std::string(none) +
                                         R"(, "target_parameters": ["experts.down_proj"]})",
                                     "x")
                    .parameters_alone);
  EXPECT_FALSE(parse_adapter_config(R"({"peft_type": "LORA", "target_modules": null, "target_parameters": []})", "x")
                   .parameters_alone);
  expect_refusal(io::ErrorKind::input, {"target_parameters", "is no list of names"},
                 [] { parse_adapter_config(R"({"peft_type": "LORA", "target_parameters": "all"})", "x"); });
}

}  // namespace
}  // namespace tierflow
