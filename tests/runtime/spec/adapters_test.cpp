#include "runtime/spec/adapters.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/spec/packing.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/spec/small_llama.h"

namespace tierflow {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using testing::expect_refusal;
using testing::small_llama;

ModelSpec gpt2() {
  return parse_model_spec(R"({"architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64})",
                          "gpt2");
}

std::vector<const TensorSpec*> adapters_of(const ModelSpec& spec) {
  std::vector<const TensorSpec*> found;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (is_adapter(tensor)) found.push_back(&tensor);
  return found;
}

TEST(AdapterConfig, FactorsOfTheBaseAreAtMostAsManyAsItsSmallerSide) {
  const auto check = [](AdapterConfig config, std::int64_t rank) {
    config.rank = rank;
    ModelSpec spec = small_llama();
    add_adapters(spec, config);
    check_first_factors(spec);
  };
  check({.init = AdapterInit::pissa}, 16);  // k_proj is [16, 32]
  expect_refusal(io::ErrorKind::usage, {"of rank 17", "k_proj.weight, whose smaller side is 16"},
                 [&] { check({.init = AdapterInit::pissa}, 17); });
  check({}, 17);
}

TEST(AdapterConfig, OfAStateFromBeforeTablesCouldBeSavedIsTheSame) {
  ModelSpec spec = small_llama();
  add_adapters(spec, {.rank = 4, .alpha = 8});
  auto before = nlohmann::json::parse(spec.adapter_config_json);
  EXPECT_EQ(before.erase("ensure_weight_tying"), 1U);
  EXPECT_EQ(parse_adapter_config(before.dump(), "before"), parse_adapter_config(spec.adapter_config_json, "now"));
  before["r"] = 8;
  EXPECT_FALSE(parse_adapter_config(before.dump(), "before") == parse_adapter_config(spec.adapter_config_json, "now"));
}

TEST(AdapterConfig, EveryLinearLayerOfTheBlocksUnlessItSaysOtherwise) {
  ModelSpec spec = small_llama();
  add_adapters(spec, {.rank = 4, .alpha = 8});
  const auto adapters = adapters_of(spec);
  ASSERT_EQ(adapters.size(), 3U * 7 * 2);
  EXPECT_EQ(adapters[0]->name, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(adapters[0]->role, "self_attn.q_proj.lora_A.weight");
  EXPECT_THAT(adapters[0]->shape, ElementsAre(4, 32));
  EXPECT_THAT(adapters[1]->shape, ElementsAre(32, 4));
  EXPECT_EQ(adapters[1]->scale, 2.0);
  EXPECT_EQ(adapters[0]->init, Init::uniform);
  EXPECT_EQ(adapters[1]->init, Init::zeros);
  EXPECT_EQ(linear_module(*adapters[0]), "model.layers.0.self_attn.q_proj");
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) EXPECT_EQ(tensor.trainable, is_adapter(tensor)) << tensor.name;
}

TEST(AdapterConfig, NamesLayersAndPatterns) {
  ModelSpec spec = small_llama();
  add_adapters(spec, {.rank = 4,
                      .alpha = 8,
                      .rank_stabilised = true,
                      .targets = {"q_proj", "mlp.down_proj", "v_proj"},
                      .exclude = {"model.layers.2.self_attn.q_proj", "v_proj"},
                      .layers = {0, 2},
                      .rank_pattern = {{"proj", 32}, {"down_proj", 16}},  // names are whole
                      .alpha_pattern = {{"layers.2.mlp.down_proj", 4}}});
  std::vector<std::string> modules;
  for (const TensorSpec* each : adapters_of(spec)) modules.push_back(linear_module(*each));
  EXPECT_THAT(modules, ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj",
                                   "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj",
                                   "model.layers.2.mlp.down_proj", "model.layers.2.mlp.down_proj"));
  const auto adapters = adapters_of(spec);
  EXPECT_EQ(adapters[1]->scale, 8 / std::sqrt(4.0));
  EXPECT_EQ(adapters[3]->scale, 8 / std::sqrt(16.0));
  EXPECT_EQ(adapters[5]->scale, 4 / std::sqrt(16.0));
  EXPECT_THAT(adapters[4]->shape, ElementsAre(16, 48));
}

