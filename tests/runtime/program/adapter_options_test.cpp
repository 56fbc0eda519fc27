// What the options of adapters and of frozen weights become, in which configurations they read back, and what
// contradicts itself.
#include "runtime/program/adapter_options.h"

#include <gtest/gtest.h>

#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using testing::expect_refusal;
using Words = std::vector<std::string>;

TrainOptions parse(const Words& more) {
  Words words = {"--model", "m", "--data", "d", "--out", "o"};
  words.insert(words.end(), more.begin(), more.end());
  return parse_train(words);
}
TrainOptions lora(Words more) {
  more.insert(more.begin(), {"--method", "lora"});
  return parse(more);
}

TEST(AdapterOptions, ListsAreTakenApart) {
  using Layers = std::vector<std::int64_t>;
  EXPECT_EQ(lora({"--lora-layers", "0,2,11"}).lora.layers, (Layers{0, 2, 11}));
  EXPECT_EQ(lora({"--lora-layers", "3", "5"}).lora.layers, (Layers{3, 5}));
  EXPECT_EQ(lora({"--modules-to-save", "lm_head,norm"}).lora.saved, (Words{"lm_head", "norm"}));
  EXPECT_EQ(lora({"--lora-target-modules", "q_proj,v_proj"}).lora.targets, (Words{"q_proj", "v_proj"}));
  EXPECT_EQ(parse({"--trainable", "norm,bias", "--freeze", "embed"}).trained.trainable, (Words{"norm", "bias"}));
  EXPECT_EQ(parse({"--freeze", "a,b"}).trained.freeze, (Words{"a", "b"}));
  using Scales = std::vector<std::pair<std::string, double>>;
  EXPECT_EQ(parse({"--lr-scale", "norm=2,a=b=0.5"}).lr_scales, (Scales{{"norm", 2}, {"a=b", 0.5}}));
  using Ranks = std::vector<std::pair<std::string, std::int64_t>>;
  EXPECT_EQ(lora({"--lora-rank-pattern", "q_proj=4,v_proj=6"}).lora.rank_pattern,
            (Ranks{{"q_proj", 4}, {"v_proj", 6}}));
  EXPECT_EQ(lora({"--lora-alpha-pattern", "q_proj=1.5"}).lora.alpha_pattern, (Scales{{"q_proj", 1.5}}));
}

TEST(AdapterOptions, ModulesAreNamesOrOneExpression) {
  const auto targets = [](const Words& more) { return lora(more).lora; };
  for (const char mark : std::string("*+?()[]{}|\\^$")) {
    const std::string expression = std::string("q_proj") + mark;
    EXPECT_EQ(targets({"--lora-target-modules", expression}).target_pattern, expression);
    EXPECT_TRUE(targets({"--lora-target-modules", expression}).targets.empty());
    EXPECT_EQ(targets({"--lora-exclude-modules", expression}).exclude_pattern, expression);
    expect_refusal(io::ErrorKind::usage, {"--lora-target-modules", "stands alone", "q_proj"}, [&] {
      targets({"--lora-target-modules", "v_proj," + expression});
    });
  }
  EXPECT_EQ(targets({"--lora-target-modules", "all-linear"}), targets({}));
  EXPECT_EQ(targets({"--lora-exclude-modules", "none"}), targets({}));
  EXPECT_TRUE(targets({"--lora-target-modules", "none"}).parameters_alone);
  EXPECT_TRUE(targets({"--lora-target-modules", "none"}).targets.empty());
  EXPECT_EQ(targets({"--lora-target-parameters", "experts.gate_up_proj,experts.down_proj"}).parameters,
            (Words{"experts.gate_up_proj", "experts.down_proj"}));
}

TEST(AdapterOptions, TheEffectiveConfigurationReadsBack) {
  const testing::TempDir dir;
  for (const Words& words : {Words{"--lora-rank",
                                   "4",
                                   "--lora-alpha",
                                   "2.5",
                                   "--lora-dropout",
                                   "0.25",
                                   "--lora-layers",
                                   "0,2",
                                   "--lora-target-modules",
                                   "q_proj,v_proj",
                                   "--lora-exclude-modules",
                                   ".*\\.v_proj",
                                   "--lora-rank-pattern",
                                   "q_proj=2",
                                   "--lora-alpha-pattern",
                                   "q_proj=1.5",
                                   "--use-rslora",
                                   "--use-dora",
                                   "--modules-to-save",
                                   "norm,lm_head",
                                   "--loraplus-lr-ratio",
                                   "16",
                                   "--base-precision",
                                   "nf4"},
                             Words{"--init", "pissa_niter_4", "--lora-target-modules", "[qv]_proj"},
                             Words{"--lora-target-modules", "none", "--lora-target-parameters", "a.down_proj,b"}}) {
    const TrainOptions options = lora(words);
    const std::string text = effective_configuration(options);
    testing::write_file(dir.path() / "c.json", text);
    const TrainOptions back = parse_train({"--config-file", (dir.path() / "c.json").string()});
    EXPECT_EQ(effective_configuration(back), text);
    EXPECT_EQ(back.lora, options.lora);
    EXPECT_EQ(back.loraplus_lr_ratio, options.loraplus_lr_ratio);
    EXPECT_EQ(back.base_precision, options.base_precision);
    EXPECT_NE(options.lora, TrainOptions().lora);
  }
}

