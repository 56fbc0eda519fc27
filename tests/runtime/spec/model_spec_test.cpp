#include "runtime/spec/model_spec.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "runtime/spec/active_parameters.h"
#include "runtime/spec/adapters.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using Json = nlohmann::json;
using testing::expect_refusal;
using Shape = std::vector<std::int64_t>;

Json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", 64},
          {"hidden_size", 32},
          {"intermediate_size", 48},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2}};
}
Json with(Json config, const std::string& key, Json value) {
  config[key] = std::move(value);
  return config;
}
Json gpt2() {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", 64},
          {"n_embd", 32},
          {"n_layer", 3},
          {"n_head", 4},
          {"n_positions", 128}};
}
Json opt() {
  return {{"architectures", {"OPTForCausalLM"}},
          {"vocab_size", 64},
          {"hidden_size", 32},
          {"ffn_dim", 48},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"max_position_embeddings", 128},
          {"word_embed_proj_dim", 32}};
}
ModelSpec parse(const Json& config) {
  return parse_model_spec(config.dump(), "config.json");
}

std::map<std::string, std::vector<std::int64_t>> shapes(const UnitSpec& unit) {
  std::map<std::string, std::vector<std::int64_t>> result;
  for (const auto& tensor : unit.tensors) result[tensor.name] = tensor.shape;
  return result;
}

TEST(ModelSpec, LlamaUnitsAndStages) {
  const ModelSpec spec = parse(llama());
  ASSERT_EQ(spec.units.size(), 4u);
  EXPECT_EQ(spec.units[0].name, "embedding");
  EXPECT_EQ(spec.units[2].name, "layers.1");
  EXPECT_EQ(spec.units[3].name, "head");
  const std::map<std::string, std::vector<std::int64_t>> block = {
      {"model.layers.1.self_attn.q_proj.weight", {32, 32}},    {"model.layers.1.self_attn.k_proj.weight", {16, 32}},
      {"model.layers.1.self_attn.v_proj.weight", {16, 32}},    {"model.layers.1.self_attn.o_proj.weight", {32, 32}},
      {"model.layers.1.mlp.gate_proj.weight", {48, 32}},       {"model.layers.1.mlp.up_proj.weight", {48, 32}},
      {"model.layers.1.mlp.down_proj.weight", {32, 48}},       {"model.layers.1.input_layernorm.weight", {32}},
      {"model.layers.1.post_attention_layernorm.weight", {32}}};
  EXPECT_EQ(shapes(spec.units[2]), block);
  ASSERT_EQ(spec.stages.size(), 4u);
  EXPECT_EQ(spec.stages[3].kind, StageKind::head);
  EXPECT_EQ(spec.stages[3].units, (std::vector<int>{3}));
  EXPECT_EQ(spec.parameters(), 19616);
  const auto tied = parse(with(llama(), "tie_word_embeddings", true));
  EXPECT_EQ(tied.stages.back().units, (std::vector<int>{3, 0}));
  EXPECT_EQ(tied.parameters(), 19616 - 64 * 32);
}

std::vector<std::string> names(const ModelSpec& spec) {
  std::vector<std::string> result;
  for (const UnitSpec& unit : spec.units) result.push_back(unit.name);
  return result;
}

// 64 rows of 32: tiles of 26 rows hold at most as many elements; three of 22 are even, rounded up to 26.
constexpr Tiling kRows{.vocabulary_elements = 26 * 32 + 31};

TEST(ModelSpec, LargeVocabulariesComeInTiles) {
  const ModelSpec spec = parse_model_spec(llama().dump(), "config.json", kRows);
  EXPECT_EQ(names(spec), (std::vector<std::string>{"embedding.0", "embedding.1", "embedding.2", "layers.0", "layers.1",
                                                   "head.norm", "head.0", "head.1", "head.2"}));
  std::int64_t row = 0;
  for (const int unit : {0, 1, 2, 6, 7, 8}) {
    const TensorSpec& tensor = spec.units[unit].tensors.at(0);
    EXPECT_EQ(tensor.name, unit < 3 ? "model.embed_tokens.weight" : "lm_head.weight");
    EXPECT_EQ(tensor.first_row, row);
    EXPECT_EQ(tensor.first_element(), 32 * row);
    EXPECT_EQ(tensor.checkpoint_shape(), (std::vector<std::int64_t>{64, 32}));
    EXPECT_LE(tensor.elements(), kRows.vocabulary_elements);
    row = (row + tensor.shape[0]) % 64;
  }
  EXPECT_EQ(row, 0);
  EXPECT_EQ(spec.parameters(), parse(llama()).parameters());
  ASSERT_EQ(spec.stages.size(), 9u);
  for (std::size_t stage = 0; stage < 9; ++stage) {
    EXPECT_EQ(spec.stages[stage].units, (std::vector<int>{static_cast<int>(stage)}));
    EXPECT_EQ(spec.stages[stage].backward_needs_input, stage >= 3 && stage < 6) << stage;
    EXPECT_EQ(spec.stages[stage].backward_needs_weights, stage >= 3) << stage;
  }
  EXPECT_EQ(spec.stages[5].kind, StageKind::norm);
  EXPECT_EQ(spec.stages[7].kind, StageKind::head_tile);
  EXPECT_EQ(spec.stages[7].first_row, spec.units[7].tensors[0].first_row);
  EXPECT_EQ(spec.stages[8].kind, StageKind::head);
}

