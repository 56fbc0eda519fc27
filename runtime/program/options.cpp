#include "runtime/program/options.h"

#include <fmt/format.h>

#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/program/adapter_options.h"
#include "runtime/program/command_line.h"
#include "runtime/program/data_options.h"
#include "runtime/program/generate_options.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/machine_options.h"
#include "runtime/program/option_table.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kTraining = "Training";
constexpr const char* kEvaluation = "Evaluation";

void add_run_rows(OptionTable& table, RunOptions& o) {
  add_data_rows(table, o);
  add_machine_rows(table, o);
  table.group(kTraining);
  table.integer("sequence-length", o.sequence_length, 2, "tokens in a sequence", kMostTokens);
  table.integer("micro-batch", o.micro_batch, 1, "sequences that go through a layer together", kMostTokens);
  table.group(kResult);
  table.written("log-json", o.log_json, "FILE", "write one JSON object a step there, and a summary");
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
  table.group(kData);
  table.path("config", o.config, "FILE", "config.json, in place of --model: start from random weights");
  table.group(kResult);
  table.path("out", o.out, "DIR", "folder for the trained model");
  table.group(kTraining);
  table.integer("micro-batches", o.micro_batches, 1, "micro-batches in a step", kMostTokens);
  table.integer("steps", o.steps, 0, "optimizer steps");
  table.integer("epochs", o.epochs, 0,
                "passes over the data, in place of --steps, with the last step filled up from the beginning; 1 where "
                "neither is given");
  table.add({.name = "lr",
             .value_name = "X",
             .help = "highest learning rate; with --method lora the default is 1e-4",
             .set =
                 [&o](const auto& words) {
                   const double lr = parse_number(words[0], "lr");
                   if (!(lr >= 0 && lr < 1e6))
                     fail_usage(fmt::format("--lr is {}; it must be at least 0 and below 1e6", printable(words[0])));
                   o.lr = lr;
                 },
             .get = [&o] { return OrderedJson(highest_lr(o)); }});
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
  table.integer("max-skipped", o.max_skipped, 0,
                "end the run after so many steps in a row whose loss or gradient is not finite; 0: never");
  add_loss_rows(table, o);
  add_trained_rows(table, o);
  add_adapter_rows(table, o);
  table.group(kEvaluation);
  table.integer("eval-every", o.eval_every, 0,
                "steps between evaluations; 0: before the first step and after the last");
  table.integer("sample-every", o.sample_every, 0, "steps after which the model continues --sample-prompts; 0: never");
  table.path("sample-prompts", o.sample_prompts, "FILE",
             "a text file with a prompt a line, or .jsonl with rows of \"messages\" or \"prompt\"");
  table.integer("max-new-tokens", o.max_new_tokens, 1, "tokens to generate at most for each of these prompts",
                kMostTokens);
  table.number("held-out", o.held_out, 0, 1, "share of the sequences kept for evaluation");
  table.integer("eval-sequences", o.eval_sequences, 0, "held-out sequences in one evaluation at most; 0: all");
  table.integer("early-stopping-patience", o.early_stopping_patience, 0,
                "end the run after so many evaluations in a row without a lower held-out loss than the lowest so far; "
                "0: never");
  table.number("early-stopping-threshold", o.early_stopping_threshold, 0, 1e6,
               "a held-out loss counts as lower where it is lower by more than that");
  table.group(kMachine);
  table.number("max-tb-written", o.max_tb_written, 0, 1e9,
               "stop before the step that would bring what storage has written above X * 10^12 bytes; 0: never");
  table.group(kResult);
  table.add({.name = "durability",
             .value_name = "auto|step|every=N|export-only",
             .help = "steps after which the state is committed in --storage, so that the same command goes on after a "
                     "crash; auto: as often as costs little, if there is room for a second copy; export-only: never",
             .set =
                 [&o](const auto& words) {
                   bool automatic = false;
                   commit_every(words[0], automatic);
                   o.durability = words[0];
                 },
             .get = [&o] { return OrderedJson(o.durability); }});
  table.integer("export-every", o.export_every, 0,
                "steps after which the model is also written to checkpoint-N inside --out; 0: at the end alone");
  table.integer("export-keep", o.export_keep, 0, "keep so many of these, the last ones; 0: all");
  table.bytes("export-bandwidth", o.export_bandwidth,
              "bytes a second at which a model is written, and read back, while training goes on; auto: no limit");
  table.flag("export-best", o.export_best,
             "also keep the model with the lowest held-out loss of all evaluations, as checkpoint-N inside --out");
  table.flag("resume", o.resume, "go on with the state in the storage folders; an error where there is none");
  table.flag("go-back", o.go_back,
             "where the drive cannot read the newest generation of that state, go on with the one before it");
  table.for_one_run();
  table.flag("no-export", o.no_export, "leave the result in the store");
  table.written("trace", o.trace, "FILE",
                "write there when each task of the first steps ran, for https://ui.perfetto.dev");
}