TEST(AdapterConfig, WeightsThatAreTransposedKeepTheAdaptersShapes) {
  ModelSpec spec = gpt2();
  add_adapters(spec, {.rank = 2, .targets = {"c_attn"}});
  const auto adapters = adapters_of(spec);
  ASSERT_EQ(adapters.size(), 4U);
  EXPECT_EQ(adapters[0]->name, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight");
  EXPECT_THAT(adapters[0]->shape, ElementsAre(2, 32));
  EXPECT_THAT(adapters[1]->shape, ElementsAre(96, 2));
}

// First values stand beside the adapters, frozen; what is written joins both, with the scale there was.
TEST(AdapterConfig, AdaptersWithFirstValuesAreWrittenAsThoseOfTwiceTheRank) {
  for (const bool stabilised : {false, true}) {
    const AdapterConfig config{.rank = 4,
                               .alpha = 3,
                               .rank_stabilised = stabilised,
                               .rank_pattern = {{"q_proj", 6}},
                               .alpha_pattern = {{"v_proj", 5}},
                               .init = AdapterInit::pissa,
                               .pissa_iterations = stabilised ? 4 : 0};
    ModelSpec spec = small_llama(), written = small_llama(), again = small_llama();
    add_adapters(spec, config);
    add_adapters(written, parse_adapter_config(adapter_config_beside_base(spec), "x"));
    const auto both = adapters_of(spec), joined = adapters_of(written);
    ASSERT_EQ(both.size(), 2 * joined.size());
    for (std::size_t i = 0; i < joined.size(); i += 2) {
      const auto *const a = both[2 * i], *const b = both[2 * i + 1], *const a0 = both[2 * i + 2];
      EXPECT_TRUE(a->trainable && b->trainable && !a0->trainable && !both[2 * i + 3]->trainable);
      EXPECT_EQ(a0->shape, a->shape);
      EXPECT_EQ(linear_module(*a0), linear_module(*a));
      EXPECT_EQ(name_beside_base(*a0), joined[i]->name);
      EXPECT_EQ(name_beside_base(*both[2 * i + 3]), joined[i + 1]->name);
      EXPECT_EQ(joined[i]->shape[0], 2 * a->shape[0]) << a->name;
      EXPECT_DOUBLE_EQ(joined[i + 1]->scale, b->scale) << b->name;
    }
    const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
    EXPECT_EQ(read.init, AdapterInit::pissa);
    EXPECT_EQ(read.pissa_iterations, config.pissa_iterations);
    add_adapters(again, read);
    EXPECT_EQ(again.adapter_config_json, spec.adapter_config_json);
    expect_refusal(io::ErrorKind::usage, {"when its format is known"},
                   [&] { set_base_format(spec, WeightFormat::nf4); });
    set_base_format(again = small_llama(), WeightFormat::nf4);
    add_adapters(again, config);
    EXPECT_EQ(again.units[1].tensors[0].format, WeightFormat::nf4);
  }
  EXPECT_EQ(joined_with_first({.rank = 3}), AdapterConfig{.rank = 3});
}

TEST(AdapterConfig, MagnitudesStandBesideTheLengthsThatTheyChange) {
  ModelSpec spec = small_llama(), again = small_llama();
  add_adapters(spec, {.rank = 4, .dora = true, .targets = {"down_proj"}});
  const auto all = adapters_of(spec);
  ASSERT_EQ(all.size(), 3U * 4);
  EXPECT_EQ(all[2]->name, "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector");
  EXPECT_THAT(all[2]->shape, ElementsAre(32));
  EXPECT_TRUE(all[2]->trainable && !all[2]->decays && all[2]->moments_32);
  EXPECT_FALSE(all[3]->trainable);
  EXPECT_EQ(all[3]->format, WeightFormat::fp32);
  EXPECT_EQ(name_beside_base(*all[3]), all[2]->name);
  EXPECT_EQ(linear_module(*all[3]), "model.layers.0.mlp.down_proj");
  add_adapters(again, parse_adapter_config(spec.adapter_config_json, "x"));
  EXPECT_EQ(again.adapter_config_json, spec.adapter_config_json);
  EXPECT_EQ(adapters_of(again).size(), all.size());
}

// Of patterns that fit one layer the first counts, there and back.
TEST(AdapterConfig, PatternsKeepTheirOrder) {
  const AdapterConfig config{.rank_pattern = {{"q_proj", 8}, {".*proj", 4}, {"q_proj", 2}},
                             .alpha_pattern = {{"v_proj", 3}, {"k_proj|v_proj", 5}}};
  ModelSpec spec = small_llama(), again = small_llama();
  add_adapters(spec, config);
  EXPECT_THAT(adapters_of(spec)[0]->shape, ElementsAre(8, 32));
  const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
  ASSERT_EQ(read.rank_pattern.size(), 2U);
  EXPECT_EQ(read.rank_pattern[0], (std::pair<std::string, std::int64_t>("q_proj", 8)));
  EXPECT_EQ(read.alpha_pattern[0], (std::pair<std::string, double>("v_proj", 3)));
  add_adapters(again, read);
  const auto first = adapters_of(spec), second = adapters_of(again);
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i]->shape, second[i]->shape) << first[i]->name;
    EXPECT_EQ(first[i]->scale, second[i]->scale) << first[i]->name;
  }
}