TEST(ModelSpec, TiedTilesAreSharedAndPositionsComeWithTheLast) {
  for (const Json& config : {gpt2(), opt(), with(opt(), "do_layer_norm_before", false)}) {
    const ModelSpec spec = parse_model_spec(config.dump(), "config.json", kRows);
    EXPECT_EQ(spec.units[0].tensors.size(), 1u);
    EXPECT_EQ(spec.units[2].tensors.size(), 2u);
    EXPECT_EQ(spec.units[2].tensors[1].all_rows, 0);
    const std::size_t stages = spec.stages.size();
    for (int tile = 0; tile < 3; ++tile)
      EXPECT_EQ(spec.stages[stages - 3 + tile].units, (std::vector<int>{tile})) << "the norm has a stage of its own";
    EXPECT_EQ(spec.stages[stages - 4].units.empty(), spec.config.norm_of_sum);
    EXPECT_EQ(spec.parameters(), parse(config).parameters());
  }
}

TEST(ModelSpec, LargeBlocksAreTwoStages) {
  for (const Json& config : {llama(), gpt2(), opt()}) {
    const ModelSpec whole = parse(config);
    const std::int64_t block = whole.units[1].parameters();
    EXPECT_EQ(names(parse_model_spec(config.dump(), "config.json", {.block_elements = block})), names(whole));
    const ModelSpec spec = parse_model_spec(config.dump(), "config.json", {.block_elements = block - 1});
    EXPECT_EQ(spec.units[1].name, "layers.0.attention");
    EXPECT_EQ(spec.units[2].name, "layers.0.mlp");
    EXPECT_EQ(spec.units[1].parameters() + spec.units[2].parameters(), block);
    auto parts = shapes(spec.units[1]);
    parts.merge(shapes(spec.units[2]));
    EXPECT_EQ(parts, shapes(whole.units[1]));
    EXPECT_EQ(spec.stages[1].kind, StageKind::attention);
    EXPECT_EQ(spec.stages[2].kind, StageKind::mlp);
    EXPECT_EQ(spec.stages[2].block, 0);
  }
}

TEST(ModelSpec, SmallModelsStayWhole) {
  // 152 million parameters; its vocabulary times sixteen, and a block of half a billion, are still whole.
  Json config = with(with(llama(), "vocab_size", 131072), "hidden_size", 1024);
  EXPECT_EQ(parse(config).units.size(), 4u);
  EXPECT_EQ(parse(with(config, "vocab_size", 131073)).units.size(), 7u);
}

TEST(ModelSpec, MatricesComeBeforeNormsAndBiases) {
  for (const Json& config : {llama(), gpt2(), opt(), with(with(llama(), "attention_bias", true), "mlp_bias", true)})
    for (const UnitSpec& unit : parse(config).units) {
      bool vectors = false;
      for (const TensorSpec& tensor : unit.tensors) {
        vectors = vectors || tensor.shape.size() == 1;
        EXPECT_EQ(tensor.shape.size() == 1, vectors) << tensor.name;
        EXPECT_EQ(tensor.decays, !vectors) << tensor.name;
        EXPECT_EQ(tensor.name.substr(tensor.name.size() - tensor.role.size()), tensor.role);
      }
    }
}

