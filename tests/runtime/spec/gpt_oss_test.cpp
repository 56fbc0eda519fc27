// gpt-oss-120b from its published config.json alone, and how its experts are published.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/checkpoint/packed_weight.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/spec/active_parameters.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/model_spec.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using Json = nlohmann::json;
using Shape = std::vector<std::int64_t>;

Json published() {
  Json types = Json::array();
  for (int layer = 0; layer < 36; ++layer) types.push_back(layer % 2 == 0 ? "sliding_attention" : "full_attention");
  return {
      {"architectures", {"GptOssForCausalLM"}},
      {"attention_bias", true},
      {"attention_dropout", 0.0},
      {"experts_per_token", 4},
      {"head_dim", 64},
      {"hidden_act", "silu"},
      {"hidden_size", 2880},
      {"initial_context_length", 4096},
      {"intermediate_size", 2880},
      {"layer_types", types},
      {"max_position_embeddings", 131072},
      {"model_type", "gpt_oss"},
      {"num_attention_heads", 64},
      {"num_experts_per_tok", 4},
      {"num_hidden_layers", 36},
      {"num_key_value_heads", 8},
      {"num_local_experts", 128},
      {"output_router_logits", false},
      {"quantization_config", {{"modules_to_not_convert", {"model.layers.*.self_attn"}}, {"quant_method", "mxfp4"}}},
      {"rms_norm_eps", 1e-05},
      {"rope_scaling",
       {{"beta_fast", 32.0},
        {"beta_slow", 1.0},
        {"factor", 32.0},
        {"original_max_position_embeddings", 4096},
        {"rope_type", "yarn"},
        {"truncate", false}}},
      {"rope_theta", 150000},
      {"router_aux_loss_coef", 0.9},
      {"sliding_window", 128},
      {"swiglu_limit", 7.0},
      {"tie_word_embeddings", false},
      {"vocab_size", 201088}};
}

ModelSpec parse(const Json& config) {
  return parse_model_spec(config.dump(), "config.json");
}

std::map<std::string, TensorSpec> tensors_of(const ModelSpec& spec, const StageSpec& stage) {
  std::map<std::string, TensorSpec> tensors;
  for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(stage.units.front())].tensors)
    tensors[tensor.role] = tensor;
  return tensors;
}

TEST(GptOss, IsReadAsPublished) {
  const ModelSpec spec = parse(published());
  EXPECT_EQ(spec.parameters(), 116829156672);
  EXPECT_NEAR(static_cast<double>(active_parameters(spec)), 5.13e9, 0.005e9);  // of the model's card
  EXPECT_EQ(spec.config.layer(0).window, 128);
  EXPECT_EQ(spec.config.layer(35).window, 0);
  const RopeSpec& rope = spec.config.ropes.at(0);
  EXPECT_EQ(rope.type, "yarn");
  EXPECT_EQ(rope.theta, 150000);
  EXPECT_NEAR(rope.attention_factor, 0.1 * std::log(32.0) + 1, 1e-12);
  EXPECT_FALSE(rope.truncate);
  EXPECT_EQ(spec.config.experts.clamped.sharpness, 1.702);
  EXPECT_EQ(spec.config_json.find("quantization_config"), std::string::npos);

  Json silent = published();
  for (const char* field : {"attention_bias", "head_dim", "layer_types", "max_position_embeddings",
                            "num_attention_heads", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
                            "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit"})
    silent.erase(field);
  const ModelSpec defaults = parse(silent);
  EXPECT_EQ(defaults.parameters(), spec.parameters());
  EXPECT_EQ(defaults.config.ropes.at(0).attention_factor, rope.attention_factor);
  EXPECT_EQ(defaults.config.ropes.at(0).original_max_positions, 4096);
  EXPECT_EQ(defaults.config.layer(0).window, 128);
  EXPECT_EQ(defaults.config.layer(1).window, 0);
  EXPECT_EQ(defaults.config.experts.clamped.limit, 7);
}

// 3.2 billion parameters a layer: attention, and groups of experts of at most 2^29.
TEST(GptOss, ExpertsAreSlicesOfStackedTensors) {
  const ModelSpec spec = parse(published());
  std::int64_t experts = 0;
  for (const StageSpec& stage : spec.stages) {
    if (stage.block != 1) continue;
    const UnitSpec& unit = spec.units[static_cast<std::size_t>(stage.units.front())];
    EXPECT_LE(unit.parameters(), std::int64_t{1} << 29);
    const auto tensors = tensors_of(spec, stage);
    if (stage.kind == StageKind::attention) {
      EXPECT_EQ(tensors.at("self_attn.sinks").shape, Shape{64});
      EXPECT_TRUE(tensors.at("self_attn.sinks").decays);
      continue;
    }
    ASSERT_EQ(stage.kind, StageKind::experts);
    EXPECT_EQ(tensors.contains("mlp.router.bias"), experts == 0);
    const auto expect = [&](const char* role, const Shape& of_one) {
      const TensorSpec& tensor = tensors.at(role);
      Shape shape = of_one;
      shape.insert(shape.begin(), stage.experts);
      EXPECT_EQ(tensor.shape, shape);
      EXPECT_EQ(tensor.checkpoint_shape().front(), 128);
      EXPECT_EQ(tensor.first_row, experts);
      EXPECT_EQ(tensor.decays, of_one.size() == 2) << role;
    };
    expect("mlp.experts.gate_up_proj", {2880, 5760});
    expect("mlp.experts.gate_up_proj_bias", {5760});
    expect("mlp.experts.down_proj", {2880, 2880});
    expect("mlp.experts.down_proj_bias", {2880});
    experts += stage.experts;
  }
  EXPECT_EQ(experts, 128);
}