// PEFT takes no expression for modules together with numbers of layers.
TEST(AdapterConfig, AnExpressionWithLayersIsWrittenAsModules) {
  ModelSpec spec = small_llama(), again = small_llama();
  add_adapters(spec, {.target_pattern = ".*[kv]_proj", .layers = {1}});
  const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
  EXPECT_THAT(read.targets, ElementsAre("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"));
  EXPECT_EQ(read.target_pattern, "");
  EXPECT_TRUE(read.layers.empty());
  add_adapters(again, read);
  EXPECT_EQ(adapters_of(again).size(), adapters_of(spec).size());
}

std::vector<std::string> trained_beside(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (!is_adapter(tensor) && tensor.trainable) names.push_back(tensor.name);
  return names;
}

// As PEFT finds them: by the end of a path, be it within a name; and all that is in a module.
TEST(AdapterConfig, ModulesThatAreSavedAreTrainedAndHaveNoAdapters) {
  ModelSpec spec = small_llama();
  add_adapters(spec, {.rank = 4, .saved = {"lm_head", "norm", "1.mlp", "layers.0.self_attn.q_proj"}});
  EXPECT_THAT(trained_beside(spec),
              ElementsAre("model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight",
                          "model.layers.0.post_attention_layernorm.weight", "model.layers.1.mlp.gate_proj.weight",
                          "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
                          "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
                          "model.layers.2.input_layernorm.weight", "model.layers.2.post_attention_layernorm.weight",
                          "lm_head.weight", "model.norm.weight"));
  EXPECT_EQ(adapters_of(spec).size(), 2U * (3 * 7 - 4));
  const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
  EXPECT_THAT(read.saved, ElementsAre("lm_head", "norm", "1.mlp", "layers.0.self_attn.q_proj"));
  EXPECT_FALSE(read.ties_saved);
  // They stay as they are where the base is in another format.
  const std::vector<std::string> trained = trained_beside(spec);
  set_base_format(spec, WeightFormat::int8);
  EXPECT_EQ(trained_beside(spec), trained);
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (!is_adapter(tensor) && tensor.name.ends_with("_proj.weight")) {
        EXPECT_EQ(tensor.format, tensor.trainable ? WeightFormat::bf16 : WeightFormat::int8) << tensor.name;
      }
}

// In transformers 5 the head of GPT-NeoX is a module lm_head; folders call it embed_out.
TEST(AdapterConfig, AHeadThatIsSavedIsPeftsHeadWhateverFoldersCallIt) {
  for (const char* name : {"lm_head", "embed_out"}) {
    ModelSpec spec = parse_model_spec(R"({"architectures": ["GPTNeoXForCausalLM"], "vocab_size": 96, "hidden_size": 32,
      "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rotary_pct": 0.5})",
                                      "neox");
    add_adapters(spec, {.rank = 2, .saved = {name}});
    EXPECT_THAT(trained_beside(spec), ElementsAre("embed_out.weight"));
    std::vector<std::string> there;
    for (const TensorSpec& tensor : spec.units.back().tensors) there.push_back(name_beside_base(tensor));
    EXPECT_THAT(there, Contains("base_model.model.lm_head.weight"));
    EXPECT_THAT(parse_adapter_config(spec.adapter_config_json, "x").saved, ElementsAre("lm_head"));
  }
}