TEST(ModelSpec, FamiliesDiffer) {
  const auto qwen2 = parse(with(llama(), "architectures", {"Qwen2ForCausalLM"}));
  EXPECT_TRUE(qwen2.config.qkv_bias && !qwen2.config.output_bias);
  const auto qwen3 = parse(with(with(llama(), "architectures", {"Qwen3ForCausalLM"}), "head_dim", 16));
  EXPECT_EQ(qwen3.config.qk_norm, QkNorm::head);
  EXPECT_EQ(shapes(qwen3.units[1]).at("model.layers.0.self_attn.o_proj.weight"), (std::vector<std::int64_t>{32, 64}));
  EXPECT_EQ(shapes(qwen3.units[1]).at("model.layers.0.self_attn.q_norm.weight"), (std::vector<std::int64_t>{16}));
  const auto mistral = parse(with(with(llama(), "architectures", {"MistralForCausalLM"}), "sliding_window", 16));
  EXPECT_EQ(mistral.config.layer(1).window, 16);
  EXPECT_EQ(parse(with(llama(), "sliding_window", 16)).config.layer(1).window, 0);
  const auto small = parse(gpt2());
  EXPECT_EQ(small.stages.back().units, (std::vector<int>{4, 0}));
  EXPECT_EQ(small.config.intermediate_size, 128);
  EXPECT_EQ(shapes(small.units[1]).at("transformer.h.0.attn.c_attn.weight"), (std::vector<std::int64_t>{32, 96}));
  const auto facebook = parse(opt());
  EXPECT_EQ(shapes(facebook.units[0]).at("model.decoder.embed_positions.weight"), (std::vector<std::int64_t>{130, 32}));
  const auto post = parse(with(opt(), "do_layer_norm_before", false));
  EXPECT_EQ(post.units.size(), 3u);  // tied and without a final norm: the head has nothing of its own
  EXPECT_EQ(post.stages.back().units, (std::vector<int>{0}));
}

TEST(ModelSpec, BlocksOfGpt2AndOpt) {
  // Each module's shape, and that of its bias.
  const auto with_biases = [](const std::string& prefix, const std::map<std::string, Shape>& modules) {
    std::map<std::string, Shape> all;
    for (const auto& [module, shape] : modules) {
      all[prefix + module + ".weight"] = shape;
      all[prefix + module + ".bias"] = {prefix == "transformer.h.2." ? shape.back() : shape[0]};
    }
    return all;
  };
  EXPECT_EQ(shapes(parse(gpt2()).units[3]), with_biases("transformer.h.2.", {{"attn.c_attn", {32, 96}},
                                                                             {"attn.c_proj", {32, 32}},
                                                                             {"mlp.c_fc", {32, 128}},
                                                                             {"mlp.c_proj", {128, 32}},
                                                                             {"ln_1", {32}},
                                                                             {"ln_2", {32}}}));
  EXPECT_EQ(shapes(parse(opt()).units[2]), with_biases("model.decoder.layers.1.", {{"self_attn.q_proj", {32, 32}},
                                                                                   {"self_attn.k_proj", {32, 32}},
                                                                                   {"self_attn.v_proj", {32, 32}},
                                                                                   {"self_attn.out_proj", {32, 32}},
                                                                                   {"fc1", {48, 32}},
                                                                                   {"fc2", {32, 48}},
                                                                                   {"self_attn_layer_norm", {32}},
                                                                                   {"final_layer_norm", {32}}}));
}

// Configurations as their makers publish them, what their classes imply left out, have the published sizes.
TEST(ModelSpec, PublishedModelsHaveTheirPublishedSizes) {
  const auto billions = [](const char* text) {
    return static_cast<double>(parse_model_spec(text, "config.json").parameters()) / 1e9;
  };
  const char* gemma3_4b = R"({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
      "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model"}})";
  EXPECT_NEAR(billions(gemma3_4b), 3.88, 0.005);
  const ModelSpec gemma = parse_model_spec(gemma3_4b, "config.json");
  EXPECT_EQ(gemma.wrapper, "Gemma3ForConditionalGeneration");
  EXPECT_EQ(gemma.config.layer(4).window, 1024);
  EXPECT_EQ(gemma.config.layer(5).window, 0);
  EXPECT_EQ(gemma.config.ropes.at(0).factor, 8.0);
  EXPECT_EQ(gemma.config.ropes.at(1).type, "default");
  EXPECT_EQ(gemma.config.ropes.at(1).theta, 1e4);
  EXPECT_NEAR(billions(R"({"architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 100352, "rope_theta": 500000})"),
              7.30, 0.005);
  EXPECT_NEAR(billions(R"({"architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 14336,
    "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000})"),
              9.24, 0.005);
  EXPECT_NEAR(billions(R"({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 200064,
    "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": true,
    "partial_rotary_factor": 0.75, "max_position_embeddings": 131072})"),
              3.84, 0.005);
}

