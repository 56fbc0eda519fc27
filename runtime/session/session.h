#pragma once
// FRONT DOOR of session: a model whose state streams, and its steps. Throws Exception, or std::logic_error for a defect
// of its own; after an exception from step() or evaluate() the session can only be destroyed, unless intact() is true.
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/volume.h"
#include "runtime/base/progress.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/models/micro_batch.h"
#include "runtime/planning/profile.h"
#include "runtime/planning/session_options.h"
#include "runtime/planning/session_plan.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/trainable.h"
#include "runtime/state/memory_use.h"
#include "swap/executor.h"

namespace tierflow {

struct AdamW {
  double lr = 1e-5;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.0;  // of matrices; norms and biases are not decayed
};

// How a step's updates met the norm that clips them: nothing clips; they waited for it; they ran ahead of it, and it
// did not clip; they ran ahead of it and were undone, because it clips (the step was then done again, as a staged one)
// or is not finite (it was skipped).
enum class Clipping : std::uint8_t { none, staged, speculative, undone };
const char* clipping_name(Clipping clipping);

struct StepResult {
  std::int64_t step = 0;  // counts from 1
  double loss = 0;        // mean over the tokens that count, natural log; of pairs, PairTotals::mean_loss()
  double grad_norm = 0;   // of the step's gradients as applied, before clipping
  bool skipped = false;   // a loss or gradient was not finite: nothing was changed
  Clipping clipping = Clipping::none;
  std::int64_t tokens = 0;          // all of the micro-batches, padding and tokens without a label included
  std::optional<PairTotals> pairs;  // where the session's loss is one of pairs
  // Where it distills: the means whose weighted sum is the loss (soft_targets.h).
  double ce_loss = NAN, kd_loss = NAN;
  // Of each layer with experts, the first first, how many had tokens; and of how many.
  std::vector<std::int64_t> experts_touched;
  std::int64_t experts = 0;
  // Where the step uses a part of the embedding (SessionOptions::rows_on_demand): the rows that its tokens are, the
  // bytes of the table and its state that it moves from and to storage beside commits, and those that it would move if
  // it used all of it.
  std::int64_t embedding_rows = 0;
  std::uint64_t embedding_bytes = 0, embedding_bytes_of_all = 0;
  std::int64_t computed_again = 0;  // stages in which memory ran out once and that fitted after caches were freed
  double seconds = 0;
  double tokens_per_s = 0;
};

class LayeredModel;
class SourceFolder;
struct CachedRow;
struct HeadScores;

// A model and where its weights come from: what load() and Layers give to a session.
struct Model {
  std::shared_ptr<LayeredModel> layers;
  WeightSource weights;
  StoredSource stored = {};                         // of load(): what its folder has in a format that can be kept
  std::shared_ptr<const SourceFolder> source = {};  // what a result takes from the model's folder; null: nothing
  const ModelSpec& spec() const;
};

// The model in an HF folder: config.json and safetensors. as: as in read_model_spec(). Throws Exception (kind input).
Model load(const std::filesystem::path& folder, const std::string& as = "");
// A model with random weights, those of `tierflow init` with this seed.
Model from_config(const ModelSpec& spec, std::uint64_t seed);
// `base` with low-rank adapters (spec/adapters.h). Only the adapters are trained; the base is never written. `seed`
// decides the adapters' first values, unless config.init computes them from the base's weights. With
// AdapterInit::galore the base is trained, and the result is the whole model. Layers of one's own (layers.h) have
// adapters beside each tierflow::Linear that is named; where none is named, beside all but those of the last layer.
// Throws Exception (kind usage): numbers out of range, names that fit no layer or another module.
Model with_adapters(const Model& base, const AdapterConfig& config, std::uint64_t seed);
// The same with the adapters of PEFT's folder. Throws Exception (kind input) where they are not the model's.
Model with_adapters(const Model& base, const std::filesystem::path& adapter);

// One of load(), Layers or with_adapters() with the weights of its blocks' linear layers (of one's own: of all layers
// but the last) frozen and stored in `format`. They
// are converted when a session begins. Nothing is converted to fp8, fp8_rows or mxfp4: weights that load()'s folder has
// in that format stay so, all others stay in bf16. Throws Exception (kind usage) where the folder has none in it.
Model with_base_format(const Model& model, WeightFormat format);

// One of load(), from_config() or Layers of which a part is trained, the rest frozen (spec/trainable.h). Of layers of
// one's own the last `last_layers` are those before the one that has the loss.
Model with_trainable(const Model& model, const TrainableConfig& config);
// With learning rates that differ from tensor to tensor (set_learning_rates in spec/trainable.h).
Model with_learning_rates(const Model& model, const std::vector<std::pair<std::string, double>>& by_pattern);
Model without_dropout(const Model& model);
// `model`, a mixture of experts, for sessions without training: a pass with few tokens fetches only the experts that
// its routers choose, with the same bits as if it fetched all (spec/experts_on_demand.h). Other models stay as they
// are.
Model with_experts_on_demand(const Model& model);

// What passes of a session did with experts on demand, an expert of a layer in a pass being one.
struct ExpertUse {
  std::uint64_t all = 0;      // that there were
  std::uint64_t chosen = 0;   // that had tokens
  std::uint64_t needed = 0;   // that were asked for: those, or in a pass with many tokens all
  std::uint64_t fetched = 0;  // of these, not on the device yet
  std::uint64_t read = 0;     // of these, read from storage
};

// What an evaluation found of the tokens that are predicted and count.
struct Evaluation {
  double loss = 0;          // mean, natural log
  double accuracy = NAN;    // share of them whose label is what greedy decoding gives; NaN for layers of one's own
  std::int64_t tokens = 0;  // how many they are
};

// What an evaluation hands on of each micro-batch: its index, itself, and what the head found of its tokens, on the
// host.
using Scored = std::function<void(std::int64_t index, const MicroBatch& batch, const HeadScores& scores)>;

class CommittedStep;
class KeyValueStore;

class Session {
 public:
  // Measures what the stages need, plans the budgets, and loads all weights; with options.resume it verifies and
  // restores the state in options.storage instead. progress: of loading. say: gets a line if a resumed state is copied
  // into chunks of another size. Throws Exception: usage (a budget is too small, the text names the smallest that
  // works; or the state is another run's), environment (no room on storage), locked, memory, io, corruption.
  Session(
      Model model, SessionOptions options, AdamW adamw = {}, const Progress& progress = {},
      const Say& say = [](const std::string&) {});
  ~Session();