TEST(AdapterConfig, ATiedEmbeddingThatIsSavedStaysTheHead) {
  for (const char* name : {"wte", "lm_head"}) {
    ModelSpec spec = gpt2(), again = gpt2();
    add_adapters(spec, {.rank = 2, .saved = {name}});
    EXPECT_THAT(trained_beside(spec), ElementsAre("transformer.wte.weight"));
    EXPECT_EQ(tied_name_beside_base(spec), "base_model.model.lm_head.weight");
    const AdapterConfig read = parse_adapter_config(spec.adapter_config_json, "x");
    EXPECT_TRUE(read.ties_saved);
    EXPECT_EQ(read.saved.back(), "lm_head");
    add_adapters(again, read);
    EXPECT_EQ(again.adapter_config_json, spec.adapter_config_json);
    expect_refusal(io::ErrorKind::usage, {"ensure_weight_tying is false"},
                   [&] { add_adapters(again, {.rank = 2, .saved = {name}, .ties_saved = false}); });
  }
  ModelSpec spec = gpt2();
  add_adapters(spec, {.rank = 2, .saved = {"ln_f"}, .ties_saved = false});
  EXPECT_EQ(tied_name_beside_base(spec), "");
}

TEST(AdapterConfig, AFolderWithoutOneIsRefusedByTheFilesName) {
  const testing::TempDir dir;
  testing::expect_refusal(io::ErrorKind::input, {(dir.path() / "adapter_config.json").string()},
                          [&] { read_adapter_config(dir.path()); });
  testing::expect_refusal(io::ErrorKind::input, {"is no folder"}, [&] { read_adapter_config(dir.path() / "none"); });
}

TEST(AdapterConfig, NewOnesExcludeAndGiveRanksToWhatIsThere) {
  const auto expect_patterns = [](AdapterConfig config) {
    config.targets = {"q_proj", "v_proj"};
    ModelSpec spec = small_llama();
    add_adapters(spec, config);  // PEFT's folders may have what fits nothing
    expect_patterns_fit(spec, config);
  };
  expect_patterns({.exclude = {"v_proj", "layers.1.mlp.down_proj", "lm_head"}, .rank_pattern = {{"q_proj", 4}}});
  expect_patterns({.exclude_pattern = ".*v_proj", .alpha_pattern = {{"layers\\.1\\..*q_proj", 4}}});
  const auto expect_unfit = [&](const AdapterConfig& config, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { expect_patterns(config); });
  };
  expect_unfit({.exclude = {"v_proj", "a\nb"}}, "no linear layer to exclude is called a?b: this model has down_proj");
  expect_unfit({.exclude = {"proj"}}, "no linear layer to exclude is called proj: this model has");
  expect_unfit({.exclude_pattern = "v_proj"}, "no linear layer to exclude fits v_proj: this model has");
  // k_proj is there, but has no adapter; nor has what is excluded.
  for (const char* name : {"foo", "k_proj", "proj", "v_proj"})
    expect_unfit(
        {.exclude = {"v_proj"}, .rank_pattern = {{"q_proj", 4}, {name, 4}}},
        fmt::format("nothing that has an adapter fits {}, for which a rank is given: there are adapters of q_proj",
                    name));
  expect_unfit({.alpha_pattern = {{"foo", 4}}}, "fits foo, for which an alpha is given");
}