// Its text model has 107.8 of the 109 billion that are published. A token takes 16.1 of these: the published 17 without
// the embedding.
TEST(ModelSpec, LlamaFourScoutIsReadAsItIsPublished) {
  const ModelSpec scout = parse_model_spec(R"({"architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092, "model_type": "llama4",
    "text_config": {"attention_bias": false, "attention_chunk_size": 8192, "attention_dropout": 0.0, "head_dim": 128,
      "for_llm_compressor": false, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
      "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
      "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [],
      "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
      "num_local_experts": 16, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
      "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
      "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": true, "vocab_size": 202048},
    "vision_config": {"model_type": "llama4_vision_model"}})",
                                           "config.json");
  EXPECT_EQ(scout.wrapper, "Llama4ForConditionalGeneration");
  EXPECT_NEAR(static_cast<double>(scout.parameters()), 107.77e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(active_parameters(scout)), 16.14e9, 0.005e9);
  EXPECT_EQ(scout.config.layer(2).chunk, 8192);
  EXPECT_EQ(scout.config.layer(3).chunk, 0);
  EXPECT_EQ(scout.config.layer(3).rope, -1);
}

// As published: Qwen3-235B-A22B 22 billion; GLM-4.5-Air 12, without the head; gpt-oss has a test of its own.
TEST(ModelSpec, OfMixturesATokenTakesThePublishedShare) {
  const auto qwen3 = [](const char* experts_per_token, std::int64_t vocabulary) {
    return parse_model_spec(
        R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "mlp_only_layers": [], "vocab_size": 151936,
    "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_experts": 128, "num_hidden_layers": 94,
    "num_key_value_heads": 4, "tie_word_embeddings": false, "num_experts_per_tok": )" +
            std::string(experts_per_token) + "}",
        "config.json", {.vocabulary_elements = vocabulary});
  };
  EXPECT_NEAR(static_cast<double>(qwen3("8", INT64_MAX).parameters()), 235.1e9, 0.05e9);
  EXPECT_NEAR(static_cast<double>(active_parameters(qwen3("8", INT64_MAX))), 22e9, 0.5e9);
  EXPECT_EQ(active_parameters(qwen3("8", INT64_MAX)), active_parameters(qwen3("8", 1 << 27)));  // in tiles, too
  EXPECT_EQ(active_parameters(qwen3("9", INT64_MAX)) - active_parameters(qwen3("8", INT64_MAX)),
            94LL * 3 * 4096 * 1536);
  const ModelSpec all = qwen3("128", INT64_MAX);
  EXPECT_EQ(active_parameters(all), all.parameters() - 151935LL * 4096);

  const ModelSpec air = parse_model_spec(
      R"({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": true,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944, "n_group": 1,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "tie_word_embeddings": false, "topk_group": 1, "use_qk_norm": false, "vocab_size": 151552})",
      "config.json");
  EXPECT_NEAR(static_cast<double>(active_parameters(air) - 151552LL * 4096), 12e9, 0.5e9);

  // Nothing is chosen in a dense model, and a tied table is the head.
  const ModelSpec dense = parse(llama()), tied = parse(with(llama(), "tie_word_embeddings", true));
  EXPECT_EQ(active_parameters(dense), dense.parameters() - 63 * 32);
  EXPECT_EQ(active_parameters(tied), tied.parameters());
}

TEST(ModelSpec, RopeAsOldAndNewTransformersWriteIt) {
  const Json scaled = {
      {"factor", 8.0}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  Json old_style = with(llama(), "rope_theta", 5e5), new_style = llama();
  old_style["rope_scaling"] = with(scaled, "rope_type", "llama3");
  new_style["rope_parameters"] = with(with(scaled, "rope_type", "llama3"), "rope_theta", 5e5);
  for (const Json& config : {old_style, new_style}) {
    const RopeSpec rope = parse(config).config.ropes.at(0);
    EXPECT_EQ(rope.type, "llama3");
    EXPECT_EQ(rope.theta, 5e5);
    EXPECT_EQ(rope.factor, 8.0);
    EXPECT_EQ(rope.original_max_positions, 8192);
  }
  EXPECT_EQ(parse(with(llama(), "rope_scaling", {{"type", "linear"}, {"factor", 2}})).config.ropes[0].type, "linear");
  EXPECT_EQ(parse(with(llama(), "rope_scaling", nullptr)).config.ropes[0].type, "default");
}

TEST(ModelSpec, AStretchedRotaryEmbeddingReachesFurther) {
  const auto longest = [](const Json& scaling) {
    Json config = with(llama(), "max_position_embeddings", 1000);
    if (!scaling.is_null()) config["rope_scaling"] = scaling;
    return parse(config).config.longest_sequence();
  };
  EXPECT_EQ(longest(nullptr), 1000);
  EXPECT_EQ(longest({{"type", "linear"}, {"factor", 4.0}}), 4000);
  EXPECT_EQ(longest({{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 1000}}), 4000);
  EXPECT_EQ(longest({{"rope_type", "llama3"},
                     {"factor", 32.0},
                     {"low_freq_factor", 1.0},
                     {"high_freq_factor", 4.0},
                     {"original_max_position_embeddings", 250}}),
            1000);
}

TEST(ModelSpec, WeightsOfNormsOfHeadsAreNoLinearLayers) {
  const ModelSpec spec = parse(with(with(llama(), "architectures", {"CohereForCausalLM"}), "use_qk_norm", true));
  int found = 0;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (!tensor.name.ends_with("_norm.weight")) continue;
      ++found;
      const std::int64_t heads = tensor.role == "self_attn.q_norm.weight" ? spec.config.heads : spec.config.kv_heads;
      EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{heads, spec.config.head_dim})) << tensor.name;
      EXPECT_EQ(tensor.init, Init::ones);
      EXPECT_FALSE(tensor.decays);
      EXPECT_EQ(linear_module(tensor), "");
    }
  EXPECT_EQ(found, 2 * spec.config.layers);
}

