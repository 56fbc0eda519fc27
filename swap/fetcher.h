#pragma once
// Brings the weights of visits to the device. An update that a unit owes runs on the way: whoever computes with a unit
// computes with what its update left.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "swap/device_rings.h"
#include "swap/task_emitter.h"

namespace tierflow::swap {

inline constexpr int kLookahead = 4;  // visits fetched ahead, where the weight ring has room

// Of the sparse chunks (GroupShape), which a plan moves and updates; each list is by chunk and counts for sparse ones
// alone. Empty lists: the plan uses every chunk, and each has had every update.
struct StepRows {
  std::vector<bool> used;     // by the computation: they come to the device, and have a gradient in a step
  std::vector<bool> missed;   // they have missed updates, which run on the way, used or not
  std::vector<bool> waiting;  // their update is among those that the step before deferred

  bool uses(const Chunk& chunk) const { return !chunk.sparse || used.empty() || used[chunk.id]; }
  bool catches_up(const Chunk& chunk) const { return chunk.sparse && !missed.empty() && missed[chunk.id]; }
  bool owes(const Chunk& chunk) const { return !chunk.sparse || waiting.empty() || waiting[chunk.id]; }
  bool any_missed() const { return std::ranges::find(missed, true) != missed.end(); }
};

// What the update of a unit that owes one applies. Of its chunks, the deferred ones owe it.
enum class Owed : std::uint8_t { nothing, gradient, sum };

class Fetcher {
 public:
  // All outlive the fetcher.
  Fetcher(const Layout& layout, const Arrangement& arrangement, TaskEmitter& emitter);
  Fetcher(const Fetcher&) = delete;

  // Emits what brings the weights of the visit's stage to the device, says in the visit where they will be, and holds
  // them there. Where units are needed, it brings those instead, beside the stage's own. False, and nothing emitted,
  // where the ring has no room yet. A forced fetch of what fits always succeeds: it gives up what is cached, held or
  // not.
  bool fetch(Visit& visit, bool forced);
  // The end of so many holds on the weights of units, which from then on are merely cached.
  void release(const std::vector<int>& units, int holds = 1);
  // Copies of the unit on the device are stale.
  void invalidate(int unit) { ring_of(unit).invalidate(unit); }
  std::uint64_t bytes_of(const std::vector<int>& units) const;

  // From here on plans are of these rows. What the device has of the sparse units is given up, unless all of them was
  // used and is.
  void take_rows(StepRows rows);
  const StepRows& rows() const { return rows_; }
  void owe(int unit, Owed update) { owed_[unit] = update; }
  bool owes(int unit) const { return owed_[unit] != Owed::nothing; }
  // The update that the unit owes, now; that of state which stays on the device there, where the words come to.
  void apply_owed(int unit);
  // The updates that sparse chunks missed, now.
  void catch_up();

 private:
  // Whether an update that the unit owes leaves the words on the device those that it makes.
  bool updates_in_place(int unit) const;
  bool updates_there(int unit) const;
  WeightRing& ring_of(int unit) { return layout_.on_demand(unit) ? needed_ring_ : ring_; }

  const Layout& layout_;
  const Arrangement& arrangement_;
  TaskEmitter& emitter_;
  WeightRing ring_, needed_ring_;
  StepRows rows_;
  std::vector<Owed> owed_;             // by unit
  std::vector<std::uint64_t> places_;  // by unit, where the ring has room for all but those on demand; else empty
};

}  // namespace tierflow::swap
