#include "runtime/options.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/command_line.h"
#include "runtime/exception.h"
#include "runtime/files.h"
#include "runtime/option_table.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

[[noreturn]] void fail_usage(const std::string& detail) {
  fail(io::ErrorKind::usage, "", detail);
}

void add_run_rows(OptionTable& table, RunOptions& o) {
  table.path("model", o.model, "DIR", "Hugging Face model folder (config.json and safetensors)");
  table.paths("data", o.data, false, "text (.txt .py .md .jsonl) or token files (.npy .bin), or folders of them");
  table.choice("device", o.device, {"auto", "cpu", "cuda"}, "where to compute");
  table.bytes("device-memory", o.device_memory,
              "budget for weights, gradients, activations and workspace on the device");
  table.bytes("host-memory", o.host_memory, "budget for pinned buffers and resident state");
  table.paths("storage", o.storage, true,
              "folders for the training state, on NVMe, one a drive; none: all in host memory");
  table.integer("sequence-length", o.sequence_length, 2, "tokens in a sequence");
  table.integer("micro-batch", o.micro_batch, 1, "sequences that go through a layer together");
  table.choice("engine", o.engine, {"auto", "io_uring", "libaio", "threads"}, "how storage is read and written");
  table.integer("threads", o.threads, 0, "CPU threads; 0: all");
  table.flag("allow-buffered", o.allow_buffered,
             "use storage whose file system has no O_DIRECT, through the page cache");
  table.flag("allow-any-filesystem", o.allow_any_filesystem, "use storage on a network, overlay or memory file system");
  table.text("jsonl-field", o.jsonl_field, "field of a .jsonl line that holds the text");
  table.text("tokenizer", o.tokenizer, "auto: the model's tokenizer.json, else bytes; bytes; or a tokenizer.json");
  table.path("python", o.python, "FILE", "Python with the package `tokenizers`");
  table.flag("skip-bad-records", o.skip_bad_records,
             "pass over text that is not UTF-8 and malformed .jsonl lines, and count them");
  table.path("log-json", o.log_json, "FILE", "write one JSON object a step there, and a summary");
  table.flag("json", o.json, "print results as JSON and nothing else");
}

void add_betas(OptionTable& table, TrainOptions& o) {
  table.add({.name = "betas",
             .value_name = "X,X",
             .help = "decay of AdamW's moments",
             .least = 2,
             .most = 2,
             .commas = true,
             .set =
                 [&o](const auto& words) {
                   const double first = parse_number(words[0], "betas"), second = parse_number(words[1], "betas");
                   if (!(first >= 0 && first < 1 && second >= 0 && second < 1))
                     fail_usage("--betas must be at least 0 and below 1");
                   o.beta1 = first;
                   o.beta2 = second;
                 },
             .get =
                 [&o] {
                   return OrderedJson::array({o.beta1, o.beta2});
                 }});
}

void add_clip(OptionTable& table, TrainOptions& o) {
  table.add({.name = "clip",
             .value_name = "X|none",
             .help = "largest global gradient norm",
             .set =
                 [&o](const auto& words) {
                   if (words[0] == "none") return o.clip.reset();
                   const double norm = parse_number(words[0], "clip");
                   if (!(norm > 0)) fail_usage(fmt::format("--clip is {}; it must be above 0, or none", norm));
                   o.clip = norm;
                 },
             .get = [&o] { return o.clip ? OrderedJson(*o.clip) : OrderedJson("none"); }});
}

