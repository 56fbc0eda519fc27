#pragma once
// Turns a layout and an arrangement into plans of whole steps: visits with a known future. Deterministic: the same
// sequence of calls gives the same tasks.
//
// Speculation. Where the global norm clips, updates wait for it: the arrangement defers them all. A speculative step
// runs them in the backward all the same, as if the norm will not clip, and is undone where it does. What makes that
// possible, and the checker proves:
//  - The step commits what it begins with: its begin state, with the deferred updates of the step before.
//  - Every update of the step follows that commit, or at least the reading of what it changes for it. So when the step
//    is decided, the newest durable generation is the begin state, in slots of its own: the store writes nothing into
//    a slot that its newest durable generation refers to (store.h).
//  - To undo is to go back to that generation, as a crash would: the store's records become those of it
//    (Store::go_back()), then undo() reads what is resident from there. What the device has of the weights is stale.
// So no byte is written for the sake of undoing but for the commit, and an undone step leaves no trace.
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "swap/fetcher.h"

namespace tierflow::swap {

// at_once: all updates of a step run in its backward, also those that the arrangement defers: a speculative step.
enum class Updates : std::uint8_t { as_arranged, at_once };

class Planner {
 public:
  // Both outlive the planner.
  Planner(const Layout& layout, const Arrangement& arrangement);

  // Layer-major forward and backward over all micro-batches. `pending`: deferred updates of the step before have not
  // run yet. They then run ahead of each unit's first forward. `commits`: when they have run, what the step before left
  // becomes a durable generation, beside the rest of this step; no extent of it is overwritten before it is durable.
  // Updates::at_once: it commits.
  // rows: which sparse chunks the step uses. What they have missed runs ahead of the forward too, and what is committed
  // has it.
  Plan train_step(bool pending, bool commits = false, Updates updates = Updates::as_arranged, StepRows rows = {});
  // After a speculative step, whose records the store has undone: brings back what is resident.
  Plan undo();
  // Forward only, for one evaluation of `micro_batches` micro-batches. `another`: one more is expected to follow, and
  // what its first visits need is fetched while the last ones compute. Any plan may follow all the same.
  Plan evaluate(int micro_batches, bool another = false);
  // The pending updates of the step before, if there are, and what sparse chunks have missed, without a step.
  Plan flush(bool pending = true, StepRows rows = {});
  // From now on a plan is handed over in parts, and what is returned is the rest: the plan of a large model need not be
  // in memory as a whole.
  void hand_over_to(TaskEmitter::TakePart take) { emitter_.hand_over_to(std::move(take)); }
  // Between plans: words were written where they live, so that what the device has of them is stale.
  void forget_weights();

 private:
  // What a step saves of its micro-batches and where it is: one piece for each item, in the order in which the backward
  // takes them. Each waits in a buffer of the host, if it was on storage, and then in a slot of the device.
  struct Saved {
    std::vector<int> items;
    std::size_t next_read = 0, next_load = 0;
    int in_buffers = 0, in_slots = 0;  // read and not loaded; loaded and not computed with
    std::vector<HostRef> buffer_of;    // by item
    std::vector<std::uint64_t> slot_of;
  };

  // commits: at the head. The last `expected` visits belong to a later plan: they are fetched where there is room, and
  // merely cached when this plan ends.
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
