#pragma once
// FRONT DOOR of session: a model whose state streams, and its steps. Throws Exception, or std::logic_error for a defect
// of Tierflow. After an exception from step() or evaluate() the session can only be destroyed, unless intact() is true;
// what it committed is there to resume from. Sessions may exist beside each other, and each may be used by any one
// thread at a time. torch's memory and its cap, which ends with the last session, are those of the process: one session
// is made at a time, and nothing else computes meanwhile, because it measures.
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

// Whether a step's updates waited for the norm that clips them. none: nothing clips. staged: they waited. speculative:
// they did not wait, and the norm did not clip. undone: they did not wait and were undone, because the norm clips (the
// step was then done again, as a staged one) or is not finite (the step was then skipped).
enum class Clipping : std::uint8_t { none, staged, speculative, undone };
const char* clipping_name(Clipping clipping);

struct StepResult {
  std::int64_t step = 0;  // counts from 1
  double loss = 0;        // mean over the tokens that count, natural log; for pairs, PairTotals::mean_loss()
  double grad_norm = 0;   // of the step's gradients as applied, before clipping
  bool skipped = false;   // a loss or gradient was not finite: nothing was changed
  Clipping clipping = Clipping::none;
  std::int64_t tokens = 0;          // of all micro-batches, padding and tokens without a label included
  std::optional<PairTotals> pairs;  // set if the session's loss is a preference loss
  // If the session distills: the means whose weighted sum is the loss (soft_targets.h).
  double ce_loss = NAN, kd_loss = NAN;
  // For each layer with experts, in order: how many experts had tokens.
  std::vector<std::int64_t> experts_touched;
  std::int64_t experts = 0;  // of such a layer
  // For a mixture with the load-balancing loss (models/router_balance.h): the mean over the step's micro-batches,
  // weighted by the tokens that count in each. The loss above includes it, times the model's coefficient.
  double aux_loss = NAN;
  // Bytes of gradients that are zeros because no token took their expert. They were moved neither from the device nor
  // to and from storage.
  std::uint64_t gradient_bytes_left_out = 0;
  // If the step uses a part of the embedding (SessionOptions::embedding_part): the number of rows of its tokens, the
  // bytes of the table and its state that it moves from and to storage without commits, and the bytes that it would
  // move if it used the whole table.
  std::int64_t embedding_rows = 0;
  std::uint64_t embedding_bytes = 0, embedding_bytes_of_all = 0;
  std::int64_t computed_again = 0;      // stages in which memory ran out and that succeeded after caches were freed
  std::uint64_t allocator_retries = 0;  // DeviceMemoryStats::retries of this step
  double seconds = 0;
  double tokens_per_s = 0;
};

class LayeredModel;
class SourceFolder;
struct CachedRow;
struct HeadScores;

// A model and where its weights come from. load() and Layers make one; a session takes it.
struct Model {
  std::shared_ptr<LayeredModel> layers;
  WeightSource weights;
  StoredSource stored = {};                         // after load(): the folder's weights in a format that can be kept
  std::shared_ptr<const SourceFolder> source = {};  // what a result copies from the model's folder; null: nothing
  const ModelSpec& spec() const;
};

// The model in an HF folder: config.json and safetensors. as: as in read_model_spec(). Throws Exception (kind input).
Model load(const std::filesystem::path& folder, const std::string& as = "");
// A model with random weights, those of `tierflow init` with this seed.
Model from_config(const ModelSpec& spec, std::uint64_t seed);
// `base` with low-rank adapters (spec/adapters.h). Only the adapters are trained; the base is never written. `seed`
// decides the adapters' first values, unless config.init computes them from the base's weights. With
// AdapterInit::galore the base is trained, and the result is the whole model. A model of your own Layers (layers.h)
// gets adapters beside each tierflow::Linear that is named; if none is named, beside each of them but those of the last
// layer. Throws Exception (kind usage) if numbers are out of range, or a name fits no layer or another kind of module.
Model with_adapters(const Model& base, const AdapterConfig& config, std::uint64_t seed);
// The same with the adapters of a PEFT folder. Throws Exception (kind input) if they do not fit the model.
Model with_adapters(const Model& base, const std::filesystem::path& adapter);

// `model` with the weights of its blocks' linear layers frozen and stored in `format` (for your own Layers: of all
// layers but the last). `model` is from load(), Layers or with_adapters(). The weights are converted when a session
// begins. Nothing is converted to fp8, fp8_rows or mxfp4: weights that the folder of load() has in that format keep it,
// and all others stay in bf16. Throws Exception (kind usage) if the folder has no weight in that format.
Model with_base_format(const Model& model, WeightFormat format);

// `model`, of which only a part is trained and the rest is frozen (spec/trainable.h). `model` is from load(),
// from_config() or Layers. For your own Layers, `last_layers` counts back from the layer before the one that has the
// loss.
Model with_trainable(const Model& model, const TrainableConfig& config);
// With learning rates that differ from tensor to tensor (set_learning_rates in spec/trainable.h).
Model with_learning_rates(const Model& model, const std::vector<std::pair<std::string, double>>& by_pattern);
Model without_dropout(const Model& model);
// A mixture of experts for sessions without training: a pass with few tokens fetches only the experts that its routers
// choose, with the same bits as if it fetched all (spec/experts_on_demand.h). Other models are returned unchanged.
Model with_experts_on_demand(const Model& model);