void add_train_rows(OptionTable& table, TrainOptions& o) {
  table.path("config", o.config, "FILE", "config.json, in place of --model: start from random weights");
  table.path("out", o.out, "DIR", "folder for the trained model");
  table.integer("micro-batches", o.micro_batches, 1, "micro-batches in a step");
  table.integer("steps", o.steps, 0, "optimizer steps");
  table.integer("epochs", o.epochs, 0, "passes over the data, in place of --steps (default 1)");
  table.number("lr", o.lr, 0, 1e6, "highest learning rate");
  table.choice("lr-schedule", o.lr_schedule, {"cosine", "linear", "constant"},
               "how the learning rate falls after warm-up");
  table.integer("warmup", o.warmup, 0, "steps over which the learning rate rises");
  table.number("weight-decay", o.weight_decay, 0, 1e6, "decoupled decay of matrices and embeddings");
  add_betas(table, o);
  table.number("eps", o.eps, 0, 1, "AdamW's epsilon");
  add_clip(table, o);
  table.choice("precision", o.precision, {"fp32-master+adam8", "fp32-master+adam32", "bf16-sr+adam8"},
               "how the state is stored");
  table.seed("seed", o.seed, "of random weights, shuffling, dropout and stochastic rounding");
  table.integer("eval-every", o.eval_every, 0,
                "steps between evaluations; 0: before the first step and after the last");
  table.number("held-out", o.held_out, 0, 1, "share of the sequences kept for evaluation");
  table.integer("eval-sequences", o.eval_sequences, 0, "held-out sequences in one evaluation at most; 0: all");
  table.number("max-tb-written", o.max_tb_written, 0, 1e9,
               "stop before the step that would bring what storage has written above X * 10^12 bytes; 0: never");
  table.choice("durability", o.durability, {"export-only"}, "export-only: a crash loses the state, the end exports it");
  table.flag("no-export", o.no_export, "leave the result in the store");
  table.path("trace", o.trace, "FILE",
             "write there when each task of the first steps ran, for https://ui.perfetto.dev");
}

OptionTable init_table(InitOptions& o) {
  OptionTable table("init");
  table.path("config", o.config, "FILE", "config.json of the model");
  table.path("out", o.out, "DIR", "new folder for the model");
  table.seed("seed", o.seed, "of the random weights");
  table.bytes("shard-size", o.shard_size, "largest size of one weights file");
  return table;
}

OptionTable export_table(ExportOptions& o) {
  OptionTable table("export");
  table.paths("storage", o.storage, true, "the folders that `tierflow train --no-export` was given, in that order");
  table.path("out", o.out, "DIR", "folder to write");
  return table;
}

OptionTable train_table(TrainOptions& o) {
  OptionTable table("train");
  add_run_rows(table, o);
  add_train_rows(table, o);
  return table;
}

OptionTable plan_table(PlanOptions& o) {
  OptionTable table("plan");
  add_run_rows(table, o);
  add_train_rows(table, o);
  table.integer(
      "tokens-per-step", o.tokens_per_step, 0,
      "choose --micro-batch and --micro-batches for so many tokens a step: those with the most tokens a second");
  table.flag("refresh-profile", o.refresh_profile, "measure this machine and the model's stages again");
  return table;
}

OptionTable eval_table(EvalOptions& o) {
  OptionTable table("eval");
  add_run_rows(table, o);
  table.integer("max-sequences", o.max_sequences, 0, "sequences to evaluate at most; 0: all");
  return table;
}

void check_storage(const RunOptions& o) {
  auto sorted = o.storage;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    fail_usage(fmt::format("--storage names {} twice", printable(twice->string())));
}

void check_run(const RunOptions& o, const char* command) {
  if (o.data.empty()) fail_usage(fmt::format("`tierflow {}` needs --data", command));
  if (o.tokenizer.empty()) fail_usage("--tokenizer is empty; give auto, bytes or a tokenizer.json");
  if (o.jsonl_field.empty()) fail_usage("--jsonl-field is empty");
  check_storage(o);
}

DataOptions common_data_options(const RunOptions& o, const ModelSpec& spec, const std::filesystem::path& folder) {
  DataOptions data;
  data.paths = o.data;
  data.jsonl_field = o.jsonl_field;
  if (o.tokenizer == "auto") {
    // Beside the model, or beside the config.json that a random model is made from.
    const auto candidate = o.model / "tokenizer.json";
    std::error_code ignored;
    if (!o.model.empty() && std::filesystem::exists(candidate, ignored)) data.tokenizer = candidate;
  } else if (o.tokenizer != "bytes") {
    data.tokenizer = o.tokenizer;
  }
  std::error_code ignored;
  data.python = o.python;
  if (data.python.empty() && std::filesystem::exists(TIERFLOW_PYTHON, ignored)) data.python = TIERFLOW_PYTHON;
  data.cache = o.storage.empty() ? folder : o.storage.front();
  data.vocab_size = spec.config.vocab_size;
  data.sequence_length = o.sequence_length;
  data.held_out = 0;
  data.skip_bad_records = o.skip_bad_records;
  return data;
}

}  // namespace