// transformers' None is not always what an absent field means.
TEST(ModelSpec, NullIsTransformersNone) {
  Json gemma = llama();
  gemma["architectures"] = {"Gemma2ForCausalLM"};
  EXPECT_EQ(parse_model_spec(gemma.dump(), "c").config.attention_softcap, 50.0);
  gemma["attn_logit_softcapping"] = gemma["final_logit_softcapping"] = nullptr;
  EXPECT_EQ(parse_model_spec(gemma.dump(), "c").config.attention_softcap, 0.0);
  EXPECT_EQ(parse_model_spec(gemma.dump(), "c").config.logits_softcap, 0.0);
  Json mistral = llama();
  mistral["architectures"] = {"MistralForCausalLM"};
  EXPECT_EQ(parse_model_spec(mistral.dump(), "c").config.layer(0).window, 4096);
  EXPECT_EQ(parse_model_spec(with(mistral, "sliding_window", nullptr).dump(), "c").config.layer(0).window, 0);
  mistral["num_attention_heads"] = 16;
  mistral.erase("num_key_value_heads");
  EXPECT_EQ(parse_model_spec(mistral.dump(), "c").config.kv_heads, 8);
  EXPECT_EQ(parse_model_spec(with(mistral, "num_key_value_heads", nullptr).dump(), "c").config.kv_heads, 16);
  Json seed = llama();
  seed["architectures"] = {"SeedOssForCausalLM"};
  EXPECT_EQ(parse_model_spec(seed.dump(), "c").config.head_dim, 128);
  EXPECT_EQ(parse_model_spec(with(seed, "head_dim", nullptr).dump(), "c").config.head_dim, 8);
}

// Versions of transformers differ in which of two names counts.
TEST(ModelSpec, TwoNamesOfGptNeoxsRotaryEmbeddingsMayNotDisagree) {
  Json neox = llama();
  neox["architectures"] = {"GPTNeoXForCausalLM"};
  neox.erase("num_key_value_heads");
  neox["rope_theta"] = 500.0;
  const auto refused = [&](std::initializer_list<std::string_view> words) {
    expect_refusal(io::ErrorKind::input, words, [&] { parse(neox); });
  };
  refused({"rope_theta", "is not rotary_emb_base, 10000"});
  neox["rotary_emb_base"] = 500.0;
  neox["partial_rotary_factor"] = 0.5;
  refused({"partial_rotary_factor", "is not rotary_pct, 0.25"});
  neox["rotary_pct"] = 0.5;
  const ModelSpec spec = parse_model_spec(neox.dump(), "config.json");
  EXPECT_EQ(spec.config.ropes[0].theta, 500.0);
  EXPECT_EQ(spec.config.ropes[0].partial, 0.5);
}

// Stores are told apart by it.
TEST(ModelSpec, AConfigWhoseWeightsAreNotQuantisedKeepsItsText) {
  const std::string text = with(llama(), "quantization_config", nullptr).dump();
  EXPECT_EQ(parse_model_spec(text, "config.json").config_json, text);
  const Json nf4{{"quant_method", "bitsandbytes"}};
  EXPECT_EQ(Json::parse(parse_model_spec(with(llama(), "quantization_config", nf4).dump(), "x").config_json), llama());
}

