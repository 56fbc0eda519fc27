// What the families of mixtures make of their config.json: transformers' defaults, and each field.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runtime/spec/model_spec.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using Json = nlohmann::json;

Json config(const std::string& name) {
  return {{"architectures", {name}},  {"vocab_size", 64},       {"hidden_size", 32},
          {"intermediate_size", 48},  {"num_hidden_layers", 3}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"head_dim", 8},          {"max_position_embeddings", 64}};
}
ModelConfig read(const std::string& name, const Json& more = Json::object()) {
  Json all = config(name);
  all.update(more);
  return parse_model_spec(all.dump(), "config.json").config;
}
void refused(std::initializer_list<std::string_view> words, const std::string& name, const Json& more) {
  testing::expect_refusal(io::ErrorKind::input, words, [&] { read(name, more); });
}
std::vector<bool> sparse(const ModelConfig& c) {
  std::vector<bool> layers;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) layers.push_back(c.layer(layer).experts);
  return layers;
}

TEST(ExpertFamilies, HaveTheNumbersOfTransformersWhereTheConfigSaysNothing) {
  struct Expected {
    const char* name;
    std::int64_t count, per_token, width, shared_width;
    bool normalised, shared_gate, rounded;
  };
  for (const Expected& each : {Expected{"MixtralForCausalLM", 8, 2, 48, 0, true, false, false},
                               Expected{"Qwen2MoeForCausalLM", 60, 4, 1408, 5632, false, true, true},
                               Expected{"Qwen3MoeForCausalLM", 128, 8, 768, 0, false, false, true},
                               Expected{"OlmoeForCausalLM", 64, 8, 48, 0, false, false, true},
                               Expected{"Glm4MoeForCausalLM", 128, 8, 1408, 1408, true, false, false},
                               Expected{"GraniteMoeForCausalLM", 8, 2, 48, 0, true, false, true},
                               Expected{"GptOssForCausalLM", 128, 4, 48, 0, true, false, true},
                               Expected{"Llama4ForCausalLM", 16, 1, 48, 48, false, false, true}}) {
    const ExpertsSpec experts = read(each.name).experts;
    EXPECT_EQ(experts.count, each.count) << each.name;
    EXPECT_EQ(experts.per_token, each.per_token) << each.name;
    EXPECT_EQ(experts.width, each.width) << each.name;
    EXPECT_EQ(experts.shared_width, each.shared_width) << each.name;
    EXPECT_EQ(experts.normalised, each.normalised) << each.name;
    EXPECT_EQ(experts.shared_gate, each.shared_gate) << each.name;
    EXPECT_EQ(experts.rounded, each.rounded) << each.name;
    const bool glm = experts.corrected;
    EXPECT_EQ(glm, std::string(each.name) == "Glm4MoeForCausalLM");
    EXPECT_EQ(sparse(read(each.name)), (std::vector<bool>{!glm, true, true})) << each.name;  // its first layer is dense
  }
}

TEST(ExpertFamilies, TakeTheirNumberByAnyOfItsNamesAndByOneAlone) {
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"})
    EXPECT_EQ(read("Qwen3MoeForCausalLM", {{name, 16}}).experts.count, 16) << name;
  EXPECT_EQ(read("Qwen3MoeForCausalLM", {{"num_experts", 16}, {"num_local_experts", 16}}).experts.count, 16);
  refused({"num_local_experts", "is 8; by another name it is 16"}, "Qwen3MoeForCausalLM",
          {{"num_experts", 16}, {"num_local_experts", 8}});
  EXPECT_EQ(read("MixtralForCausalLM", {{"num_experts_per_tok", 8}}).experts.per_token, 8);
  refused({"num_experts_per_tok", "is 9, more than the 8 experts"}, "MixtralForCausalLM", {{"num_experts_per_tok", 9}});
}