TEST(AdapterConfig, FoldersOfOthersAreReadWithCare) {
  const auto add = [](const std::string& fields) {
    ModelSpec spec = small_llama();
    add_adapters(spec, parse_adapter_config(R"({"peft_type": "LORA", )" + fields + "}", "there"));
  };
  add(R"("r": 4, "lora_alpha": 8.5, "init_lora_weights": "gaussian", "bias": "none", "layers_to_transform": 1)");
  const auto expect_unread = [&](const std::string& fields, std::string_view words) {
    expect_refusal(io::ErrorKind::input, {words}, [&] { add(fields); });
  };
  expect_unread(R"("init_lora_weights": "pissa_niter_0")", "there: init_lora_weights is \"pissa_niter_0\"");
  expect_unread(R"("init_lora_weights": "loftq")", "belong to a changed base");
  expect_unread(R"("alora_invocation_tokens": [1, 2])", "alora_invocation_tokens");
  expect_unread(R"("lora_alpha": 0)", "there: lora_alpha");
  expect_unread(R"("lora_dropout": 1)", "there: lora_dropout");
  expect_unread(R"("rank_pattern": {"q_proj": 8.7})", "there: rank_pattern: q_proj");
  expect_unread(R"("rank_pattern": {"q_proj": 1e300})", "there: rank_pattern: q_proj");
  expect_unread(R"("alpha_pattern": {"q_proj": -1})", "there: alpha_pattern: q_proj");
  expect_unread(R"("rank_pattern": {"q\n\u001b[2J_proj": 0})", "there: rank_pattern: q??[2J_proj is 0");
  expect_unread(R"("layers_to_transform": [-1])", "layers_to_transform");
  expect_unread(R"("layers_pattern": "layers")", "there: layers_pattern stands without layers_to_transform");
  expect_unread(R"("layers_to_transform": 1, "layers_pattern": 7)", "layers_pattern is neither a name nor a list");
  expect_unread(R"("layers_to_transform": 1, "layers_pattern": "layers", "target_modules": ".*q_proj")",
                "layers_pattern is for target_modules that are names");
  expect_unread(R"("modules_to_save": "lm_head")", "modules_to_save is no list");
  expect_unread(R"("modules_to_save": [""])", "modules_to_save has an entry that is no name");
  const auto expect_unfit = [&](const std::string& modules, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { add("\"target_modules\": " + modules); });
  };
  expect_unfit(R"(["a\nb"])", "no linear layer is called");
  add(R"x("target_modules": ".*(q_proj|lm_head)", "modules_to_save": ["lm_head"])x");
  expect_unfit("\"" + std::string(2000, '(') + "\"", "longer than 1000");
  // Exponential for a matcher that goes back.
  expect_unfit(R"("(.*)*(.*)*(.*)*(.*)*x")", "no linear layer is left");
}

TEST(AdapterConfig, TheHeadAndTheTableHaveAdaptersWhereTheyAreNamed) {
  const auto adapted = [](ModelSpec spec, const AdapterConfig& config) {
    add_adapters(spec, config);
    std::vector<std::string> names;
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors)
        if (is_adapter(tensor) && linear_module(tensor).find("layers") == std::string::npos)
          names.push_back(linear_module(tensor));
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(adapted(small_llama(), {.rank = 2}), Names{});  // all linear layers are those of blocks
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .targets = {"q_proj", "lm_head"}}), (Names{"lm_head", "lm_head"}));
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .targets = {"embed_tokens"}}),
            (Names{"model.embed_tokens", "model.embed_tokens"}));
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .target_pattern = ".*(q_proj|lm_head)"}), (Names{"lm_head", "lm_head"}));
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .targets = {"q_proj", "lm_head"}, .exclude = {"lm_head"}}), Names{});
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .targets = {"q_proj", "lm_head"}, .layers = {1}}), Names{});
  EXPECT_EQ(adapted(small_llama(), {.rank = 2, .targets = {"q_proj", "lm_head"}, .saved = {"lm_head"}}), Names{});
  const auto expect_refused = [](ModelSpec spec, const AdapterConfig& config, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { add_adapters(spec, config); });
  };
  expect_refused(small_llama(), {.rank = 2, .dora = true, .targets = {"lm_head"}},
                 "lm_head is a target: adapters of the head");
  expect_refused(small_llama(), {.rank = 2, .targets = {"lm_head"}, .init = AdapterInit::pissa}, "default values");
  ModelSpec tied = parse_model_spec(R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    "tie_word_embeddings": true})",
                                    "tied");
  for (const char* name : {"lm_head", "embed_tokens"})
    expect_refused(tied, {.rank = 2, .targets = {"q_proj", name}}, "the table of tokens is the head too");
  expect_refused(gpt2(), {.rank = 2, .targets = {"wpe"}}, "wpe is a target: outside of blocks, only the head");
}

