#pragma once
// FRONT DOOR of planning. What follows from a model's shapes and a session's options: layout, arrangement, and the
// bytes that storage holds and writes. Session and `tierflow plan` share it, so that what is predicted is what runs. No
// torch here.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/planning/session_options.h"
#include "runtime/spec/model_spec.h"
#include "runtime/spec/packing.h"
#include "swap/arrange.h"
#include "swap/fetcher.h"
#include "swap/layout.h"
#include "swap/store.h"

namespace tierflow {

// Device memory that computing takes beside weights, gradients and saved inputs, as StageProbe measured it.
struct ComputeNeeds {
  std::vector<std::uint64_t> carry_bytes;  // by stage: its input for one micro-batch, as in a slot; 0 for the first
  // By stage: bytes of one micro-batch's activations, besides the carries, if the stage can keep them; 0 if it cannot.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: how many of those bytes move if they are swapped; 0 if they cannot be.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t keeping_peak = 0;       // as stage_peak, of a forward whose activations are kept to its end
  std::uint64_t stage_peak = 0;         // the most that one stage takes while it computes
  std::uint64_t micro_batch_bytes = 0;  // in use besides, for each micro-batch: its carry, the gradient or what a
                                        // stage in parts holds, ids and tables

  std::uint64_t device_fixed = 0;  // always taken: context, kernels, handles of libraries
  std::uint64_t held_peak = 0;     // what torch holds at that peak, with blocks cached for reuse; 0: not measured

  // The part of the device budget that is set aside: an eighth more than measured, because torch reuses blocks that are
  // a little too large.
  std::uint64_t workspace(int micro_batches) const;
  std::uint64_t swap_workspace() const;  // more, where activations are swapped
  // How much of that is likely to be used.
  std::uint64_t expected(const swap::Arrangement& arrangement) const;
};

// Bytes that storage writes when each of these is done once. deferred: the part of `update` that deferred updates
// write. commit: what is resident. window: what begins a window of projected gradients, beside the pass over them.
// What a step writes of sparse chunks is counted for as many as it may use; sparse: of all of them, words and state.
struct WriteCost {
  std::uint64_t load = 0, activations = 0, gradients = 0, update = 0, deferred = 0, commit = 0, window = 0, sparse = 0;
};

struct SessionPlan {
  PackedModel packed;
  std::shared_ptr<const swap::Layout> layout;
  swap::Arrangement arrangement;
  std::uint64_t workspace = 0;  // of the device budget
  int evaluated_at_once = 1;    // micro-batches that an evaluation takes through a stage: those of a step or more
  std::uint64_t loading = 0;    // of the host budget: loading_bytes()
  // Of the host budget, for an export: turned_factor_bytes(), or what one beside the steps reads into.
  std::uint64_t exporting = 0;
  CachePlacement cache;                   // of SessionOptions::cache
  bool stored = false;                    // storage holds anything of the model at all
  bool head_scores_first = false;         // a forward of the head comes before its gradient: losses of pairs
  bool references_too = false;            // each forward is computed twice, with adapters and without
  int commit_every = 0;                   // as the option; 0 where there is no storage or no room
  bool speculates = false;                // steps may be speculative
  std::size_t sparse_used = 0;            // of the layout's sparse chunks, those of a step whose tokens all differ
  std::uint64_t deferred_parameters = 0;  // of the trainable ones: whose update is deferred
  std::uint64_t device_updated_parameters = 0;  // and whose runs on the device
  std::uint64_t device_state_parameters = 0;    // and whose state stays there
  WriteCost writes;

  // Host memory that the session takes at most.
  std::uint64_t host_bytes() const {
    return arrangement.host_bytes(*layout) + std::max(loading, exporting) + cache.host;
  }
  bool defers() const { return deferred_parameters != 0; }
};

// Whether so few tokens are in a step, for the size of the model's own token table, that SessionOptions::rows_on_demand
// is worth it: fewer than half of the table's chunks. The steps train the whole model, or parts of it, without
// adapters.
bool rows_pay(const ModelSpec& spec, const SessionOptions& options);
// Rows as those of the step with this number, from 0 on, of a run in which tokens spread over all of the table and each
// step uses others: for plans of steps that have no tokens yet. pending: as in Planner::train_step().
swap::StepRows expected_rows(const SessionPlan& plan, int step, bool pending);

// Throws Exception (usage) where a budget is too small, naming the smallest that works.
SessionPlan plan_session(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs);
// The same where `options` differ from those of `other` only in what choose_placement() chooses. They share a layout.
SessionPlan plan_again(const SessionPlan& other, const ModelSpec& spec, const SessionOptions& options,
                       const ComputeNeeds& needs);

// The same, but if what choose_placement() chose does not fit (its profile may be scaled from another model's), none of
// these choices is used. That changes no bit.
SessionPlan plan_that_fits(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs);

// What a store says of the model in it: enough to read it back without the session.
// sparse: its token tables are cut into sparse chunks.
std::string store_identity(const ModelSpec& spec, const SessionOptions& options, bool sparse = false);
io::VolumeOptions storage_volume(const SessionOptions& options);
swap::StoreOptions store_options(const ModelSpec& spec, const SessionOptions& options, const SessionPlan& plan);

// Proves the tasks of the first steps and the last update, where it trains, and of an evaluation. Throws
// std::logic_error: a plan that is wrong is a defect of the planner.
void prove(const SessionPlan& plan, bool train);

}  // namespace tierflow