// Only where its config asks for it; without a coefficient that of its class.
TEST(ExpertFamilies, TrainWithTheLoadBalancingLossThatTheyAskFor) {
  for (const char* name : {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GraniteMoeForCausalLM",
                           "OlmoeForCausalLM", "Glm4MoeForCausalLM", "Llama4ForCausalLM"}) {
    const bool none = std::string_view(name) == "Glm4MoeForCausalLM" || std::string_view(name) == "Llama4ForCausalLM",
               olmoe = std::string_view(name) == "OlmoeForCausalLM";
    EXPECT_EQ(read(name, {{"router_aux_loss_coef", 0.5}}).experts.balance, 0) << name;
    EXPECT_EQ(read(name, {{"output_router_logits", true}}).experts.balance, none ? 0 : olmoe ? 0.01 : 0.001) << name;
    EXPECT_EQ(read(name, {{"output_router_logits", true}, {"router_aux_loss_coef", 0.5}}).experts.balance,
              none ? 0 : 0.5)
        << name;
    refused({"router_aux_loss_coef"}, name, {{"router_aux_loss_coef", -0.5}});
    refused({"output_router_logits"}, name, {{"output_router_logits", 1}});
  }
}

TEST(ExpertFamilies, OfQwenMayHaveDenseLayers) {
  for (const char* name : {"Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}) {
    EXPECT_EQ(sparse(read(name, {{"decoder_sparse_step", 2}})), (std::vector<bool>{false, true, false}));
    EXPECT_EQ(sparse(read(name, {{"mlp_only_layers", {2, 0}}})), (std::vector<bool>{false, true, false}));
    EXPECT_TRUE(read(name, {{"norm_topk_prob", true}}).experts.normalised);
    EXPECT_EQ(read(name, {{"moe_intermediate_size", 16}}).experts.width, 16);
    refused({"mlp_only_layers", "none of the layers 0 to 2"}, name, {{"mlp_only_layers", {3}}});
    refused({"mlp_only_layers", "none of the layers 0 to 2"}, name, {{"mlp_only_layers", {-1}}});
    refused({"mlp_only_layers", "must be a list"}, name, {{"mlp_only_layers", 1}});
    refused({"use_sliding_window"}, name, {{"use_sliding_window", true}});
  }
  EXPECT_TRUE(read("Qwen2MoeForCausalLM").qkv_bias);
  EXPECT_FALSE(read("Qwen2MoeForCausalLM", {{"qkv_bias", false}}).qkv_bias);
  EXPECT_EQ(read("Qwen2MoeForCausalLM", {{"shared_expert_intermediate_size", 24}}).experts.shared_width, 24);
}

TEST(ExpertFamilies, OfGlmChooseAmongGroups) {
  const auto glm = [](const Json& more) { return read("Glm4MoeForCausalLM", more); };
  const ModelConfig plain = glm(Json::object());
  EXPECT_TRUE(plain.experts.corrected);
  EXPECT_EQ(plain.experts.scale, 1);
  EXPECT_FALSE(plain.qkv_bias);
  EXPECT_EQ(plain.qk_norm, QkNorm::none);
  const ModelConfig c = glm({{"n_routed_experts", 16},
                             {"n_group", 4},
                             {"topk_group", 2},
                             {"routed_scaling_factor", 2.5},
                             {"norm_topk_prob", false},
                             {"moe_intermediate_size", 10},
                             {"n_shared_experts", 3},
                             {"first_k_dense_replace", 2},
                             {"attention_bias", true},
                             {"use_qk_norm", true}});
  EXPECT_EQ(c.experts.groups, 4);
  EXPECT_EQ(c.experts.groups_taken, 2);
  EXPECT_EQ(c.experts.scale, 2.5);
  EXPECT_FALSE(c.experts.normalised);
  EXPECT_EQ(c.experts.shared_width, 30);
  EXPECT_EQ(sparse(c), (std::vector<bool>{false, false, true}));
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_EQ(c.qk_norm, QkNorm::head);
  EXPECT_EQ(sparse(glm({{"first_k_dense_replace", 9}})), (std::vector<bool>{false, false, false}));
  refused({"n_group", "is 3, of 16 experts"}, "Glm4MoeForCausalLM", {{"n_routed_experts", 16}, {"n_group", 3}});
  refused({"num_experts_per_tok", "is 8, more than the experts of topk_group groups"}, "Glm4MoeForCausalLM",
          {{"n_routed_experts", 16}, {"n_group", 4}, {"topk_group", 1}});
}

TEST(ExpertFamilies, WhatWouldBeComputedOtherwiseIsRefused) {
  refused({"router_jitter_noise", "other than 0 is not supported"}, "MixtralForCausalLM",
          {{"router_jitter_noise", 0.1}});
  EXPECT_NO_THROW(read("MixtralForCausalLM", {{"router_jitter_noise", 0.0}}));
  refused({"clip_qkv", "is not supported"}, "OlmoeForCausalLM", {{"clip_qkv", 8.0}});
  EXPECT_NO_THROW(read("OlmoeForCausalLM", {{"clip_qkv", nullptr}}));
}

TEST(ExpertFamilies, OfLlama4AttendInChunksWhereTheyHavePositions) {
  const auto layers = [](const ModelConfig& c) {
    std::vector<std::pair<std::int64_t, int>> all;
    for (std::int64_t layer = 0; layer < c.layers; ++layer) all.emplace_back(c.layer(layer).chunk, c.layer(layer).rope);
    return all;
  };
  const auto llama4 = [](const Json& more) { return read("Llama4ForCausalLM", more); };
  using Layers = std::vector<std::pair<std::int64_t, int>>;
  const ModelConfig plain = llama4(Json::object());
  EXPECT_EQ(layers(plain), (Layers{{8192, 0}, {8192, 0}, {8192, 0}}));
  EXPECT_EQ(plain.qk_norm, QkNorm::rotated_unweighted);
  EXPECT_EQ(plain.intermediate_size, 16384);
  EXPECT_EQ(plain.experts.shared_width, 48);
  EXPECT_EQ(layers(llama4({{"no_rope_layer_interval", 2}, {"attention_chunk_size", 16}})),
            (Layers{{16, 0}, {0, -1}, {16, 0}}));
  EXPECT_EQ(layers(llama4({{"no_rope_layers", {0, 1, 1}},
                           {"layer_types", {"chunked_attention", "full_attention", "chunked_attention"}}})),
            (Layers{{8192, -1}, {0, 0}, {8192, 0}}));
  EXPECT_EQ(layers(llama4({{"no_rope_layers", Json::array()}})), layers(plain));
  EXPECT_EQ(sparse(plain), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(sparse(llama4({{"interleave_moe_layer_step", 2}})), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(sparse(llama4({{"moe_layers", {0, 2}}, {"interleave_moe_layer_step", 2}})),
            (std::vector<bool>{true, false, true}));
  EXPECT_EQ(sparse(llama4({{"moe_layers", Json::array()}})), (std::vector<bool>{false, false, false}));
  for (const Json& on : {Json(true), Json(4)})
    EXPECT_EQ(llama4({{"attn_temperature_tuning", on}}).query_scaling.strength, 0.1);
  for (const Json& off : {Json(false), Json(0)})
    EXPECT_EQ(llama4({{"attn_temperature_tuning", off}}).query_scaling.strength, 0);
  refused({"attention_chunk_size", "is null"}, "Llama4ForCausalLM", {{"attention_chunk_size", nullptr}});
  refused({"layer_types", "full_attention and chunked_attention only"}, "Llama4ForCausalLM",
          {{"layer_types", {"sliding_attention", "full_attention", "full_attention"}}});
  refused({"moe_layers", "none of the layers 0 to 2"}, "Llama4ForCausalLM", {{"moe_layers", {3}}});
  refused({"no_rope_layers", "each of the 3 layers"}, "Llama4ForCausalLM", {{"no_rope_layers", {1}}});
}

TEST(ExpertFamilies, OfGptOssHaveABoundedGate) {
  const ExpertsSpec plain = read("GptOssForCausalLM").experts;
  EXPECT_TRUE(plain.biases);
  EXPECT_TRUE(plain.transposed);
  EXPECT_EQ(plain.clamped.sharpness, 1.702);
  EXPECT_EQ(plain.clamped.limit, 7);
  const ExpertsSpec other = read("GptOssForCausalLM", {{"swiglu_alpha", 1.5}, {"swiglu_limit", 3.0}}).experts;
  EXPECT_EQ(other.clamped.sharpness, 1.5);
  EXPECT_EQ(other.clamped.limit, 3);
}

}  // namespace
}  // namespace tierflow
