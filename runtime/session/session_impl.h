#pragma once
// Inside of Session, shared by session*.cpp.
#include <exception>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/device/device_memory.h"
#include "runtime/device/tensor_slot.h"
#include "runtime/models/dense_weights.h"
#include "runtime/models/key_value_store.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/pair_batch.h"
#include "runtime/planning/missed_updates.h"
#include "runtime/planning/speculation.h"
#include "runtime/session/expert_places.h"
#include "runtime/session/gradient_init.h"
#include "runtime/session/session.h"
#include "runtime/session/stage_probe.h"
#include "runtime/spec/token_tables.h"
#include "runtime/state/optimizer_work.h"
#include "runtime/state/streamed_state.h"
#include "swap/planner.h"
#include "swap/visit_planner.h"

namespace tierflow {

// What make() of an evaluation threw, between two passes.
struct NotMade {
  std::exception_ptr why;
};

struct Session::Impl {
  Impl(std::shared_ptr<LayeredModel> model, SessionOptions options, AdamW adamw);
  ~Impl();  // removes the store, even if the session failed to start, unless it was committed

  // session_setup.cpp
  void keep_source(std::shared_ptr<const SourceFolder> from, const Progress& progress);
  void set_up(const WeightSource& weights, const StoredSource& stored, const Progress& progress, const Say& say);
  std::uint64_t torch_bytes() const;
  ProbedModel probe();
  void check_write_limit() const;
  void make_store(const swap::Store::Contents& left);
  void make_key_value_store();
  void check_resumed(const std::string& identity) const;
  void restore(const Progress& progress);
  std::uint64_t writes_of_next_step() const;  // an export's or commit's included

  // session.cpp
  // Throws if a step with these is refused. Nothing has changed then: the session is as good as before. Returns their
  // pairs.
  PairCounts check_step(const std::vector<MicroBatch>& batches) const;
  // batches: as check_step() accepted them; pairs: what it returned.
  StepResult step(const std::vector<MicroBatch>& batches, const PairCounts& pairs, double lr);
  // used: by chunk, of the sparse ones.
  void finish_step(StepResult& result, const OptimizerWork& work, double lr, const std::vector<bool>& used);
  void drop_step(bool torn);
  void check_deferred(const OptimizerWork& work, std::uint64_t behind) const;
  void throw_if_out_of_memory();
  void flush();
  void drain_ahead();  // waits for what was fetched ahead
  void commit();
  bool commits_beside_next_step() const;
  std::uint64_t gradient_bytes_left_out() const;        // so far, as LaneCounters has them
  std::string progress_json(std::int64_t after) const;  // after this many steps
  // The work of a step with this learning rate: its own updates, and the pending ones of the step before.
  std::shared_ptr<OptimizerWork> make_work(double lr);
  swap::Entered enter(int stage, swap::Pass pass, int micro_batch);
  void leave() { throw_if(executor().leave()); }
  // The sums of the micro-batches' gradients. What the first micro-batch does not write, zero_untouched() writes.
  Gradients gradients_of(const swap::Entered& entered, int micro_batch) const;
  std::vector<Shared> share(const std::vector<MicroBatch>& batches);
  // first: what the first one is called in an error.
  void check_batches(const std::vector<MicroBatch>& batches, bool train, std::int64_t first = 0) const;
  void check_rows(const std::vector<CachedRow>& rows) const;
  models::Seeded seeded(int stage, int micro_batch, bool train = true) const;

  // session_rows.cpp
  MissedUpdates nothing_missed() const;
  std::vector<bool> chunks_of_tokens(const std::vector<MicroBatch>& batches, std::int64_t& rows) const;
  swap::SparseChunks take_sparse_chunks(const std::vector<bool>& used, bool all);
  void add_update(const std::vector<bool>& used, bool speculated, double lr);
  std::uint64_t sparse_parameters(const std::function<bool(int chunk)>& these) const;
  void count_row_bytes(const swap::Plan& step, StepResult& result) const;