OptionTable init_table(InitOptions& o) {
  OptionTable table("init");
  table.path("config", o.config, "FILE", "config.json of the model");
  add_family(table, o.read_as);
  table.path("out", o.out, "DIR", "new folder for the model");
  table.seed("seed", o.seed, "of the random weights");
  table.bytes("shard-size", o.shard_size, "largest size of one weights file");
  return table;
}

OptionTable export_table(ExportOptions& o) {
  OptionTable table("export");
  table.paths("storage", o.storage, true,
              "the folders of a training run; one that still trains writes its model itself, between two steps");
  table.path("out", o.out, "DIR", "folder to write");
  return table;
}

OptionTable store_table(const std::string& command, StoreCommandOptions& o) {
  OptionTable table(command);
  table.paths("storage", o.storage, true, "the folders that `tierflow train` was given; --storage may be left out");
  table.flag("json", o.json, "print the result as JSON and nothing else");
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
  table.group("Plan");
  table.integer(
      "tokens-per-step", o.tokens_per_step, 0,
      "choose --micro-batch and --micro-batches for so many tokens a step: those with the most tokens a second");
  table.flag("refresh-profile", o.refresh_profile, "measure this machine and the model's stages again");
  table.text("machine", o.machine,
             "plan for a machine that is not here, by published rates: CARD-RAMgb-Nnvme, such as rtx4090-128gb-2nvme");
  return table;
}

OptionTable eval_table(EvalOptions& o) {
  OptionTable table("eval");
  add_run_rows(table, o);
  table.group(kData);
  table.path("adapter", o.adapter, "DIR", "adapters of the model, a folder as PEFT writes it");
  add_base_precision(table, o.base_precision);
  table.group(kEvaluation);
  table.integer("max-sequences", o.max_sequences, 0, "sequences to evaluate at most; 0: all");
  table.written("per-document", o.per_document, "FILE",
                "file for the loss and accuracy of each row of the data, as lines of JSON; not for text");
  table.written("teacher-out", o.teacher_out, "FILE",
                "file for the most likely tokens of each position: what `tierflow train --distill` learns from");
  table.integer("teacher-top", o.teacher_top, 1, "tokens of each position there", 65536);
  return table;
}

// each: sequences in one of --micro-batch.
void check_tokens(const RunOptions& o, std::int64_t micro_batches, std::int64_t each) {
  std::int64_t tokens = o.sequence_length;  // no factor is above kMostTokens: a product of two does not overflow
  for (const std::int64_t factor : {o.micro_batch, micro_batches, each}) {
    tokens *= factor;
    if (tokens > kMostTokens)
      fail_usage(
          fmt::format("--micro-batches {} x --micro-batch {}{} x --sequence-length {} are more than 2^31 tokens a "
                      "step: give less",
                      micro_batches, o.micro_batch, each == 2 ? " pairs" : "", o.sequence_length));
  }
}

void check_sizes(const RunOptions& o, std::int64_t micro_batches, std::int64_t each) {
  check_machine(o);
  check_tokens(o, micro_batches, each);
}

// "--name" of the first option under that heading that is not as `table_of` makes it of new Options; empty: none.
template <class Options>
std::string first_given(const OptionTable& table, OptionTable (*table_of)(Options&), const std::string& group) {
  Options none;
  const OptionTable of_none = table_of(none);
  const std::set<std::string> of_methods = {"method", "rank", "update-gap", "scale"};
  for (const OptionRow& row : table.rows())
    if (row.group == group && !of_methods.contains(row.name) && row.get() != of_none.find(row.name)->get())
      return "--" + row.name;
  return {};
}

}  // namespace

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

StoreCommandOptions parse_store_command(const std::string& command, std::vector<std::string> words) {
  StoreCommandOptions options;
  const OptionTable table = store_table(command, options);
  for (auto word = words.begin(); word != words.end(); ++word)
    if (!word->starts_with("-") && (word == words.begin() || *std::prev(word) == "--json")) {
      words.insert(word, "--storage");
      break;
    }
  CommandLine(table).apply(std::move(words));
  if (options.storage.empty()) fail_usage(fmt::format("`tierflow {}` needs the storage folders of a run", command));
  return options;
}

int commit_every(const std::string& durability, bool& automatic) {
  constexpr std::int64_t kMost = 1'000'000;
  automatic = durability == "auto";
  if (automatic || durability == "step") return 1;
  if (durability == "export-only") return 0;
  if (!durability.starts_with("every="))
    fail_usage(fmt::format("--durability is {}; it must be auto, step, every=N or export-only", durability));
  const std::int64_t steps = parse_integer(durability.substr(6), "durability");
  if (steps < 1 || steps > kMost) fail_usage(fmt::format("--durability every=N takes 1 to {} steps", kMost));
  return static_cast<int>(steps);
}