TEST(ModelSpec, WhatWouldBeComputedOtherwiseIsRefused) {
  const auto refused = [](const std::string& architecture, Json config, const std::string& names) {
    config["architectures"] = {architecture};
    expect_refusal(io::ErrorKind::input, {names}, [&] { parse_model_spec(config.dump(), "c"); });
  };
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 2.0}, {"original_max_position_embeddings", 16}};
  refused("LlamaForCausalLM", with(llama(), "is_causal", false), "is_causal");
  refused("LlamaForCausalLM", with(with(llama(), "rope_parameters", {{"rope_type", "default"}}), "rope_scaling", yarn),
          "rope_scaling stands beside rope_parameters");
  refused("LlamaForCausalLM", with(llama(), "rope_parameters", {{"full_attention", yarn}}), "types of layers");
  refused("Gemma3ForCausalLM", with(llama(), "rope_parameters", yarn), "nothing for sliding_attention");
  refused("LlamaForCausalLM", with(llama(), "partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5");
  refused("Phi3ForCausalLM", with(llama(), "rope_scaling", yarn), "longrope alone");
  refused("LlamaForCausalLM", with(with(llama(), "rope_scaling", yarn), "rope_theta", 1.0), "rope_theta");
  refused("SmolLM3ForCausalLM", with(llama(), "no_rope_layers", {true, false}), "no_rope_layers");
  refused("Exaone4ForCausalLM", llama(), "sliding_window is missing");
  Json tied = llama();
  tied["tie_word_embeddings"] = true;
  tied.erase("architectures");
  const Json wrapped = {
      {"architectures", {"Mistral3ForConditionalGeneration"}}, {"tie_word_embeddings", false}, {"text_config", tied}};
  EXPECT_FALSE(parse_model_spec(wrapped.dump(), "c").config.tie_word_embeddings);
}

TEST(ModelSpec, ExpertsAreStagesOfSomeWhereALayerIsLarge) {
  Json config = llama();
  config["architectures"] = {"Qwen3MoeForCausalLM"};
  config["num_hidden_layers"] = 3;
  config["num_experts"] = 5;
  config["num_experts_per_tok"] = 2;
  config["moe_intermediate_size"] = 16;
  config["mlp_only_layers"] = {1};
  const ModelSpec whole = parse_model_spec(config.dump(), "c", {.experts_apart = false});
  EXPECT_EQ(whole.stages.size(), 5U);
  EXPECT_EQ(whole.stages[1].experts, 5);
  EXPECT_EQ(whole.stages[2].experts, 0);
  const ModelSpec apart = parse_model_spec(config.dump(), "c");
  std::string together;
  for (const StageSpec& stage : apart.stages) together += stage.together ? std::to_string(stage.experts) : ".";
  EXPECT_EQ(together, "..5..5.");
  EXPECT_EQ(apart.parameters(), whole.parameters());
  // Two experts of 3 * 16 * 32 elements beside a router of 5 * 32: three stages of two, two and one; the layer without
  // experts in halves.
  const ModelSpec cut = parse_model_spec(config.dump(), "c", {.block_elements = 2 * 3 * 16 * 32 + 5 * 32});
  std::string kinds;
  for (const StageSpec& stage : cut.stages)
    if (stage.block >= 0)
      kinds += stage.kind == StageKind::experts     ? std::to_string(stage.experts)
               : stage.kind == StageKind::attention ? "a"
                                                    : "m";
  EXPECT_EQ(kinds, "a221ama221");
  EXPECT_EQ(cut.parameters(), whole.parameters());
  EXPECT_EQ(cut.units[static_cast<std::size_t>(cut.stages[3].units[0])].name, "layers.0.experts.1");
  for (const auto& [field, value] : std::map<std::string, Json>{{"num_experts_per_tok", 6},
                                                                {"num_experts", 0},
                                                                {"mlp_only_layers", {7}},
                                                                {"num_local_experts", 4},
                                                                {"router_aux_loss_coef", -1},
                                                                {"use_sliding_window", true}})
    expect_refusal(io::ErrorKind::input, {field},
                   [&, field = field, value = value] { parse_model_spec(with(config, field, value).dump(), "c"); });
}

