#include "runtime/program/adapter_options.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/program/command_line.h"
#include "runtime/program/data_options.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Names; or one regular expression, known by a character that no name has. left_out: set by the word "none", which then
// is another than the one for no names.
void add_modules(OptionTable& table, const std::string& name, std::vector<std::string>& names, std::string& pattern,
                 const std::string& none, const std::string& help, bool* left_out = nullptr) {
  table.add(
      {.name = name,
       .value_name = "NAMES|REGEX",
       .help = help,
       .most = 1 << 12,
       .commas = true,
       .set =
           [&names, &pattern, name, none, left_out](const auto& words) {
             names.clear();
             pattern.clear();
             if (left_out != nullptr) *left_out = words.size() == 1 && words[0] == "none";
             if (words.size() == 1 && (words[0] == none || words[0] == "none")) return;
             for (const std::string& word : words)
               if (word.find_first_of("*+?()[]{}|\\^$") == std::string::npos)
                 names.push_back(word);
               else if (words.size() == 1)
                 pattern = word;
               else
                 fail_usage(fmt::format("--{}: a regular expression ({}) stands alone, and has no comma", name,
                                        printable(word)));
           },
       .get =
           [&names, &pattern, none, left_out] {
             if (left_out != nullptr && *left_out) return OrderedJson("none");
             return !pattern.empty() ? OrderedJson(pattern) : names.empty() ? OrderedJson(none) : OrderedJson(names);
           }});
}

void add_words(OptionTable& table, const std::string& name, std::vector<std::string>& list,
               const std::string& value_name, const std::string& help) {
  table.add({.name = name,
             .value_name = value_name,
             .help = help,
             .most = 1 << 12,
             .commas = true,
             .set = [&list](const auto& words) { list = words; },
             .get = [&list] { return OrderedJson(list); }});
}

// NAME=VALUE, several.
template <class Value, class Parse>
void add_patterns(OptionTable& table, const std::string& name, std::vector<std::pair<std::string, Value>>& patterns,
                  const std::string& help, Parse parse) {
  table.add({.name = name,
             .value_name = "NAME=X",
             .help = help,
             .most = 1 << 12,
             .commas = true,
             .set =
                 [&patterns, name, parse](const auto& words) {
                   patterns.clear();
                   for (const std::string& word : words) {
                     const std::size_t equals = word.rfind('=');
                     if (equals == std::string::npos || equals == 0)
                       fail_usage(fmt::format("--{} takes NAME=VALUE, not \"{}\"", name, printable(word)));
                     patterns.emplace_back(word.substr(0, equals), parse(word.substr(equals + 1), name));
                   }
                 },
             .get =
                 [&patterns] {
                   auto list = OrderedJson::array();
                   for (const auto& [expression, value] : patterns)
                     list.push_back(fmt::format("{}={}", expression, value));
                   return list;
                 }});
}

void add_layers(OptionTable& table, AdapterConfig& config) {
  table.add({.name = "lora-layers",
             .value_name = "N",
             .help = "numbers of the layers that get adapters, from 0; none: all",
             .most = 1 << 12,
             .commas = true,
             .set =
                 [&config](const auto& words) {
                   config.layers.clear();
                   for (const std::string& word : words) config.layers.push_back(parse_integer(word, "lora-layers"));
                 },
             .get = [&config] { return OrderedJson(config.layers); }});
}

}  // namespace

void add_base_precision(OptionTable& table, std::string& precision) {
  table.choice(
      "base-precision", precision, {kOwnFormat, "bf16", "fp8", "fp8-rows", "mxfp4", "int8", "nf4", "nf4-double"},
      "how the weights beside the adapters are stored and streamed: 2, 1 or 0.53 (as a folder in FP8 or MXFP4 "
      "has them), 1.02, 0.56 or 0.52 bytes each; auto: as the folder has them where that is FP8 or MXFP4, else "
      "bf16");
}

void add_trained_rows(OptionTable& table, TrainOptions& o) {
  add_words(table, "trainable", o.trained.trainable, "REGEX",
            "train the tensors whose names have one of these regular expressions in them, and freeze the others");
  add_words(table, "freeze", o.trained.freeze, "REGEX", "do not train tensors, named in the same way");
  table.integer("trainable-layers", o.trained.last_layers, 0, "train the last N layers alone; 0: all");
  add_patterns(table, "lr-scale", o.lr_scales, "multiply the learning rate of tensors, named in the same way",
               parse_number);
}

