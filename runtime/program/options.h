#pragma once
// The options of every command, with their defaults. One table (options.cpp) is used for the command line,
// configuration files and the printed configuration, so that the three cannot differ.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/volume.h"
#include "runtime/data/data.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/loss_rule.h"
#include "runtime/spec/trainable.h"

namespace tierflow {

struct InitOptions {
  std::filesystem::path config, out;
  std::string read_as;  // a family's model_type; empty: the one that config.json names
  std::uint64_t seed = 0;
  std::uint64_t shard_size = std::uint64_t{5} << 30;
};

struct ExportOptions {
  std::vector<std::filesystem::path> storage;
  std::filesystem::path out;
};

// `tierflow status` and `tierflow verify`.
struct StoreCommandOptions {
  std::vector<std::filesystem::path> storage;
  bool json = false;
};

// Which data, and how they become sequences.
struct DataChoice {
  std::filesystem::path model;  // an HF folder
  std::string read_as;          // as in InitOptions
  std::vector<std::filesystem::path> data;
  std::vector<double> data_weights;  // one for each of `data`; empty: all are one dataset
  std::string data_format = "auto";
  std::string train_on = "assistant";
  std::string packing = "auto";
  std::filesystem::path chat_template;  // empty: the tokenizer's
  std::string jsonl_field = "text";
  std::string tokenizer = "auto";    // auto: the model folder's tokenizer.json, else bytes; bytes; or a tokenizer.json
  std::filesystem::path python;      // empty: the one found when the program was built, else python3
  std::string on_bad_row = "error";  // error, skip
  std::filesystem::path data_cache;  // empty: the user's
  std::int64_t sequence_length = 512;
  bool json = false;  // results on standard output as JSON, nothing else there
};

// `tierflow data prepare` and `tierflow data preview`.
struct DataCommandOptions : DataChoice {
  std::filesystem::path out;  // of prepare; empty: the cache alone
  std::int64_t examples = 3;  // of preview
  std::uint64_t seed = 0;     // of preview
};

// What training and evaluation have in common.
struct RunOptions : DataChoice {
  std::string device = "auto";      // cpu, cuda, auto (cuda if there is one)
  std::uint64_t device_memory = 0;  // bytes; 0: chosen by the run
  std::uint64_t host_memory = 0;    // bytes; 0: chosen by the run
  std::vector<std::filesystem::path> storage;
  std::int64_t micro_batch = 1;
  std::string engine = "auto";  // auto, io_uring, libaio, threads
  int threads = 0;              // 0: as many as the machine has
  bool allow_buffered = false, allow_any_filesystem = false;
  bool fresh = false;              // discard what an earlier run left in the storage folders
  std::filesystem::path log_json;  // empty: none
};

struct EvalOptions : RunOptions {
  std::filesystem::path adapter;        // a folder of PEFT's; empty: none
  std::string base_precision = "bf16";  // as in TrainOptions
  std::int64_t max_sequences = 0;       // 0: all
  std::filesystem::path per_document;   // empty: none
  std::filesystem::path teacher_out;    // empty: none
  std::int64_t teacher_top = 64;        // tokens of each position there
};

// sequence_length: tokens of a prompt that are computed at once.
struct GenerateOptions : RunOptions {
  GenerateOptions() { sequence_length = 2048; }
  std::filesystem::path adapter;        // a folder of PEFT's; empty: none
  std::string base_precision = "bf16";  // as in TrainOptions
  std::vector<std::string> prompt;
  std::filesystem::path prompts;  // a file of them
  bool chat = false;              // prompts are messages; without any: lines of standard input
  std::string system;             // message before each of chat; empty: none
  std::int64_t context = 4096;    // tokens of a talk on the terminal
  std::int64_t max_new_tokens = 256;
  std::optional<double> temperature, top_p, min_p, repetition_penalty;  // in place of the model's own
  std::optional<std::int64_t> top_k;
  std::vector<std::string> stop;  // tokens by their text
  std::uint64_t seed = 0;
  std::int64_t batch = 32;  // sequences at once; 0: as many as memory holds
};

// A base_precision: if the model's folder has weights in FP8 or MXFP4, these are stored as they are; else bf16. A
// resumed run keeps the format that its state has.
inline constexpr const char* kOwnFormat = "auto";

struct TrainOptions : RunOptions {
  std::filesystem::path config;  // in place of model: random weights
  std::filesystem::path out;
  std::int64_t micro_batches = 1;
  std::int64_t steps = 0;              // 0: as epochs says
  std::int64_t epochs = 0;             // 0: as steps says; both 0 means one epoch
  std::optional<double> lr;            // as highest_lr() says
  std::string lr_schedule = "cosine";  // cosine, linear, constant
  std::int64_t warmup = 0;             // steps
  double weight_decay = 0;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  std::optional<double> clip = 1.0;             // of the global gradient norm
  std::string precision = "fp32-master+adam8";  // fp32-master+adam32, bf16-sr+adam8
  std::uint64_t seed = 0;
  std::int64_t eval_every = 0;               // steps; 0: before the first and after the last
  double held_out = 0.01;                    // share of the sequences
  std::int64_t sample_every = 0;             // steps; 0: never
  std::filesystem::path sample_prompts;      // of these samples
  std::int64_t max_new_tokens = 64;          // of each at most
  std::int64_t eval_sequences = 64;          // at most that many held-out ones in each evaluation; 0: all
  std::int64_t early_stopping_patience = 0;  // evaluations in a row without a better loss that end the run; 0: never
  double early_stopping_threshold = 0;       // how much better counts
  std::int64_t max_skipped = 20;             // skipped steps in a row that end the run; 0: any number
  double max_tb_written = 0;                 // 10^12 bytes that storage may be given to write; 0: any number
  std::string durability = "auto";           // auto, step, every=N, export-only
  bool resume = false;                       // there has to be a state to resume
  bool go_back = false;                      // a generation, where the newest cannot be read
  bool no_export = false;
  std::int64_t export_every = 0;                                        // steps; 0: at the end alone
  std::uint64_t export_bandwidth = 0;                                   // bytes a second, beside training; 0: any
  std::int64_t export_keep = 0;                                         // how many of the newest are kept; 0: all
  bool export_best = false;                                             // the model of the best evaluation too
  std::filesystem::path trace;                                          // empty: none
  std::string method = "full";                                          // full, lora, galore
  std::string loss = "cross-entropy";                                   // cross-entropy, dpo, simpo, orpo
  double beta = LossRule{}.beta, simpo_gamma = LossRule{}.simpo_gamma;  // of a preference loss
  std::filesystem::path distill;                                        // a teacher's tokens; empty: none
  Distillation kd;                                                      // without `top`, which the file has
  TrainableConfig trained;                                              // of full fine-tuning
  std::vector<std::pair<std::string, double>> lr_scales;
  AdapterConfig lora{.rank = 16, .alpha = 32};
  AdapterConfig galore{.rank = 128, .init = AdapterInit::galore, .windows = {.scale = 2}};  // without its layers' names
  double loraplus_lr_ratio = 1;             // of B's learning rate to A's
  std::filesystem::path adapter;            // a folder of PEFT's to begin with, in place of `lora`; empty: new ones
  bool merge = false;                       // the result is the whole model
  std::string base_precision = kOwnFormat;  // of the linear layers that are not trained, or a parse_weight_format()
};
// The highest learning rate: the one given; else 1e-5, of adapters 1e-4.
double highest_lr(const TrainOptions& options);

struct MergeOptions {
  std::filesystem::path model, adapter, out;
  std::string read_as;  // as in InitOptions
};

struct PlanOptions : TrainOptions {
  bool refresh_profile = false;
  std::int64_t tokens_per_step = 0;  // of which the plan chooses micro-batches; 0: those given
  std::string machine;               // a find_machine() in place of this one; empty: this one
};

// Steps from commit to commit that --durability names: 1 for auto and step, N for every=N, 0 for export-only. Sets
// `automatic` to whether it is auto. Throws Exception (kind usage).
int commit_every(const std::string& durability, bool& automatic);
// The engine that --engine names; automatic for "auto" and for any name that is not known.
io::EngineKind engine_kind(const std::string& name);

// The command's words after its name, and those of its configuration file where --config-file names one (the command
// line wins). Throws Exception (kind usage; input for the file) on anything unknown, malformed or contradictory.
InitOptions parse_init(const std::vector<std::string>& words);
ExportOptions parse_export(const std::vector<std::string>& words);
// command: "prepare", "preview". The number of examples may stand alone.
DataCommandOptions parse_data_command(const std::string& command, std::vector<std::string> words);
// Folders may stand alone, without --storage. command: "status", "verify".
StoreCommandOptions parse_store_command(const std::string& command, std::vector<std::string> words);
TrainOptions parse_train(const std::vector<std::string>& words);
PlanOptions parse_plan(const std::vector<std::string>& words);
EvalOptions parse_eval(const std::vector<std::string>& words);
GenerateOptions parse_generate(const std::vector<std::string>& words);
MergeOptions parse_merge(const std::vector<std::string>& words);
// The help text of "init", "train", "plan", "eval", "export", "generate", "merge", "status", "verify", "data
// prepare", "data preview", in lines of at most that many columns.
std::string help_of(const std::string& command, std::size_t columns);
// What training is asked for, in one paragraph.
std::string describe(const TrainOptions& options);

// Every option with its value, as a JSON object that --config-file reads back.
std::string effective_configuration(const TrainOptions& options);
std::string effective_configuration(const EvalOptions& options);

// How the options' data are read for that model, with tokenizer and interpreter resolved. The packed tokens go to the
// first storage folder, else to `folder`.
DataOptions data_options(const TrainOptions& options, const ModelSpec& spec, const std::filesystem::path& folder);
DataOptions data_options(const EvalOptions& options, const ModelSpec& spec, const std::filesystem::path& folder);
DataOptions data_options(const DataCommandOptions& options, const ModelSpec& spec, const std::filesystem::path& folder);
// Its tokenizer and chat template.
DataOptions data_options(const GenerateOptions& options, const ModelSpec& spec);

}  // namespace tierflow