// By name, with what they compute and where they run all the same.
TEST(ModelSpec, LayersOfOtherKindsAreRefusedByName) {
  const auto refused = [](const Json& config, std::initializer_list<std::string_view> words) {
    expect_refusal(io::ErrorKind::input, words, [&] { parse(config); });
    try {
      parse(config);
    } catch (const Exception& error) {
      const std::string line = error.what();
      EXPECT_EQ(line.find("--as"), std::string::npos) << line;
      EXPECT_EQ(line.find("LlamaForCausalLM"), std::string::npos) << line;  // no list of what does not help
      EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    }
  };
  const auto like_llama = [](const char* architecture, const char* field, const Json& value) {
    return with(with(llama(), "architectures", {architecture}), field, value);
  };
  constexpr std::string_view kPython = "Python package", kWhere = "docs/python.md";
  refused(like_llama("DeepseekV3ForCausalLM", "kv_lora_rank", 512),
          {"config.json", "DeepseekV3ForCausalLM", "latent attention", kPython, kWhere});
  refused(like_llama("Qwen3NextForCausalLM", "linear_num_value_heads", 32),
          {"config.json", "Qwen3NextForCausalLM", "gated DeltaNet", kPython, kWhere});
  for (const char* field : {"state_size", "ssm_state_size", "mamba_d_state"})
    refused(like_llama("MambaForCausalLM", field, 16),
            {"config.json", "MambaForCausalLM", "state-space", kPython, kWhere});
  refused(like_llama("MambaLMHeadModel", "ssm_cfg", Json::object()), {"MambaLMHeadModel", "state-space", kPython});
  Json unnamed = with(with(llama(), "model_type", "deepseek_v2"), "kv_lora_rank", 512);
  unnamed.erase("architectures");
  refused(unnamed, {"model type deepseek_v2", "latent attention", kPython, kWhere});
  // Nor may they be read as something else.
  expect_refusal(io::ErrorKind::input, {"--as llama", "kv_lora_rank"}, [] {
    Json deepseek = with(llama(), "architectures", {"DeepseekV3ForCausalLM"});
    parse_model_spec(with(deepseek, "kv_lora_rank", 512).dump(), "config.json", {}, "llama");
  });
  // What is merely unknown is listed, and may run there too.
  expect_refusal(io::ErrorKind::input, {"BertModel", "LlamaForCausalLM", kPython},
                 [] { parse(with(llama(), "architectures", {"BertModel"})); });
}

// Of the families that have every field there: the nearest by name, else the plainest.
TEST(ModelSpec, AnUnknownNameIsOfferedTheFamilyThatFits) {
  const auto offered = [](const char* architecture, const char* field, const Json& value) {
    try {
      parse(with(with(llama(), "architectures", {architecture}), field, value));
    } catch (const Exception& error) {
      const std::string line = error.what();
      const std::size_t at = line.find("--as ");
      return at == std::string::npos ? std::string() : line.substr(at + 5, line.find(' ', at + 5) - at - 5);
    }
    return std::string("accepted");
  };
  EXPECT_EQ(offered("MyQwen3ForCausalLM", "head_dim", 16), "qwen3");
  EXPECT_EQ(offered("Qwem2ForCausalLM", "rope_theta", 1e6), "qwen2");
  EXPECT_EQ(offered("Cohare2ForCausalLM", "logit_scale", 1.0), "cohere2");
  EXPECT_EQ(offered("Qwen2Qwen3ForCausalLM", "rope_theta", 1e6), "qwen2");  // of equals the first
  EXPECT_EQ(offered("SomethingElseForCausalLM", "rope_theta", 1e6), "llama");
  EXPECT_EQ(offered("MyQwen3ForCausalLM", "mlp_bias", true), "llama");  // Qwen 3 has none
  EXPECT_EQ(offered("MyQwen3ForCausalLM", "what_nobody_has", 1), "");
}