// What the passes of a session did with experts on demand. Each expert of each layer counts once for each pass.
struct ExpertUse {
  std::uint64_t all = 0;      // experts that the layers have
  std::uint64_t chosen = 0;   // experts that had tokens
  std::uint64_t needed = 0;   // experts that were asked for: the chosen ones, or in a pass with many tokens all
  std::uint64_t fetched = 0;  // needed experts that were not on the device yet
  std::uint64_t read = 0;     // fetched experts that were read from storage
};

// The result of an evaluation, over the predicted tokens that count.
struct Evaluation {
  double loss = 0;          // mean, natural log
  double accuracy = NAN;    // share whose label greedy decoding gives; NaN for your own Layers
  std::int64_t tokens = 0;  // number of these tokens
};

// Called for each micro-batch of an evaluation, with its index, the micro-batch, and the head's scores of its tokens on
// the host.
using Scored = std::function<void(std::int64_t index, const MicroBatch& batch, const HeadScores& scores)>;

class CommittedStep;
class KeyValueStore;

class Session {
 public:
  // Measures how much memory the stages need, plans the budgets, and loads all weights. With options.resume it verifies
  // and restores the state in options.storage instead. progress: of loading. say: gets a line if a resumed state is
  // copied into chunks of another size. Throws Exception of kind usage (a budget is too small, and the text names the
  // smallest that works; the state is another run's; a number cannot be, such as a clip of 0; or training was asked for
  // with sequences longer than the model's positions), environment (no room on storage), locked, memory, io or
  // corruption.
  Session(
      Model model, SessionOptions options, AdamW adamw = {}, const Progress& progress = {},
      const Say& say = [](const std::string&) {});
  // Commits nothing: call commit() before, if the last step is to be there for a session that resumes.
  ~Session();

  // One optimizer step over exactly options.micro_batches micro-batches. With a preference loss they are pairs as
  // pair_batch.h says; with distillation they have a teacher's tokens. If device memory runs out in a stage, caches are
  // freed and the stage is computed once more, unless some of its gradients are already added up. If that does not
  // help, the whole step is dropped with an Exception of kind memory, and the session stays intact: the model is that
  // of the step before. Without clipping this holds as long as no update of the step has run.
  StepResult step(const std::vector<MicroBatch>& batches, double lr);
  // With the learning rate that the session was made with.
  StepResult step(const std::vector<MicroBatch>& batches);
  // Whether begin_with_gradient() must be called before the next step: the adapters lack their first values, which come
  // from the gradient of the base (of_gradient()); or a window of projected gradients begins (AdapterInit::galore).
  bool waits_for_gradient() const;
  // A forward and backward pass over the options.micro_batches micro-batches of the next step. It uses the gradient of
  // their mean loss for what waits_for_gradient() asks for. The base streams as in a step.
  //  - First values of adapters: nothing else changes. After an exception the session can only be destroyed, and has
  //    committed nothing.
  //  - A window: what the last window trained is added to the weights' masters, each written once, and new projectors
  //    replace the old ones. If the gradient is not finite, nothing changes and step() may be called. If device memory
  //    runs out (kind memory), the session stays intact.
  // If a signal asks the process to end meanwhile (base/signals.h), the rest is not computed, and nothing changes:
  // waits_for_gradient() stays true.
  // Commits if steps are committed. Throws Exception (kind usage) if nothing waits for a gradient.
  void begin_with_gradient(const std::vector<MicroBatch>& batches);
  // Loss and accuracy over the micro-batches, forward only. scored: called with each micro-batch, in order.
  Evaluation evaluate(const std::vector<MicroBatch>& batches, const Scored& scored = {});
  // The same, to the bit, over `count` micro-batches that `make` makes as they are needed. plan().evaluated_at_once of
  // them exist at once, and pass a stage before the next stage is fetched. If `make` throws, or a micro-batch is
  // refused, the evaluation ends there, and the session stays intact. progress: called before each micro-batch passes a
  // stage; it counts these calls, not bytes. If it throws, the session can only be destroyed.
  Evaluation evaluate(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                      const Scored& scored = {}, const Progress& progress = {});
  // Generation (generator.h): the logits of the token after each span of each row, fp32 [spans, vocab] on the host. All
  // rows pass a stage before the next one is fetched. At most options.micro_batches rows, each of at most
  // options.micro_batch * options.sequence_length tokens. another: a further pass probably follows, so its first
  // weights are fetched while this pass ends and the caller draws tokens. If experts come on demand, what followed the
  // last time is fetched instead.
  std::vector<at::Tensor> next_logits(const std::vector<CachedRow>& rows, bool another = false);