  // One optimizer step over exactly options.micro_batches micro-batches, as pair_batch.h says where options.loss is one
  // of pairs, and with a teacher's tokens where it distills. If device memory runs out in a stage, caches
  // are freed and the stage is computed once more, unless some of its gradients are already added up. If that does not
  // help, the whole step is dropped with an Exception of kind memory, and the session stays intact: the model is that
  // of the step before. Without clipping this holds as long as no update of the step has run.
  StepResult step(const std::vector<MicroBatch>& batches, double lr);
  StepResult step(const std::vector<MicroBatch>& batches) { return step(batches, adamw_lr()); }
  // Whether begin_with_gradient() comes before the next step: the adapters lack their first values, which come from the
  // gradient of the base (of_gradient()); or a window of projected gradients begins (AdapterInit::galore).
  bool waits_for_gradient() const;
  // A forward and backward pass over the options.micro_batches micro-batches of the step that follows. From the
  // gradient of their mean loss it makes what waits_for_gradient() asks for. The base streams as in a step.
  // First values of adapters: nothing else changes. After an exception the session can only be destroyed, and has
  // committed nothing.
  // A window: what the last window trained is added to the weights' masters, each written once, and new projectors
  // replace the old ones. If the gradient is not finite, nothing changes and step() may be called. If device memory
  // runs out (kind memory), the session stays intact.
  // If a signal asks the process for an end meanwhile (base/signals.h), the rest is not computed, and nothing changes:
  // waits_for_gradient() stays true.
  // Commits where steps are committed. Throws Exception (kind usage) if nothing waits for a gradient.
  void begin_with_gradient(const std::vector<MicroBatch>& batches);
  // Loss and accuracy over the micro-batches, forward only.
  Evaluation evaluate(const std::vector<MicroBatch>& batches);
  // The same, to the bit, over `count` micro-batches made as they are needed: plan().evaluated_at_once of them exist at
  // once, and pass a stage before the next one is fetched. `scored`: called with each one, in order.
  // `progress`: called before each micro-batch passes a stage; it counts these calls, not bytes. If it throws, the
  // session can only be destroyed.
  Evaluation evaluate(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                      const Scored& scored = {}, const Progress& progress = {});
  // Generation (generator.h): the logits of the token behind each span of each row, fp32 [spans, vocab] on the host.
  // All rows pass a stage before the next one is fetched. At most options.micro_batches rows, each of at most
  // options.micro_batch * options.sequence_length tokens. another: one more pass is expected to follow, and its first
  // weights are fetched while this one ends and the caller draws. Where experts come on demand, what followed the last
  // time is fetched.
  std::vector<at::Tensor> next_logits(const std::vector<CachedRow>& rows, bool another = false);

  // The three exports return the name of the first tensor written that holds an infinity or a NaN; empty: none does.
  // An HF folder: config.json and bf16 safetensors, streamed; of a model of text and other things a folder of its
  // class, with the other parts as they were when the session began. Tokenizer files are the caller's to copy.
  // Throws Exception (kind usage) for a model with adapters, (kind input) where the other parts have changed.
  std::string export_hf(const std::filesystem::path& folder, const Progress& progress = {});
  // The adapters of a model that has some, as PEFT's folder: adapter_config.json and adapter_model.safetensors (fp32).
  // base: what PEFT is told to be the model's name or folder. Throws Exception (kind usage) for another model.
  std::string export_adapter(const std::filesystem::path& folder, const std::filesystem::path& base = {});
  // The model in the folder `base` with this session's adapters added, as merge_adapter() writes it. Throws Exception
  // (kind usage) for a model without adapters.
  std::string export_merged(const std::filesystem::path& base, const std::filesystem::path& folder,
                            const Progress& progress = {});
  // fp32 master values of a tensor, for inspection: a tensor of the specification's units, or a checkpoint's tensor by
  // its name, with its tiles put together.
  std::vector<float> master(int unit, int tensor);
  std::vector<float> master(const std::string& name);