TEST(ModelSpec, HostileConfigsAreRefusedInOneLine) {
  const auto refused = [](const Json& config, std::initializer_list<std::string_view> words) {
    expect_refusal(io::ErrorKind::input, words, [&] { parse(config); });
  };
  refused(with(llama(), "architectures", {"BertModel"}),
          {"config.json", "BertModel", "LlamaForCausalLM", "OPTForCausalLM"});
  refused(with(llama(), "architectures", 5), {"architectures"});
  refused(Json::object(), {"names no architecture"});
  refused(Json::array(), {"one JSON object"});
  for (const char* field : {"hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
                            "num_key_value_heads", "intermediate_size"}) {
    for (const Json& bad :
         {Json(0), Json(-1), Json(UINT64_MAX), Json(INT64_MAX), Json(1.5), Json(1e300), Json("8"), Json::array()})
      refused(with(llama(), field, bad), {"config.json", field});
    if (std::string(field) != "num_key_value_heads") {
      Json missing = llama();
      missing.erase(field);
      refused(missing, {field, "missing"});
    }
  }
  refused(with(llama(), "num_hidden_layers", 1000000000), {"num_hidden_layers"});
  refused(with(llama(), "num_attention_heads", 5), {"multiple"});
  refused(with(llama(), "num_key_value_heads", 3), {"multiple"});
  refused(with(llama(), "head_dim", 7), {"head_dim", "even"});
  refused(with(with(llama(), "hidden_size", 1 << 20), "num_hidden_layers", 4096), {"absurd"});
  refused(with(llama(), "hidden_act", "mish"), {"hidden_act", "mish"});
  refused(with(llama(), "rms_norm_eps", -1), {"rms_norm_eps"});
  refused(with(llama(), "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 4}}), {"dynamic", "llama3", "yarn"});
  refused(with(llama(), "rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}), {"original_max_position_embeddings"});
  refused(with(llama(), "rope_scaling",
               {{"rope_type", "longrope"}, {"original_max_position_embeddings", 64}, {"short_factor", {1}}}),
          {"short_factor", "4 pairs"});
  refused(with(with(llama(), "architectures", {"Phi3ForCausalLM"}), "partial_rotary_factor", 0.1),
          {"partial_rotary_factor", "even"});
  refused(with(llama(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 4}}), {"low_freq_factor"});
  refused(with(llama(), "rope_scaling", "x"), {"rope_scaling"});
  refused(with(llama(), "quantization_config", Json::object()), {"quantization_config"});
  refused(with(llama(), "text_config", 3), {"text_config", "object"});
  refused(with(llama(), "text_config", {{"model_type", "qwen2_5_vl_text"}}), {"text_config", "qwen2_5_vl_text"});
  for (const char* family : {"SmolLM3ForCausalLM", "Cohere2ForCausalLM", "Gemma2ForCausalLM", "Olmo3ForCausalLM"})
    refused(with(with(llama(), "architectures", {family}), "layer_types", {"full_attention"}),
            {"layer_types", "2 layers"});
  refused(with(with(llama(), "architectures", {"SeedOssForCausalLM"}), "residual_dropout", 1), {"residual_dropout"});
  refused(with(with(llama(), "architectures", {"SmolLM3ForCausalLM"}), "no_rope_layers", {1}), {"no_rope_layers"});
  const auto of = [](const char* name, const char* field, const Json& value) {
    return with(with(llama(), "architectures", {name}), field, value);
  };
  refused(of("HeliumForCausalLM", "head_dim", 64), {"head_dim", "hidden_size"});
  refused(of("HunYuanDenseV1ForCausalLM", "use_qk_norm", false), {"use_qk_norm"});
  refused(of("HunYuanDenseV1ForCausalLM", "use_cla", true), {"use_cla"});
  refused(of("HunYuanDenseV1ForCausalLM", "rope_scaling", {{"type", "dynamic"}, {"factor", 2}}), {"dynamic"});
  refused(of("HunYuanDenseV1ForCausalLM", "rope_scaling", {{"type", "dynamic"}, {"alpha", 0}}), {"alpha"});
  refused(with(llama(), "rope_scaling", {{"type", "dynamic"}, {"alpha", 50}}), {"dynamic"});
  refused(of("StableLmForCausalLM", "qk_layernorm", true), {"qk_layernorm"});
  refused(of("StableLmForCausalLM", "hidden_dropout", 0.1), {"hidden_dropout"});
  refused(with(opt(), "word_embed_proj_dim", 16), {"word_embed_proj_dim", "opt-350m"});
  refused(with(opt(), "layer_norm_elementwise_affine", false), {"layer_norm_elementwise_affine"});
  refused(with(gpt2(), "scale_attn_by_inverse_layer_idx", true), {"scale_attn_by_inverse_layer_idx"});
  refused(with(gpt2(), "tie_word_embeddings", "yes"), {"tie_word_embeddings"});
}

TEST(ModelSpec, WhatIsNoModelFolderIsRefusedWithTheRemedy) {
  const testing::TempDir dir;
  const auto refused = [](const std::filesystem::path& folder, std::initializer_list<std::string_view> words) {
    expect_refusal(io::ErrorKind::input, words, [&] { read_folder_spec(folder); });
  };
  refused(dir.path(), {"has no config.json"});
  std::ofstream(dir.path() / "adapter_config.json") << "{}";
  refused(dir.path(), {"holds adapters", "tierflow merge --adapter " + dir.path().string(), "--model BASE --adapter"});
  refused(dir.path() / "absent", {"no such folder", "config.json and safetensors"});
  refused("tierflow-test/absent", {"no such folder", "hf download tierflow-test/absent --local-dir absent"});
}

TEST(ModelSpec, BrokenJsonIsRefused) {
  const auto refused = [](const std::string& text, std::initializer_list<std::string_view> words) {
    expect_refusal(io::ErrorKind::input, words, [&] { parse_model_spec(text, "config.json"); });
  };
  refused("", {"config.json"});
  refused("{\"a\": NaN}", {"JSON"});
  refused("{\"a\": 1e999}", {"JSON"});
  refused("{\"a\": 1, \"a\": 2}", {"twice"});
  refused(std::string(100000, '['), {"deep"});
  refused("{\"a\": \"\xff\xfe\"}", {"JSON"});
  refused("\x80\x04pickle", {"JSON"});
  testing::TempDir dir;
  expect_refusal(io::ErrorKind::input, {"config.json"}, [&] { read_model_spec(dir.path() / "config.json"); });
  expect_refusal(io::ErrorKind::input, {"folder"}, [&] { read_model_spec(dir.path()); });
}

}  // namespace
}  // namespace tierflow