  // session_speculation.cpp
  bool next_is_likely_not_to_clip() const;
  double clip_scale(double norm) const;  // of gradients
  // Whether a speculative step did what a staged one would have done.
  bool stands(const OptimizerWork& work) const;
  void undo();  // undoes a speculative step: state and weights are again those with which it began

  // gradient_init.cpp
  void check_gradient_pass(const std::vector<MicroBatch>& batches) const;
  void begin_with_gradient(const std::vector<MicroBatch>& batches);
  std::unique_ptr<GradientInit> gradient_pass(const std::vector<MicroBatch>& batches);
  void take_first_values(const GradientInit& found);

  // window.cpp
  bool window_ended() const { return windows != 0 && (window_begun < 0 || steps >= window_begun + windows); }
  void begin_window(const GradientInit& found);

  // session_passes.cpp
  Weights weights(const swap::Entered& entered);
  void expect_references(std::size_t micro_batches);  // of the pass that follows, where the loss takes them
  // The losses of each token under the reference, on the host. Computed in the head's visit.
  torch::Tensor reference_losses(const Weights& bound, int micro_batch, const Shared& shared);
  void compute(bool repeatable, const std::function<void()>& work);
  void drop_activations();  // all that a pass holds; a pass that is broken off needs it no more
  // Joins or separates the carries, so that each is of as many micro-batches as StageShape::together of the next stage
  // says.
  void regroup(int together, const std::vector<Shared>& shared);
  bool starts_afresh(const swap::Entered& entered, int micro_batch) const;
  void forward_all(const std::vector<Shared>& shared, swap::Pass pass, const std::function<void()>& before_each = {});
  // The loss of a step, and its divisor: the number of tokens that count, or of pairs.
  struct Objective {
    const std::vector<MicroBatch>& batches;
    std::int64_t targets = 0;
    PairCounts pairs;
  };
  // session_balance.cpp
  void watch_balance(const Objective& objective, std::vector<Shared>& shared);
  void expect_balance(int stage, int number, bool backward);
  void take_balance(int stage, int number);
  double aux_loss() const;  // NaN without it

  void head_all(const std::vector<Shared>& shared, const Objective& objective, StepResult& result, OptimizerWork& work);
  // Adds the losses of a step's micro-batches to its result, in their order. This is the one wait for the device in a
  // step.
  static void read_losses(const std::vector<HeadResult>& heads, StepResult& result);
  HeadResult head_of_pairs(const swap::Entered& entered, int micro_batch, const Shared& shared,
                           const Objective& objective, PairTotals& totals);
  void backward_all(const std::vector<Shared>& shared, OptimizerWork& work);
  // evaluate(), after which a session whose evaluation failed is not used again, unless a micro-batch was not made.
  Evaluation evaluated(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                       const Scored& scored, const Progress& progress);
  Evaluation evaluate(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                      const Scored& scored, const Progress& progress);
  std::vector<torch::Tensor> next_logits(const std::vector<CachedRow>& rows, bool another);
  // Plans an evaluation pass, and computes every stage but the last, whose visit comes next. another: a further pass
  // probably follows.
  void evaluate_all(const std::vector<Shared>& shared, bool another, const std::function<void()>& before_each = {});

  // session_on_demand.cpp
  void evaluate_on_demand(const std::vector<Shared>& shared, const std::function<void()>& before_each);
  void compute_in_parts(int stage, const std::vector<Shared>& shared, bool planned,
                        const std::function<void()>& before_each);
  bool needs_all_experts(const std::vector<Shared>& shared) const;
  void plan_visit(int stage, std::size_t micro_batches);
  void plan_need(int unit);
  void expect_first_values() const;  // throws as long as the adapters have none
  bool waits_for_gradient() const { return lacks_first_values || window_ended(); }