TrainOptions parse_train(const std::vector<std::string>& words) {
  TrainOptions options;
  const OptionTable table = train_table(options);
  CommandLine(table).apply(words);
  check_data(options, "train");
  check_loss(options);
  check_sizes(options, options.micro_batches, sequences_in_one(options));
  if (options.model.empty() == options.config.empty()) fail_usage("`tierflow train` needs either --model or --config");
  if (options.out.empty() && !options.no_export) fail_usage("`tierflow train` needs --out, or --no-export");
  if (options.no_export && options.storage.empty())
    fail_usage("--no-export leaves the result in the store: it needs --storage");
  if (options.no_export && options.export_every != 0) fail_usage("give --no-export or --export-every, not both");
  if (options.export_bandwidth != 0 && options.storage.empty())
    fail_usage("--export-bandwidth is for models written while training goes on: that takes --storage");
  if (options.export_keep != 0 && options.export_every == 0) fail_usage("--export-keep is for --export-every");
  if (options.no_export && options.export_best) fail_usage("give --no-export or --export-best, not both");
  if (options.eval_every == 0 && options.export_best) fail_usage("--export-best needs --eval-every");
  if (options.eval_every == 0 && options.early_stopping_patience != 0)
    fail_usage("--early-stopping-patience needs --eval-every");
  if (options.held_out == 0 && (options.export_best || options.early_stopping_patience != 0))
    fail_usage("--export-best and --early-stopping-patience need held-out sequences: raise --held-out");
  if (options.early_stopping_threshold != 0 && options.early_stopping_patience == 0)
    fail_usage("--early-stopping-threshold is for --early-stopping-patience");
  if (options.storage.empty() && options.durability != "auto" && options.durability != "export-only")
    fail_usage("--durability " + options.durability + " needs --storage: the state lies there");
  if ((options.sample_every == 0) != options.sample_prompts.empty())
    fail_usage("--sample-every and --sample-prompts belong together: give both, or neither");
  if (options.sample_every == 0 && options.max_new_tokens != TrainOptions{}.max_new_tokens)
    fail_usage("--max-new-tokens is for --sample-every");
  if ((options.resume || options.go_back) && options.storage.empty())
    fail_usage("--resume and --go-back need --storage: the state lies there");
  check_adapter(options, first_given(table, train_table, "Adapters"));
  keep_family(options.read_as, options.adapter);
  if (options.method == "lora" && !options.config.empty())
    fail_usage("--method lora needs --model: the adapters of --config's random weights are of use to nobody");
  if ((options.resume || options.go_back) && options.fresh) fail_usage("--fresh leaves nothing to go on with");
  if (options.steps != 0 && options.epochs != 0) fail_usage("give --steps or --epochs, not both");
  if (options.steps == 0 && options.epochs == 0) options.epochs = 1;
  return options;
}

PlanOptions parse_plan(const std::vector<std::string>& words) {
  PlanOptions options;
  const OptionTable table = plan_table(options);
  CommandLine(table).apply(words);
  check_loss(options);
  check_sizes(options, options.micro_batches, sequences_in_one(options));
  if (options.model.empty() == options.config.empty()) fail_usage("`tierflow plan` needs either --model or --config");
  check_adapter(options, first_given(table, plan_table, "Adapters"));
  keep_family(options.read_as, options.adapter);
  return options;
}

EvalOptions parse_eval(const std::vector<std::string>& words) {
  EvalOptions options;
  const OptionTable table = eval_table(options);
  CommandLine(table).apply(words);
  check_data(options, "eval");
  check_sizes(options, 1, 1);
  if (options.model.empty()) fail_usage("`tierflow eval` needs --model");
  if (options.teacher_out.empty() && options.teacher_top != EvalOptions().teacher_top)
    fail_usage("--teacher-top is for --teacher-out");
  if (!options.teacher_out.empty() && (options.max_sequences != 0 || !options.per_document.empty()))
    fail_usage("--teacher-out is of all data, in their own order: leave --max-sequences and --per-document out");
  keep_family(options.read_as, options.adapter);
  return options;
}

std::string help_of(const std::string& command, std::size_t columns) {
  InitOptions init;
  ExportOptions exported;
  TrainOptions train;
  PlanOptions plan;
  EvalOptions eval;
  StoreCommandOptions stored;
  DataCommandOptions data;
  MergeOptions merge;
  GenerateOptions generated;
  const OptionTable table = command == "init"                            ? init_table(init)
                            : command == "status" || command == "verify" ? store_table(command, stored)
                            : command == "train"                         ? train_table(train)
                            : command == "plan"                          ? plan_table(plan)
                            : command == "export"                        ? export_table(exported)
                            : command == "merge"                         ? merge_table(merge)
                            : command == "generate"                      ? generate_table(generated)
                            : command.starts_with("data ")               ? data_table(command.substr(5), data)
                                                                         : eval_table(eval);
  return CommandLine(table).help(columns);
}

std::string effective_configuration(const TrainOptions& options) {
  TrainOptions copy = options;
  return train_table(copy).effective().dump(2) + "\n";
}

std::string effective_configuration(const EvalOptions& options) {
  EvalOptions copy = options;
  return eval_table(copy).effective().dump(2) + "\n";
}

}  // namespace tierflow
