#include "runtime/program/data_options.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/program/command_line.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

// What a model's folder has of a tokenizer that is not in tokenizer.json; empty: nothing.
std::filesystem::path other_tokenizer(const std::filesystem::path& model) {
  if (model.empty()) return {};
  for (const char* name : {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
                           "tekken.json", "vocab.json", "vocab.txt", "tokenizer_config.json"})
    if (std::error_code ignored; std::filesystem::exists(model / name, ignored)) return model / name;
  return {};
}

constexpr std::int64_t kVocabularyOfBytes = 1024;  // and of what stands beside them, at most

DataOptions common_data_options(const DataChoice& o, const ModelSpec& spec, const std::filesystem::path& folder) {
  DataOptions data;
  data.paths = o.data;
  data.jsonl_field = o.jsonl_field;
  if (o.tokenizer == "auto") {
    // Beside the model, or beside the config.json that a random model is made from.
    const auto candidate = o.model / "tokenizer.json";
    std::error_code ignored;
    if (!o.model.empty() && std::filesystem::exists(candidate, ignored)) data.tokenizer = candidate;
    if (data.tokenizer.empty()) data.other_tokenizer = other_tokenizer(o.model);
    if (data.tokenizer.empty() && data.other_tokenizer.empty() && spec.config.vocab_size > kVocabularyOfBytes)
      data.lacks_tokenizer = o.model;
  } else if (o.tokenizer != "bytes") {
    data.tokenizer = o.tokenizer;
  }
  std::error_code ignored;
  data.python = o.python;
  if (data.python.empty() && std::filesystem::exists(TIERFLOW_PYTHON, ignored)) data.python = TIERFLOW_PYTHON;
  data.cache = folder;
  data.vocab_size = spec.config.vocab_size;
  data.sequence_length = o.sequence_length;
  data.held_out = 0;
  data.weights = o.data_weights;
  data.format = o.data_format;
  data.train_on = o.train_on;
  data.packing = o.packing;
  data.chat_template = o.chat_template;
  data.row_cache = o.data_cache;
  data.skip_bad_records = o.on_bad_row == "skip";
  return data;
}

}  // namespace

void add_family(OptionTable& table, std::string& read_as) {
  table.add({.name = "as",
             .value_name = "FAMILY",
             .help = "read a model of an unknown architecture as one of this family, such as llama or qwen2: where its "
                     "config.json and its tensors have nothing else",
             .set = [&read_as](const auto& words) { read_as = words[0]; },
             .get = [&read_as] { return read_as.empty() ? OrderedJson() : OrderedJson(read_as); }});
}

void keep_family(std::string& read_as, const std::filesystem::path& adapter) {
  const std::filesystem::path made_by = adapter / "tierflow_run.json";
  std::error_code ignored;
  if (!read_as.empty() || adapter.empty() || !std::filesystem::exists(made_by, ignored)) return;
  const Json run =
      parse_json(read_text(open_beneath(adapter, "tierflow_run.json"), made_by, 1 << 20), made_by.string());
  if (run.is_object()) read_as = JsonFields(run, made_by.string()).text_or("as", "");
}

void add_data_rows(OptionTable& table, DataChoice& o) {
  table.group(kData);
  table.path("model", o.model, "DIR", "Hugging Face model folder (config.json and safetensors)");
  add_family(table, o.read_as);
  table.paths(
      "data", o.data, false,
      "text (.txt .py .md .jsonl), rows of conversations (.jsonl, .tfd) or token files (.npy .bin), or folders");
  table.add({.name = "data-weights",
             .value_name = "X",
             .help = "mix: each --data entry's share of the sequences",
             .most = 1 << 20,
             .commas = true,
             .set =
                 [&o](const auto& words) {
                   o.data_weights.clear();
                   for (const std::string& word : words) {
                     o.data_weights.push_back(parse_number(word, "data-weights"));
                     if (!(o.data_weights.back() > 0)) fail_usage("--data-weights must be above 0");
                   }
                 },
             .get = [&o] { return OrderedJson(o.data_weights); }});
  table.choice("data-format", o.data_format,
               {"auto", "text", "messages", "prompt-completion", "sharegpt", "alpaca", "tokens", "preference"},
               "fields of .jsonl rows; auto: as the first row tells");
  table.choice("train-on", o.train_on, {"assistant", "all"}, "tokens of rows that count: the assistant's, or all");
  table.choice(
      "packing", o.packing, {"auto", "bfd", "none", "concat"},
      "rows in a sequence: as many as fit, none seeing another (bfd); one, padded (none); or cut without regard to "
      "them (concat); auto: bfd, text concat");
  table.path("chat-template", o.chat_template, "FILE", "chat template in place of the tokenizer's");
  table.text("jsonl-field", o.jsonl_field, "field of a .jsonl line that holds the text");
  table.text("tokenizer", o.tokenizer, "auto: the model's tokenizer.json, else bytes; bytes; or a tokenizer.json");
  table.names_file({"auto", "bytes"});
  table.path("python", o.python, "FILE",
             "Python with the packages `tokenizers` and, for conversations, `transformers`");
  table.choice("on-bad-row", o.on_bad_row, {"error", "skip"},
               "text that is not UTF-8 and malformed rows: an error, or passed over and counted");
  table.path("data-cache", o.data_cache, "DIR", "where prepared rows are kept; left out: ~/.cache/tierflow/data");
}