  std::shared_ptr<LayeredModel> model;
  SessionOptions options;  // micro_batches: the planned number
  const AdamW adamw;
  const torch::Device torch_device;
  DeviceMemory& torch_memory;
  DeviceMemory::Share torch_share{torch_memory};
  SessionPlan plan;
  swap::Executor& executor() const { return state->executor(); }
  std::unique_ptr<swap::Store> store;
  std::unique_ptr<swap::Planner> planner;
  std::unique_ptr<swap::VisitPlanner> visits;  // used instead if stages have units on demand
  ExpertUse expert_use;
  std::unique_ptr<KeyValueStore> key_values;
  std::unique_ptr<StreamedState> state;  // last: drains before the rest goes

  // By computation of the current stage, each of StageShape::together micro-batches: its input, then its gradient.
  std::vector<Carry> carries;
  int carried_together = 1;
  // By micro-batch: the carry of the model without its adapters, in passes that compute a reference; empty in others.
  std::vector<Carry> references;
  std::vector<std::vector<Carry>> inputs;  // by stage and computation: those that stay on the device
  // By stage and computation: activations that stay on the device; for the others the shapes of what lies in the slot.
  std::map<std::pair<int, int>, std::unique_ptr<KeptActivations>> kept;
  struct Saved {
    std::vector<TensorShape> input, activations;
  };
  std::map<std::pair<int, int>, Saved> in_slot;
  Weights dense;  // of the current visit, if some of its weights are stored in other formats than bf16
  bool lacks_first_values = false;              // the adapters have none yet
  std::unique_ptr<GradientInit> gradient_init;  // while its pass runs
  std::int64_t windows = 0;                     // steps of each window, if gradients are projected
  std::int64_t window_begun = -1;               // steps before the current window; -1: none has begun
  std::int64_t window_tried = -1;  // the same for a window that did not begin because a gradient was not finite
  std::int64_t steps = 0, skipped = 0;
  std::optional<NormHistory> norms;  // set if steps may be speculative
  bool ahead = false;                // what the next pass of a generation takes is still being fetched
  bool pending = false;              // deferred updates of the step before have not run yet
  std::int64_t pending_step = 0, updates_done = 0;
  double pending_lr = 0, pending_scale = 1;
  std::optional<MissedUpdates> missed;  // of sparse chunks, as the plans so far leave them; from set_up() on
  std::vector<bool> sparse_waiting;     // by chunk: sparse chunks whose deferred update has not run yet
  bool committed = false;
  std::int64_t committed_steps = -1;     // steps at the last commit
  std::uint64_t planned_generation = 0;  // the generation that the last planned commit makes
  std::weak_ptr<CommittedStep> kept_step;
  std::uint64_t copied = 0;  // bytes that copying the state into other chunks wrote to storage
  std::string client;        // JSON that the client wants remembered
  // The folder from which an export copies other parts, and their hash when the session began; null: there are none.
  std::shared_ptr<const SourceFolder> source;
  std::uint64_t source_hash = 0;
  // Memory ran out and computing again did not help: the rest of the plan runs without computing.
  std::optional<io::Error> out_of_memory;
  std::int64_t computed_again = 0;
  ExpertsTouched experts_touched;             // in the step at hand
  std::optional<ExpertPlaces> expert_places;  // of a mixture that is trained
  // Of each micro-batch of the step at hand, with the load-balancing loss; without it there are none.
  struct Balanced {
    std::vector<models::CountedTokens> parts;  // among its own tokens
    std::int64_t tokens = 0;                   // all of them
    double share = 0;                          // of the step's loss
    models::RouterLoads loads = {};            // of the layers that the forward has passed
  };
  std::vector<Balanced> balanced;
  std::vector<models::RouterBalance> balances;  // by the first micro-batch of a computation: of the one at hand
  std::set<std::string> attention_ran;          // names of what computed attention so far (device_attention.h)
};

// `model` with the specification that `change` makes of its own. Throws Exception (kind usage), whose line begins with
// `what`, for a model that neither its specification makes nor Layers.
Model changed(const Model& model, std::string_view what, const std::function<void(ModelSpec& spec)>& change);

// The error of a session for which is_out_of_memory().
io::Error out_of_memory_error(const c10::Error& error);

}  // namespace tierflow