io::EngineKind engine_kind(const std::string& name) {
  for (const io::EngineKind kind : {io::EngineKind::io_uring, io::EngineKind::libaio, io::EngineKind::threads})
    if (name == io::engine_name(kind)) return kind;
  return io::EngineKind::automatic;
}

InitOptions parse_init(const std::vector<std::string>& words) {
  InitOptions options;
  const OptionTable table = init_table(options);
  CommandLine(table).apply(words);
  if (options.config.empty() || options.out.empty()) fail_usage("`tierflow init` needs --config and --out");
  if (options.shard_size == 0) fail_usage("--shard-size must be above 0");
  return options;
}

ExportOptions parse_export(const std::vector<std::string>& words) {
  ExportOptions options;
  const OptionTable table = export_table(options);
  CommandLine(table).apply(words);
  if (options.storage.empty() || options.out.empty()) fail_usage("`tierflow export` needs --storage and --out");
  return options;
}

TrainOptions parse_train(const std::vector<std::string>& words) {
  TrainOptions options;
  const OptionTable table = train_table(options);
  CommandLine(table).apply(words);
  check_run(options, "train");
  if (options.model.empty() == options.config.empty()) fail_usage("`tierflow train` needs either --model or --config");
  if (options.out.empty() && !options.no_export) fail_usage("`tierflow train` needs --out, or --no-export");
  if (options.no_export && options.storage.empty())
    fail_usage("--no-export leaves the result in the store: it needs --storage");
  if (options.steps != 0 && options.epochs != 0) fail_usage("give --steps or --epochs, not both");
  if (options.steps == 0 && options.epochs == 0) options.epochs = 1;
  return options;
}

PlanOptions parse_plan(const std::vector<std::string>& words) {
  PlanOptions options;
  const OptionTable table = plan_table(options);
  CommandLine(table).apply(words);
  check_storage(options);
  if (options.model.empty() == options.config.empty()) fail_usage("`tierflow plan` needs either --model or --config");
  return options;
}

EvalOptions parse_eval(const std::vector<std::string>& words) {
  EvalOptions options;
  const OptionTable table = eval_table(options);
  CommandLine(table).apply(words);
  check_run(options, "eval");
  if (options.model.empty()) fail_usage("`tierflow eval` needs --model");
  return options;
}

std::string help_of(const std::string& command) {
  InitOptions init;
  ExportOptions exported;
  TrainOptions train;
  PlanOptions plan;
  EvalOptions eval;
  const OptionTable table = command == "init"     ? init_table(init)
                            : command == "train"  ? train_table(train)
                            : command == "plan"   ? plan_table(plan)
                            : command == "export" ? export_table(exported)
                                                  : eval_table(eval);
  return CommandLine(table).help();
}

std::string effective_configuration(const TrainOptions& options) {
  TrainOptions copy = options;
  return train_table(copy).effective().dump(2) + "\n";
}

std::string effective_configuration(const EvalOptions& options) {
  EvalOptions copy = options;
  return eval_table(copy).effective().dump(2) + "\n";
}

DataOptions data_options(const TrainOptions& options, const ModelSpec& spec, const std::filesystem::path& folder) {
  DataOptions data = common_data_options(options, spec, folder);
  if (options.tokenizer == "auto" && data.tokenizer.empty() && !options.config.empty()) {
    const auto candidate = options.config.parent_path() / "tokenizer.json";
    std::error_code ignored;
    if (std::filesystem::exists(candidate, ignored)) data.tokenizer = candidate;
  }
  data.held_out = options.held_out;
  data.seed = options.seed;
  return data;
}

DataOptions data_options(const EvalOptions& options, const ModelSpec& spec, const std::filesystem::path& folder) {
  return common_data_options(options, spec, folder);
}

}  // namespace tierflow