TEST(GptOss, BiasesOfExpertsKeepBf16) {
  ModelSpec spec = parse(published());
  add_adapters(spec, {.rank = 8, .alpha = 16});
  set_base_format(spec, WeightFormat::nf4);
  std::map<std::string, TensorSpec> tensors;
  for (const StageSpec& stage : spec.stages)
    if (stage.block == 0) tensors.merge(tensors_of(spec, stage));
  EXPECT_EQ(tensors.at("mlp.experts.gate_up_proj").format, WeightFormat::nf4);
  for (const char* role : {"mlp.experts.gate_up_proj_bias", "mlp.router.weight", "self_attn.sinks"})
    EXPECT_EQ(tensors.at(role).format, WeightFormat::bf16) << role;
  EXPECT_TRUE(tensors.contains("self_attn.q_proj.lora_A.weight"));
  EXPECT_FALSE(tensors.contains("mlp.router.lora_A.weight"));
}

TEST(GptOss, WhatItCannotDoIsRefused) {
  for (const auto& [field, value] : std::map<std::string, Json>{
           {"router_aux_loss_coef", -1}, {"num_experts_per_tok", 129}, {"swiglu_limit", 0}, {"swiglu_alpha", -1}}) {
    Json config = published();
    config[field] = value;
    testing::expect_refusal(io::ErrorKind::input, {field}, [&] { parse(config); });
  }
}

// However they are cut, across columns that are read together and experts.
TEST(GptOss, CodesOfExpertsAreReadInPieces) {
  constexpr std::uint64_t kExperts = 2, kIn = 64, kOut = 300, kBlocks = kIn / 32;
  std::string codes(kExperts * kOut * kIn / 2, '\0'), scales(kExperts * kOut * kBlocks, '\0');
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<char>(i * 37 + i / 251);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<char>(i * 11);
  const auto entry = [](const char* name, const Json& shape, std::size_t begin, std::size_t end) {
    return std::make_pair(std::string(name), Json{{"dtype", "U8"}, {"shape", shape}, {"data_offsets", {begin, end}}});
  };
  const Json header =
      Json::object_t{entry("w_blocks", {kExperts, kOut, kBlocks, 16}, 0, codes.size()),
                     entry("w_scales", {kExperts, kOut, kBlocks}, codes.size(), codes.size() + scales.size())};
  const std::string text = header.dump();
  std::string length(8, '\0');
  for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(text.size() >> (8 * i));
  const testing::TempDir folder;
  testing::write_file(folder.path() / "model.safetensors", length + text + codes + scales);

  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  ASSERT_NE(checkpoint.find("w"), nullptr);
  EXPECT_EQ(checkpoint.find("w")->shape, (Shape{kExperts, kIn, kOut}));
  std::vector<float> whole(kExperts * kIn * kOut);
  checkpoint.read_f32("w", 0, whole);
  constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};
  for (std::uint64_t at = 0; at < whole.size(); ++at) {
    const std::uint64_t column = at % kOut, row = at / kOut % kIn, of = at / kOut / kIn * kOut + column;
    const auto byte = static_cast<std::uint8_t>(codes[of * kIn / 2 + row / 2]);
    const int scale = static_cast<std::uint8_t>(scales[of * kBlocks + row / 32]);
    const float expected = kValues[row % 2 == 0 ? byte & 15U : byte >> 4] * std::ldexp(1.0F, scale - 127);
    ASSERT_TRUE(whole[at] == expected || (std::isnan(whole[at]) && std::isnan(expected))) << at;
  }
  for (const std::size_t piece : {1U, 7U, 299U, 4099U, 20000U})
    for (std::size_t first = 0; first < whole.size(); first += piece == 1 ? 997 : piece) {
      std::vector<float> part(std::min(piece, whole.size() - first));
      checkpoint.read_f32("w", first, part);
      ASSERT_EQ(std::memcmp(part.data(), whole.data() + first, part.size() * sizeof(float)), 0) << first;
    }
}

// Rows of the weight are columns of its codes: a few of them need all of an expert's.
TEST(GptOss, CodesAreReadFromTheFolderOnceHoweverTheirWeightIsCut) {
  const RawTensor blocks{.dtype = "U8", .shape = {3, 40, 2, 16}, .bytes = 3 * 40 * 2 * 16},
      scales{.dtype = "U8", .shape = {3, 40, 2}, .bytes = 3 * 40 * 2};
  std::uint64_t bytes = 0;
  const PackedParts parts{.find = [&](const std::string& name) -> const RawTensor* {
                            return name == "w_blocks" ? &blocks : name == "w_scales" ? &scales : nullptr;
                          },
                          .read =
                              [&](const RawTensor&, std::uint64_t, std::span<std::byte> out) {
                                bytes += out.size();
                                std::ranges::fill(out, std::byte{1});
                              },
                          .floats = {}};
  const auto weight = packed_weight("w", "here", parts);
  ASSERT_NE(weight, nullptr);
  std::vector<float> piece(97);
  constexpr std::uint64_t kElements = 3 * 40 * 64;
  for (std::uint64_t first = 0; first < kElements; first += piece.size())
    weight->read(first, std::span(piece).first(std::min<std::uint64_t>(piece.size(), kElements - first)));
  EXPECT_EQ(bytes, blocks.bytes + scales.bytes);
}

}  // namespace
}  // namespace tierflow
