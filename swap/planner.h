#pragma once
// Turns a layout and an arrangement into plans of whole steps: visits with a known future. Deterministic: the same
// sequence of calls gives the same tasks.
//
// Speculative steps. With clipping, updates wait for the global norm: the arrangement defers them all. A speculative
// step runs them in the backward, as if the norm will not clip, and is undone if it clips. Three things make that
// possible; the checker proves them:
//  - The step commits the state with which it begins, after the deferred updates of the step before have run.
//  - Every update of the step follows that commit, or at least follows the task that reads for the commit what the
//    update changes. So when the norm is known, the newest durable generation is the state with which the step began,
//    in slots of its own: the store writes nothing into a slot that its newest durable generation refers to (store.h).
//  - To undo the step is to go back to that generation, as after a crash: the store's records become those of that
//    generation (Store::go_back()), then undo() reads what is resident from it. The device's copies of the weights are
//    then stale.
// So undoing needs no writes but the commit, and an undone step leaves no trace.
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "swap/fetcher.h"

namespace tierflow::swap {

// at_once: all updates of a step run in its backward, even those that the arrangement defers. That is a speculative
// step.
enum class Updates : std::uint8_t { as_arranged, at_once };

class Planner {
 public:
  // Both outlive the planner.
  Planner(const Layout& layout, const Arrangement& arrangement);

  // Layer-major forward and backward over all micro-batches.
  // pending: deferred updates of the step before have not run yet. They then run ahead of each unit's first forward.
  // commits: when those updates have run, the state after the step before becomes a durable generation, while the rest
  // of this step runs. No extent of that generation is overwritten before it is durable. With Updates::at_once,
  // `commits` must be true.
  // sparse: which sparse chunks the step uses. The updates that they have missed also run ahead of the forward, and
  // before the commit.
  Plan train_step(bool pending, bool commits = false, Updates updates = Updates::as_arranged, SparseChunks sparse = {});
  // After Store::go_back() for a speculative step: reads back what is resident.
  Plan undo();
  // Forward only, for one evaluation of `micro_batches` micro-batches. another: a further evaluation probably follows,
  // so what its first visits need is fetched while the last visits of this one compute. Any other plan may follow too.
  Plan evaluate(int micro_batches, bool another = false);
  // Without a step: runs the pending updates of the step before, if there are any, and the updates that sparse chunks
  // have missed.
  Plan flush(bool pending = true, SparseChunks sparse = {});
  // From now on plans are handed over in parts, and the functions above return only the rest. So the plan of a large
  // model need not be in memory as a whole.
  void stream_parts_to(TaskEmitter::TakePart take) { emitter_.stream_parts_to(std::move(take)); }
  // Call it between plans, when weights were written where they live: the device's copies of them are then stale.
  void forget_weights();

 private:
  // What a step saves and where it is: one piece for each item, in the order in which the backward takes them. A piece
  // waits in a buffer of the host, if it was on storage, and then in a slot of the device.
  struct Saved {
    std::vector<int> items;
    std::size_t next_read = 0, next_load = 0;
    int in_buffers = 0, in_slots = 0;  // read and not loaded; loaded and not computed with
    std::vector<HostRef> buffer_of;    // by item
    std::vector<std::uint64_t> slot_of;
  };

  // commits: at the beginning. The last `expected` visits belong to a later plan: their weights are fetched if there is
  // room, and are only cached when this plan ends.
  Plan run(std::vector<Visit> visits, int micro_batches, bool commits = false, int expected = 0);
  void compute(const Visit& visit, int micro_batch, Saved& saved);
  void save(int item, std::uint64_t slot);
  // The item that the computation makes or reads; -1: none.
  int item_of(const Computation& computation) const;
  void bring_back(Saved& saved);
  Task& move_saved(TaskKind kind, Lane lane, int item, HostRef words, Access from, Access to);
  std::uint64_t next_slot();
  void open_gradients(Visit& visit);
  void take_gradients(const Visit& visit);

  const Layout& layout_;
  const Arrangement& arrangement_;
  TaskEmitter emitter_;
  Fetcher fetcher_;
  GradientRing gradients_;
  std::vector<int> deferring_;              // units some of whose chunks are deferred
  Updates updates_ = Updates::as_arranged;  // of the step at hand
  std::vector<std::uint64_t> gradient_of_;  // by unit: its gradient's place in this step, kNowhere before the first use
  std::vector<std::uint64_t> held_;         // by unit: place of a tied unit's gradient
  std::map<Computation, int> items_;        // by who makes it and by who reads it
  int next_slot_ = 0;
};

}  // namespace tierflow::swap