TEST(AdapterOptions, NumbersAreHeldToTheirLimits) {
  EXPECT_EQ(lora({"--lora-rank", "4096"}).lora.rank, 4096);
  EXPECT_EQ(lora({"--lora-dropout", "0.99"}).lora.dropout, 0.99);
  for (const auto& [option, value, limits] :
       {std::tuple{"--lora-rank", "0", "between 1 and 4096"},
        {"--lora-rank", "4097", "between 1 and 4096"},
        {"--lora-alpha", "-1", "at least 0"},
        {"--lora-dropout", "1", "below 1"},
        {"--loraplus-lr-ratio", "-0.5", "at least 0"},
        {"--trainable-layers", "-1", "between 0"},
        {"--lora-layers", "x", "a whole number"},
        {"--lora-rank-pattern", "q_proj", "takes NAME=VALUE"},
        {"--lora-rank-pattern", "=4", "takes NAME=VALUE"},
        {"--lora-rank-pattern", "q_proj=1.5", "a whole number"},
        {"--lora-alpha-pattern", "q_proj=", "a number"},
        {"--base-precision", "fp32", "bf16, fp8, fp8-rows, mxfp4, int8, nf4, nf4-double"},
        {"--method", "dora", "full, lora"}})
    expect_refusal(io::ErrorKind::usage, {option, limits}, [&, option = option, value = value] {
      parse({option, value});
    });
}

TEST(AdapterOptions, WhatContradictsItselfIsRefused) {
  for (const Words& words : {Words{"--lora-rank", "4"}, Words{"--adapter", "a"}, Words{"--merge"},
                             Words{"--base-precision", "nf4"}, Words{"--loraplus-lr-ratio", "2"}, Words{"--use-dora"}})
    expect_refusal(io::ErrorKind::usage, {words.front() + " is for adapters: give --method lora too"},
                   [&] { parse(words); });
  for (const Words& words : {Words{"--trainable", "x"}, Words{"--freeze", "x"}, Words{"--trainable-layers", "1"}})
    expect_refusal(io::ErrorKind::usage, {"--trainable, --freeze and --trainable-layers are for --method full"},
                   [&] { lora(words); });
  expect_refusal(io::ErrorKind::usage, {"--adapter or --lora-", "not both"}, [] {
    lora({"--adapter", "a", "--lora-rank", "4"});
  });
  EXPECT_EQ(lora({"--adapter", "a", "--merge", "--base-precision", "nf4"}).adapter, "a");
  expect_refusal(io::ErrorKind::usage, {"--method lora needs --model"}, [] {
    parse_train({"--config", "c", "--data", "d", "--out", "o", "--method", "lora"});
  });
}

TEST(AdapterOptions, MergingTakesAdaptersAndTheirModel) {
  const MergeOptions options = parse_merge({"--adapter", "a", "--model", "m", "--out", "o", "--as", "llama"});
  EXPECT_EQ(options.adapter, "a");
  EXPECT_EQ(options.model, "m");
  EXPECT_EQ(options.out, "o");
  EXPECT_EQ(options.read_as, "llama");
  for (const Words& words : {Words{"--adapter", "a"}, Words{"--out", "o"}})
    expect_refusal(io::ErrorKind::usage, {"`tierflow merge` needs --adapter and --out"}, [&] { parse_merge(words); });
}

// The family that training named stands beside the adapters.
TEST(AdapterOptions, TheFamilyIsTheOneOfTheirTraining) {
  const testing::TempDir dir;
  const auto family = [&](const Words& more) {
    Words words = {"--adapter", dir.path().string(), "--out", "o"};
    words.insert(words.end(), more.begin(), more.end());
    return parse_merge(words).read_as;
  };
  EXPECT_EQ(family({}), "");
  testing::write_file(dir.path() / "tierflow_run.json", R"({"as": "qwen2", "lr": 1})");
  EXPECT_EQ(family({}), "qwen2");
  EXPECT_EQ(family({"--as", "llama"}), "llama");
  testing::write_file(dir.path() / "tierflow_run.json", "{}");
  EXPECT_EQ(family({}), "");
  testing::write_file(dir.path() / "tierflow_run.json", "{");
  expect_refusal(io::ErrorKind::input, {"tierflow_run.json", "JSON"}, [&] { family({}); });
}

}  // namespace
}  // namespace tierflow