TEST(AdapterConfig, NumbersOfLayersStandWhereTheirPatternSays) {
  const auto modules_with = [](const std::string& pattern) {
    ModelSpec spec = small_llama();
    const auto read = [&] {
      return parse_adapter_config(
          R"({"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [0, 2],)"
          R"( "layers_pattern": )" +
              pattern + "}",
          "there");
    };
    add_adapters(spec, read());
    // What is written says the same.
    EXPECT_EQ(parse_adapter_config(spec.adapter_config_json, "written").layer_patterns, read().layer_patterns);
    std::vector<std::string> found;
    for (const TensorSpec* adapter : adapters_of(spec))
      if (adapter_part(*adapter) == AdapterPart::a) found.push_back(linear_module(*adapter));
    return found;
  };
  const auto both = ElementsAre("model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj");
  for (const char* pattern :
       {R"("layers")", R"(["h", "layers"])", R"("l[a-z]+s")", R"("model.layers")", "null", "[]", R"("")"})
    EXPECT_THAT(modules_with(pattern), both) << pattern;
  for (const char* pattern : {R"("h")", R"(["ayers"])", R"("layer")"})
    expect_refusal(io::ErrorKind::usage, {"no linear layer is left to adapt"}, [&] { modules_with(pattern); });
  expect_refusal(io::ErrorKind::usage, {"no regular expression"}, [&] { modules_with(R"("(")"); });
}

TEST(AdapterConfig, ABaseInAnotherFormatIsPackedAsItsBytes) {
  ModelSpec spec = small_llama();
  add_adapters(spec, {.rank = 4});
  const PackedModel plain = pack(spec, Precision::fp32_master_adam8);
  set_base_format(spec, WeightFormat::nf4);
  const PackedModel packed = pack(spec, Precision::fp32_master_adam8);
  EXPECT_EQ(packed.trainable_parameters, plain.trainable_parameters);
  std::size_t stored = 0;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (const PackedTensor& each : packed.units[unit].tensors) {
      const TensorSpec& tensor = spec.units[unit].tensors[static_cast<std::size_t>(each.tensor)];
      const bool linear = tensor.name.ends_with("_proj.weight");
      EXPECT_EQ(tensor.format, linear ? WeightFormat::nf4 : WeightFormat::bf16) << tensor.name;
      const auto elements = static_cast<std::uint64_t>(tensor.elements());
      EXPECT_EQ(each.elements, linear ? elements * 9 / 32 : elements) << tensor.name;  // half a byte, and 4 for each 64
      stored += linear ? 1 : 0;
    }
  EXPECT_EQ(stored, 3U * 7);
}

TEST(AdapterConfig, WhatCannotBeIsRefusedWithTheNamesThereAre) {
  const auto expect_refused = [](const AdapterConfig& config, std::string_view words) {
    ModelSpec spec = small_llama();
    expect_refusal(io::ErrorKind::usage, {words}, [&] { add_adapters(spec, config); });
  };
  expect_refused({.targets = {"q_proj", "c_attn"}}, "c_attn");
  expect_refused({.targets = {"c_attn"}}, "down_proj, gate_proj, k_proj");
  expect_refused({.targets = {"proj"}}, "is called proj");  // names are whole
  expect_refused({.targets = {"q_proj"}, .exclude = {"q_proj"}}, "no linear layer is left");
  expect_refused({.layers = {3}}, "0 to 2");
  expect_refused({.saved = {"lm_head", "wte"}}, "could be saved is called wte: this model has down_proj, embed_tokens");
  expect_refused({.saved = {"_proj"}}, "is a part of the name model.layers.0.self_attn.q_proj");
  expect_refused({.saved = {"self_attn", "mlp"}}, "no linear layer is left");
  expect_refused({.rank = 0}, "1 to 4096");
  expect_refused({.rank = 2049, .init = AdapterInit::olora}, "1 to 2048");
  expect_refused({.rank_pattern = {{"q_proj", 5000}}}, "1 to 4096");
  expect_refused({.alpha = 0}, "above 0");
  expect_refused({.alpha = NAN}, "above 0");
  expect_refused({.dropout = 1}, "below 1");
  expect_refused({.dora = true, .init = AdapterInit::pissa}, "not with factors of the base");
}