void add_adapter_rows(OptionTable& table, TrainOptions& o) {
  table.group("Adapters");
  table.choice("method", o.method, {"full", "lora", "galore"},
               "what is trained: every weight; or low-rank adapters beside weights that stay as they are; or every "
               "weight, with projected gradients of linear layers");
  AdapterConfig& config = o.lora;
  table.integer("lora-rank", config.rank, 1, "rank of the adapters", 4096);
  table.number("lora-alpha", config.alpha, 0, 1e9, "their output is scaled by alpha / rank");
  table.number("lora-dropout", config.dropout, 0, 1, "dropout of their input");
  add_modules(table, "lora-target-modules", config.targets, config.target_pattern, "all-linear",
              "linear layers that get one: names such as q_proj, or one regular expression for the whole path; none: "
              "parameters alone do",
              &config.parameters_alone);
  add_words(table, "lora-target-parameters", config.parameters, "NAMES",
            "parameters of experts that get one too: mlp.experts.gate_up_proj, mlp.experts.down_proj");
  add_modules(table, "lora-exclude-modules", config.exclude, config.exclude_pattern, "none",
              "linear layers that get none, named in the same way");
  add_layers(table, config);
  add_patterns(table, "lora-rank-pattern", config.rank_pattern, "ranks that differ, by name or regular expression",
               parse_integer);
  add_patterns(table, "lora-alpha-pattern", config.alpha_pattern, "alphas that differ, by name or regular expression",
               parse_number);
  table.flag("use-rslora", config.rank_stabilised, "scale by alpha / sqrt(rank)");
  table.flag("use-dora", config.dora, "train the lengths of the rows of each weight with its adapter apart (DoRA)");
  table.number("loraplus-lr-ratio", o.loraplus_lr_ratio, 0, 1e6,
               "the learning rate of B is so many times A's (LoRA+; 1: LoRA)");
  table.add({.name = "init",
             .value_name = "default|pissa|pissa_niter_N|olora|lora-ga|lora_ga",
             .help = "first values: with a product of zero; or factors of the weights, by SVD (whole, or randomised "
                     "with N iterations) or QR; or of their gradient in the first step (lora-ga as the paper has it, "
                     "lora_ga as PEFT does)",
             .set = [&config](const auto& words) { set_adapter_init(config, words.front()); },
             .get = [&config] { return OrderedJson(adapter_init_name(config)); }});
  add_words(table, "modules-to-save", config.saved, "NAMES",
            "modules that are trained whole beside the adapters: embed_tokens, lm_head, norm, ...");
  table.integer("rank", o.galore.rank, 1, "with --method galore: rank of the projected gradients", 4096);
  table.integer("update-gap", o.galore.windows.steps, 1, "steps with the same projection", 1'000'000'000);
  table.number("scale", o.galore.windows.scale, 0, 1e9, "multiply the learning rate of what is projected");
  add_base_precision(table, o.base_precision);
  table.path("adapter", o.adapter, "DIR", "begin with these adapters, a folder as PEFT writes it");
  table.flag("merge", o.merge, "write the whole model with the adapters added, in place of the adapters");
}

namespace {

AdapterConfig with_layers_of(const AdapterConfig& from, AdapterConfig config) {
  config.targets = from.targets;
  config.exclude = from.exclude;
  config.target_pattern = from.target_pattern;
  config.exclude_pattern = from.exclude_pattern;
  config.layers = from.layers;
  config.rank_pattern = from.rank_pattern;
  return config;
}

}  // namespace

AdapterConfig galore_config(const TrainOptions& o) {
  return with_layers_of(o.lora, o.galore);
}

void check_adapter(const TrainOptions& o, const std::string& given_first) {
  const AdapterConfig none = TrainOptions().lora;
  const bool given = !(o.lora == none), galore = o.method == "galore";
  const bool of_adapters = galore ? !(o.lora == with_layers_of(o.lora, none)) : given;
  if (o.method != "lora" &&
      (of_adapters || !o.adapter.empty() || o.merge || (o.base_precision != "bf16" && o.base_precision != kOwnFormat) ||
       o.loraplus_lr_ratio != 1))
    fail_usage(galore ? "of the options of adapters, --method galore takes those that name layers and their ranks"
                      : given_first + " is for adapters: give --method lora too");
  if (!galore && !(o.galore == TrainOptions().galore))
    fail_usage("--rank, --update-gap and --scale are for --method galore");
  if (galore && o.galore.windows.scale == 0)
    fail_usage("--scale must be above 0: with 0 the projected layers learn nothing");
  if (galore && o.weight_decay != 0)
    fail_usage("--method galore has no --weight-decay: what it projects is written once a window");
  if (o.method == "lora" && !(o.trained == TrainableConfig()))
    fail_usage(
        "--trainable, --freeze and --trainable-layers are for --method full and galore: of adapters all are trained");
  if (o.lora.parameters_alone && (!o.lora.layers.empty() || !o.lora.exclude.empty() || !o.lora.exclude_pattern.empty()))
    fail_usage(
        "--lora-layers and --lora-exclude-modules choose among --lora-target-modules, which are none: name the layer "
        "in "
        "the path of the parameter");
  if (given && !o.adapter.empty())
    fail_usage("give --adapter or --lora-..., not both: the folder's adapter_config.json sets rank, alpha and targets");
}

OptionTable merge_table(MergeOptions& o) {
  OptionTable table("merge");
  table.path("adapter", o.adapter, "DIR", "the adapters, a folder as `tierflow train --method lora` and PEFT write it");
  table.path("model", o.model, "DIR", "the model that they are for; none: the folder that they name");
  add_family(table, o.read_as);
  table.path("out", o.out, "DIR", "folder for the whole model");
  return table;
}

MergeOptions parse_merge(const std::vector<std::string>& words) {
  MergeOptions options;
  const OptionTable table = merge_table(options);
  CommandLine(table).apply(words);
  if (options.adapter.empty() || options.out.empty()) fail_usage("`tierflow merge` needs --adapter and --out");
  keep_family(options.read_as, options.adapter);
  return options;
}

double highest_lr(const TrainOptions& options) {
  return options.lr.value_or(options.method == "lora" ? 1e-4 : 1e-5);
}

}  // namespace tierflow