void check_data(const DataChoice& o, const std::string& command) {
  if (o.data.empty()) fail_usage(fmt::format("`tierflow {}` needs --data", command));
  if (o.tokenizer.empty()) fail_usage("--tokenizer is empty; give auto, bytes or a tokenizer.json");
  if (o.jsonl_field.empty()) fail_usage("--jsonl-field is empty");
  if (!o.data_weights.empty() && o.data_weights.size() != o.data.size())
    fail_usage(fmt::format("--data-weights has {} numbers for {} --data entries: give one for each",
                           o.data_weights.size(), o.data.size()));
}

OptionTable data_table(const std::string& command, DataCommandOptions& o) {
  OptionTable table("data " + command);
  add_data_rows(table, o);
  table.integer("sequence-length", o.sequence_length, 2, "tokens in a sequence", kMostTokens);
  table.group(kResult);
  table.flag("json", o.json, "print results as JSON and nothing else");
  if (command == "prepare") {
    table.written("out", o.out, "FILE.tfd", "write the prepared rows there too: a file that --data takes");
  } else {
    table.integer("examples", o.examples, 1, "sequences to show; --examples may be left out");
    table.seed("seed", o.seed, "of the shuffle, as in training");
  }
  return table;
}

DataCommandOptions parse_data_command(const std::string& command, std::vector<std::string> words) {
  DataCommandOptions options;
  const OptionTable table = data_table(command, options);
  if (command == "preview" && !words.empty() && !words.front().starts_with("-"))
    words.insert(words.begin(), "--examples");
  CommandLine(table).apply(std::move(words));
  check_data(options, "data " + command);
  if (options.model.empty()) fail_usage(fmt::format("`tierflow data {}` needs --model", command));
  if (!options.out.empty() && options.out.extension() != ".tfd") fail_usage("--out must name a file that ends in .tfd");
  return options;
}

DataOptions data_options(const TrainOptions& options, const ModelSpec& spec, const std::filesystem::path& folder) {
  DataOptions data = common_data_options(options, spec, options.storage.empty() ? folder : options.storage.front());
  if (options.tokenizer == "auto" && data.tokenizer.empty() && !options.config.empty()) {
    const auto candidate = options.config.parent_path() / "tokenizer.json";
    std::error_code ignored;
    if (std::filesystem::exists(candidate, ignored)) data.tokenizer = candidate;
  }
  data.held_out = options.held_out;
  data.seed = options.seed;
  data.pairs = loss_rule(options).pairs() ? Pairs::only : Pairs::none;
  return data;
}

DataOptions data_options(const EvalOptions& options, const ModelSpec& spec, const std::filesystem::path& folder) {
  return common_data_options(options, spec, options.storage.empty() ? folder : options.storage.front());
}

DataOptions data_options(const GenerateOptions& options, const ModelSpec& spec) {
  return common_data_options(options, spec, {});
}

DataOptions data_options(const DataCommandOptions& options, const ModelSpec& spec,
                         const std::filesystem::path& folder) {
  DataOptions data = common_data_options(options, spec, folder);
  data.seed = options.seed;
  data.pairs = Pairs::either;
  return data;
}

}  // namespace tierflow