TEST(AdapterConfig, ProjectedGradientsHaveWindowsAndNothingOfAdaptersAlone) {
  const auto galore = [](AdapterConfig config) {
    config.init = AdapterInit::galore;
    return config;
  };
  for (const Windows windows : {Windows{.steps = 1, .scale = 0.25}, {.steps = 200, .scale = 1}})
    EXPECT_NO_THROW(check_adapters(galore({.rank = 4096, .windows = windows})));
  const auto refused = [&](const AdapterConfig& config, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { check_adapters(galore(config)); });
  };
  refused({.windows = {.steps = 0}}, "windows of at least 1 step");
  for (const double scale : {0.0, -1.0, static_cast<double>(INFINITY), static_cast<double>(NAN)})
    refused({.windows = {.scale = scale}}, "a scale above 0");
  for (const AdapterConfig& config :
       {AdapterConfig{.rank_stabilised = true}, AdapterConfig{.dropout = 0.1}, AdapterConfig{.saved = {"lm_head"}}})
    refused(config, "no dropout, no scale of adapters");
}

// transformers calls them so in a model of text and images, and PEFT with it.
TEST(AdapterConfig, LayersOfAWrappedModelHaveTheNamesOfBothClasses) {
  const auto wrapped = [] {
    return parse_model_spec(R"({"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {"x": 1},
      "text_config": {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 8,
                      "num_hidden_layers": 2, "num_attention_heads": 2}})",
                            "wrapped");
  };
  for (const char* name : {"model.language_model.layers.1.self_attn.q_proj", "language_model.layers.1.self_attn.q_proj",
                           "model.layers.1.self_attn.q_proj", "layers.1.self_attn.q_proj"}) {
    ModelSpec spec = wrapped();
    add_adapters(spec, {.rank = 2, .targets = {name}});
    const auto adapters = adapters_of(spec);
    ASSERT_EQ(adapters.size(), 2U) << name;
    EXPECT_EQ(linear_module(*adapters[0]), "model.layers.1.self_attn.q_proj") << name;
  }
  // What is written beside it names each module by its whole path, and nothing else chooses.
  ModelSpec spec = wrapped();
  add_adapters(spec, {.rank = 2,
                      .alpha = 4,
                      .targets = {"q_proj", "k_proj", "v_proj"},
                      .exclude = {"v_proj"},
                      .layers = {1},
                      .layer_patterns = {"layers"},
                      .rank_pattern = {{"k_proj", 1}},
                      .alpha_pattern = {{"q_proj", 3}}});
  const AdapterConfig written = parse_adapter_config(adapter_config_beside_base(spec), "written");
  const std::string layer = "model.language_model.layers.1.self_attn.";
  EXPECT_THAT(written.targets, ::testing::UnorderedElementsAre(layer + "q_proj", layer + "k_proj"));
  EXPECT_TRUE(written.exclude.empty() && written.layers.empty() && written.layer_patterns.empty());
  EXPECT_TRUE(written.target_pattern.empty() && written.exclude_pattern.empty() && written.parameters.empty());
  ASSERT_EQ(written.rank_pattern.size(), 1U);
  EXPECT_EQ(written.rank_pattern[0].second, 1);
  ASSERT_EQ(written.alpha_pattern.size(), 1U);
  EXPECT_EQ(written.alpha_pattern[0].second, 3);
  EXPECT_EQ(written.rank, 2);
  EXPECT_EQ(written.alpha, 4);
  ModelSpec plain = small_llama();
  expect_refusal(io::ErrorKind::usage, {"is called model.language_model.layers.1.self_attn.q_proj"},
                 [&] { add_adapters(plain, {.targets = {"model.language_model.layers.1.self_attn.q_proj"}}); });
}

}  // namespace
}  // namespace tierflow