  // The three exports return the name of the first tensor written that holds an infinity or a NaN; empty: none does.
  // An HF folder: config.json and bf16 safetensors, streamed. For a multimodal model it is a folder of the model's
  // class, with the other parts as they were when the session began. The caller copies the tokenizer files. Throws
  // Exception (kind usage) for a model with adapters, (kind input) if the other parts have changed.
  std::string export_hf(const std::filesystem::path& folder, const Progress& progress = {});
  // The adapters as a PEFT folder: adapter_config.json and adapter_model.safetensors (fp32). base: the model's name or
  // folder for PEFT. Throws Exception (kind usage) for a model without adapters.
  std::string export_adapter(const std::filesystem::path& folder, const std::filesystem::path& base = {});
  // The model in the folder `base` with this session's adapters added, as merge_adapter() writes it. Throws Exception
  // (kind usage) for a model without adapters.
  std::string export_merged(const std::filesystem::path& base, const std::filesystem::path& folder,
                            const Progress& progress = {});
  // fp32 master values of a tensor, for inspection. The tensor is one of the specification's units, or one of the
  // checkpoint by its name, with its tiles put together.
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
  // (device_attention.h), several joined by "+". Empty before the first step, and for your own Layers.
  std::string attention() const;
  // With SessionOptions::record: the tasks that ended since the last call. They take memory until this call.
  std::vector<swap::TaskRecord> take_timeline();
  // The store of keys and values that the plan puts on storage; null: there are none. For one KeyValueCache at a time.
  KeyValueStore* key_values() const;
  // Nothing if everything is resident.
  std::optional<io::VolumeMode> storage_mode() const;
  std::vector<io::DriveStats> drives() const;
  std::uint64_t bytes_written() const;  // to storage, loading and keys and values included
  // What bytes_written() will be after the next step and an export of its state, or a commit with keep_store.
  std::uint64_t bytes_written_after_next_step() const;
  std::string describe() const;  // one paragraph: what lives where
  const LayeredModel& model() const;
  const SessionPlan& plan() const;
  // Makes the present state durable in the storage folders, so that it outlives the session. Throws Exception (kind
  // usage) if everything is resident without keep_store, or while a step is kept.
  void commit();
  // After how many steps the state is committed, beside the next step. 0: it is not committed.
  int commit_every() const;
  // Keeps the model as it is now, so that another thread can write it while training goes on. The next step() commits
  // the model, if it is not committed yet. Until the returned object is destroyed, nothing else is committed. Returns
  // null if no steps are committed, if the host budget has no room for reading the model, and for a model with
  // adapters. Throws Exception (kind usage) if a step is already kept.
  std::shared_ptr<CommittedStep> keep_step();
  // The number of steps that the state has had, including those before it was resumed.
  std::int64_t steps() const;
  // The client's JSON that goes with every commit of the present state. remembered(): the one that came with the state
  // that was resumed, until remember() is called.
  void remember(std::string client);
  const std::string& remembered() const;
  // Makes the session remove its store when it ends, though it was committed.
  void discard();

 private:
  friend class CommittedStep;
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
  // As Session::export_hf(), on any thread, beside the session's steps. Throws Exception (kind usage) if it is not
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

// Writes the model in the folder `base` with the adapters of a PEFT folder added to its weights, as an HF folder: W +
// scale * B A in fp32, rounded to bf16 once. Streamed. as: as in read_model_spec(). Returns what Session::export_hf()
// returns. Throws Exception (kind input) if the adapters do not fit the model.
std::string merge_adapter(const std::filesystem::path& base, const std::filesystem::path& adapter,
                          const std::filesystem::path& folder, const Progress& progress = {},
                          const std::string& as = "");

// The same with the tokenizer and the other files of `base`, and with the chat template that lies beside the adapters,
// if one does, in a folder that does not exist yet or is empty. The folder appears when it is whole. Throws Exception
// (kind usage) if the folder is not empty.
std::string merge_model(const std::filesystem::path& base, const std::filesystem::path& adapter,
                        const std::filesystem::path& folder, const Progress& progress = {}, const std::string& as = "");

// Whether a folder of adapters that export_adapter() wrote was trained over other weights than those of this model, by
// some values of each tensor. False where the folder does not say, as those of PEFT. as: as in read_model_spec().
// Throws Exception (kind input) if one of them cannot be read.
bool is_for_other_weights(const std::filesystem::path& adapter, const std::filesystem::path& base,
                          const std::string& as = "");

// Writes the committed state of a store: of a session's store the weights as an HF folder, or the adapters as a PEFT
// folder; of a Python script's store what the script recorded about its model (script_model.h). Returns what
// Session::export_hf() returns. Throws Exception (kind input) if the folder from which the result takes other parts
// does not exist, or has changed. base, base_weights: the folder of the model that adapters are
// for, and hash_text() of its weights_hash(), as far as they are known.
std::string export_store(const std::vector<std::filesystem::path>& storage, const std::filesystem::path& folder,
                         const Progress& progress = {}, const std::filesystem::path& base = {},
                         const std::string& base_weights = "");

}  // namespace tierflow