  const SessionOptions& options() const;
  // False after an exception after which the session can only be destroyed.
  bool intact() const;
  std::uint64_t skipped_steps() const;
  std::uint64_t parameters() const;
  MemoryUse memory() const;
  std::array<swap::LaneCounters, swap::kLanes> lanes() const;
  ExpertUse expert_use() const;
  // What has computed attention so far, in steps and evaluations: "blocks", "flash", "cudnn" or "torch"
  // (device_attention.h), several joined by "+"; empty before the first, and for layers of one's own.
  std::string attention() const;
  // With SessionOptions::record: the tasks that ended since the last call. They take memory until then.
  std::vector<swap::TaskRecord> take_timeline();
  // Where keys and values lie that the plan puts on storage; null: there are none. For one KeyValueCache at a time.
  KeyValueStore* key_values() const;
  // Empty where everything is resident.
  std::optional<io::VolumeMode> storage_mode() const;
  std::vector<io::DriveStats> drives() const;
  std::uint64_t bytes_written() const;  // to storage, loading included
  // What bytes_written() will be after the next step and an export of its state, or a commit with keep_store.
  std::uint64_t bytes_written_after_next_step() const;
  std::string describe() const;  // one paragraph: what lives where
  const LayeredModel& model() const;
  const SessionPlan& plan() const;
  // Makes the present state durable in the storage folders, so that it outlives the session. Throws Exception (kind
  // usage) where everything is resident without keep_store, or while a step is kept.
  void commit();
  // Whether the state is committed beside the steps, and after how many each. 0: it is not.
  int commit_every() const;
  // Keeps the model as it is now, so that another thread can write it while training goes on: the next step() commits
  // it, if it is not committed yet, and until the returned object goes nothing else is. Null where no steps are
  // committed, where the host budget has no room for reading it, and for a model with adapters. Throws Exception (kind
  // usage) where a step is kept already.
  std::shared_ptr<CommittedStep> keep_step();
  // Steps that the state has, those before it was resumed included.
  std::int64_t steps() const;
  // JSON of the client's that goes with every commit of the present state, and what came with the state that was
  // resumed.
  void remember(std::string client);
  const std::string& remembered() const;
  // The store is removed when the session ends, though it was committed.
  void discard();

 private:
  friend class CommittedStep;
  double adamw_lr() const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The model after one step of a session. The session must outlive this object.
class CommittedStep {
 public:
  std::int64_t step() const { return step_; }
  // Whether the step that came after it has committed it.
  bool durable() const;
  // Blocks until it is durable. Call on the session's thread, after the next step(); before that it throws Exception
  // (kind usage).
  void wait();
  // As Session::export_hf(), on any thread, beside the session's steps. Throws Exception (kind usage) where it is not
  // durable yet. before_move: of the weights files; one that waits keeps the drive free for the steps.
  std::string export_hf(const std::filesystem::path& folder, const Progress& progress,
                        const BeforeMove& before_move = {}) const;

 private:
  friend class Session;
  explicit CommittedStep(Session::Impl& impl);
  Session::Impl& impl_;
  const std::int64_t step_;
  std::atomic<std::uint64_t> generation_ = 0;  // in which it is; 0: no step came yet
};

// Writes the model in the folder `base` with the adapters of PEFT's folder added to its weights, as an HF folder:
// W + scale * B A in fp32, rounded to bf16 once. Streamed. as: as in read_model_spec(). Returns what
// Session::export_hf() returns. Throws Exception (kind input) where they do not fit.
std::string merge_adapter(const std::filesystem::path& base, const std::filesystem::path& adapter,
                          const std::filesystem::path& folder, const Progress& progress = {},
                          const std::string& as = "");

// The same in a result of its own: a folder that is not there yet or empty, with the tokenizer and the other files of
// `base`; it is there whole, or not. Throws Exception (kind usage) where the folder holds something.
std::string merge_model(const std::filesystem::path& base, const std::filesystem::path& adapter,
                        const std::filesystem::path& folder, const Progress& progress = {}, const std::string& as = "");

// Writes the committed weights of a store that a session kept as an HF folder, or the adapters that it trained as
// PEFT's; of a store that a script of its own kept (script_model.h), what that says of its model. Returns what
// Session::export_hf() returns. Throws Exception (kind input) where the folder of which the result is to take other
// parts is not there, or not as it was.
std::string export_store(const std::vector<std::filesystem::path>& storage, const std::filesystem::path& folder,
                         const Progress& progress = {});

}  // namespace tierflow
