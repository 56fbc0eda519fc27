#include "runtime/program/generate_options.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/program/adapter_options.h"
#include "runtime/program/command_line.h"
#include "runtime/program/data_options.h"
#include "runtime/program/machine_options.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kPrompts = "Prompts";
constexpr const char* kSampling = "Sampling; left out: as the model's generation_config.json says";

void add_texts(OptionTable& table, const std::string& name, std::vector<std::string>& value, const std::string& help) {
  table.add({.name = name,
             .value_name = "TEXT",
             .help = help,
             .most = 1 << 20,
             .set = [&value](const auto& words) { value = words; },
             .get = [&value] { return OrderedJson(value); }});
}

// A number in place of the model's own.
void add_choice(OptionTable& table, const std::string& name, std::optional<double>& value, double least, double most,
                const std::string& help) {
  table.add({.name = name,
             .value_name = "X",
             .help = help,
             .set =
                 [&value, name, least, most](const auto& words) {
                   const double number = parse_number(words[0], name);
                   if (!(number >= least && number <= most))
                     fail_usage(fmt::format("--{} is {}; it must be from {} to {}", name, number, least, most));
                   value = number;
                 },
             .get = [&value] { return value ? OrderedJson(*value) : OrderedJson(); }});
}

}  // namespace

OptionTable generate_table(GenerateOptions& o) {
  OptionTable table("generate");
  table.group(kData);
  table.path("model", o.model, "DIR", "Hugging Face model folder (config.json and safetensors)");
  add_family(table, o.read_as);
  table.path("adapter", o.adapter, "DIR", "adapters of the model, a folder as PEFT writes it");
  add_base_precision(table, o.base_precision);
  table.text("tokenizer", o.tokenizer, "auto: the model's tokenizer.json, else bytes; bytes; or a tokenizer.json");
  table.names_file({"auto", "bytes"});
  table.path("chat-template", o.chat_template, "FILE", "chat template in place of the tokenizer's");
  table.path("python", o.python, "FILE", "Python with the packages `tokenizers` and `transformers`");
  table.group(kPrompts);
  add_texts(table, "prompt", o.prompt, "text to continue; more than one: each for itself");
  table.path("prompts", o.prompts, "FILE",
             "a text file with a prompt a line, or .jsonl with rows of \"messages\" or \"prompt\"");
  table.flag("chat", o.chat, "prompts are a user's messages; without any: talk on the terminal");
  table.text("system", o.system, "system message of --chat");
  table.integer("context", o.context, 16, "tokens that a talk on the terminal may come to", kMostTokens);
  table.group(kSampling);
  table.integer("max-new-tokens", o.max_new_tokens, 1, "tokens to generate at most for each prompt", kMostTokens);
  add_choice(table, "temperature", o.temperature, 0, 1e6, "logits are divided by it; 0: the most likely token");
  table.add({.name = "top-k",
             .value_name = "N",
             .help = "draw from the most likely so many; 0: from all",
             .set =
                 [&o](const auto& words) {
                   o.top_k = parse_integer(words[0], "top-k");
                   if (*o.top_k < 0) fail_usage(fmt::format("--top-k is {}; it must be at least 0", *o.top_k));
                 },
             .get = [&o] { return o.top_k ? OrderedJson(*o.top_k) : OrderedJson(); }});
  add_choice(table, "top-p", o.top_p, 0, 1, "draw from the most likely ones that together reach this probability");
  add_choice(table, "min-p", o.min_p, 0, 1, "draw from those that reach this share of the most likely one's");
  add_choice(table, "repetition-penalty", o.repetition_penalty, 1e-6, 1e6,
             "above 1: tokens that were there are less likely");
  add_texts(table, "stop", o.stop,
            "tokens that end a text, besides the model's own, by their text or their name in the vocabulary");
  table.seed("seed", o.seed, "of the draws");
  add_machine_rows(table, o);
  table.add(
      {.name = "batch",
       .value_name = "N",
       .help = "sequences that share a pass over the weights at most; auto: as many as half of the host's memory holds",
       .set =
           [&o](const auto& words) {
             o.batch = words[0] == "auto" ? 0 : parse_integer(words[0], "batch");
             if (words[0] != "auto" && (o.batch < 1 || o.batch > 1 << 20))
               fail_usage(fmt::format("--batch is {}; it must be auto or from 1 to {}", words[0], 1 << 20));
           },
       .get = [&o] { return o.batch == 0 ? OrderedJson("auto") : OrderedJson(o.batch); }});
  table.integer("sequence-length", o.sequence_length, 16, "tokens of a prompt that are computed at once at most",
                kMostTokens);
  table.group(kResult);
  table.written("log-json", o.log_json, "FILE", "write the summary there as JSON");
  table.flag("json", o.json, "print one JSON object a prompt and nothing else");
  return table;
}

GenerateOptions parse_generate(const std::vector<std::string>& words) {
  GenerateOptions options;
  const OptionTable table = generate_table(options);
  CommandLine(table).apply(words);
  check_machine(options);
  keep_family(options.read_as, options.adapter);
  if (options.model.empty()) fail_usage("`tierflow generate` needs --model");
  if (!options.prompt.empty() && !options.prompts.empty()) fail_usage("give --prompt or --prompts, not both");
  if (options.prompt.empty() && options.prompts.empty() && !options.chat)
    fail_usage("`tierflow generate` needs --prompt, --prompts or --chat");
  if (!options.system.empty() && !options.chat) fail_usage("--system is for --chat");
  if (options.tokenizer.empty()) fail_usage("--tokenizer is empty; give auto, bytes or a tokenizer.json");
  if (options.json && options.chat && options.prompt.empty() && options.prompts.empty())
    fail_usage("--json prints an object a prompt: it needs --prompt or --prompts; a talk with --chat alone is text");
  return options;
}

}  // namespace tierflow
