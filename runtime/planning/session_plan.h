#pragma once
// FRONT DOOR of planning. Computes from a model's shapes and a session's options the layout, the arrangement, and the
// bytes that storage holds and writes. Session and `tierflow plan` both use it, so that what is predicted is what runs.
// No torch here.
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

// Bytes of device memory that computing takes besides weights, gradients and saved inputs, as StageProbe measured them.
struct ComputeNeeds {
  std::vector<std::uint64_t> carry_bytes;  // by stage: its input for one micro-batch, as in a slot; 0 for the first
  // By stage: bytes of one micro-batch's activations, besides the carries, if the stage can keep them; 0 if it cannot.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: how many of those bytes move if they are swapped; 0 if they cannot be.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t keeping_peak = 0;       // as stage_peak, of a forward whose activations are kept to its end
  std::uint64_t stage_peak = 0;         // the most that one stage takes while it computes
  std::uint64_t micro_batch_bytes = 0;  // further bytes for each micro-batch: its carry, the gradient or what a
                                        // stage in parts holds, ids and tables

  std::uint64_t device_fixed = 0;  // always taken: context, kernels, handles of libraries, a model's constants
  std::uint64_t host_fixed = 0;    // of the host budget: keys and values in RAM
  std::uint64_t held_peak = 0;     // what torch holds at that peak, with blocks cached for reuse; 0: not measured

  // The part of the device budget that is set aside: an eighth more than measured, because torch reuses blocks that are
  // a little too large.
  std::uint64_t workspace(int micro_batches) const;
  std::uint64_t swap_workspace() const;  // further bytes if activations are swapped
  // How much of the workspace will probably be used.
  std::uint64_t expected(const swap::Arrangement& arrangement) const;
};

// Bytes that storage writes when each of these is done once. load: loading the model. activations, gradients, update:
// of one step. deferred: the part of `update` that deferred updates write. commit: the resident state. window:
// beginning a window of projected gradients, without the pass for their gradient. A step's sparse chunks are counted
// for as many as it may use; sparse: words and state of all sparse chunks.
struct WriteCost {
  std::uint64_t load = 0, activations = 0, gradients = 0, update = 0, deferred = 0, commit = 0, window = 0, sparse = 0;
  std::uint64_t step() const { return update + activations + gradients; }
};

struct SessionPlan {
  PackedModel packed;
  std::shared_ptr<const swap::Layout> layout;
  swap::Arrangement arrangement;
  std::uint64_t workspace = 0;  // of the device budget
  int evaluated_at_once = 1;    // micro-batches that an evaluation takes through a stage; at least those of a step
  std::uint64_t loading = 0;    // bytes of the host budget: loading_bytes()
  // Bytes of the host budget for an export: turned_factor_bytes(), or the buffers of an export beside the steps.
  std::uint64_t exporting = 0;
  CachePlacement cache;                   // of SessionOptions::cache
  bool stored = false;                    // storage holds at least a part of the model
  bool head_scores_first = false;         // with preference losses: a forward of the head comes before its gradient
  bool references_too = false;            // each forward is computed twice, with adapters and without
  int commit_every = 0;                   // as the option; 0 if there is no storage or no room
  bool speculates = false;                // steps may be speculative
  std::size_t sparse_used = 0;            // sparse chunks that a step uses if all its tokens differ
  std::uint64_t deferred_parameters = 0;  // trainable parameters whose update is deferred
  std::uint64_t device_updated_parameters = 0;  // trainable parameters whose update runs on the device
  std::uint64_t device_state_parameters = 0;    // trainable parameters whose state stays on the device
  WriteCost writes;

  // Host memory that the session takes at most.
  std::uint64_t host_bytes() const {
    return arrangement.host_bytes(*layout) + std::max(loading, exporting) + cache.host;
  }
  bool defers() const { return deferred_parameters != 0; }
};

// SessionOptions::embedding_part, where it is worth it: the model's untied token table has more than 131072 elements
// for each token of a step. A part then has as many elements as a row, rounded down to a size that parts may have, and
// more if these were more than 70,000 parts. Otherwise, and for models with adapters, 0.
std::uint64_t embedding_part_for(const ModelSpec& spec, const SessionOptions& options);
// The sparse chunks of a step, for plans of steps that have no tokens yet. It assumes that tokens spread over the whole
// table and that each step uses other chunks. step: its number, from 0. pending: as in Planner::train_step().
swap::SparseChunks expected_sparse_chunks(const SessionPlan& plan, int step, bool pending);

// Throws Exception (kind usage) if a budget is too small; it names the smallest that works.
SessionPlan plan_session(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs);
// The same for `options` that differ from those of `other` only in what choose_placement() chooses. Both plans share a
// layout.
SessionPlan plan_again(const SessionPlan& other, const ModelSpec& spec, const SessionOptions& options,
                       const ComputeNeeds& needs);

// The same as plan_session(), but if what choose_placement() chose does not fit (its profile may be scaled from another
// model's), it uses none of these choices. That changes no bit.
SessionPlan plan_that_fits(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs);

// The identity of a store: what it says of its model, enough to read the model back without the session.
// embedding_part: as in SessionOptions, and chosen.
std::string store_identity(const ModelSpec& spec, const SessionOptions& options, std::uint64_t embedding_part = 0);
io::VolumeOptions storage_volume(const SessionOptions& options);
swap::StoreOptions store_options(const ModelSpec& spec, const SessionOptions& options, const SessionPlan& plan);

// Proves the tasks of an evaluation and, if the session trains, of the first steps and the last updates. Throws
// std::logic_error if a plan is wrong, because that is a defect of the planner.
void prove(const SessionPlan& plan, bool train);

}  // namespace tierflow
