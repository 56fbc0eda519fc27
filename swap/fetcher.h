#pragma once
// Brings the weights of visits to the device. An update that a unit owes runs first, so every computation uses updated
// weights.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "swap/device_rings.h"
#include "swap/task_emitter.h"
#include "swap/unit_use.h"

namespace tierflow::swap {

inline constexpr int kLookahead = 4;  // visits fetched ahead, if the weight ring has room

// Which sparse chunks (GroupShape) a plan moves and updates. Each list is by chunk, and only its entries for sparse
// chunks count. Empty lists: the plan uses every chunk, and each has had every update.
struct SparseChunks {
  std::vector<bool> used;     // the computation uses it: it comes to the device, and has a gradient in a step
  std::vector<bool> missed;   // it has missed updates, which this plan replays, whether it is used or not
  std::vector<bool> waiting;  // its update is among those that the step before deferred

  bool uses(const Chunk& chunk) const { return !chunk.sparse || used.empty() || used[chunk.id]; }
  bool catches_up(const Chunk& chunk) const { return chunk.sparse && !missed.empty() && missed[chunk.id]; }
  bool owes(const Chunk& chunk) const { return !chunk.sparse || waiting.empty() || waiting[chunk.id]; }
  bool any_missed() const { return std::ranges::find(missed, true) != missed.end(); }
};

// Whether a unit owes an update, and what the update applies: a bf16 gradient, or an fp32 sum. Only the deferred chunks
// of the unit owe it.
enum class Owed : std::uint8_t { nothing, gradient, sum };

class Fetcher {
 public:
  // All outlive the fetcher.
  Fetcher(const Layout& layout, const Arrangement& arrangement, TaskEmitter& emitter);
  Fetcher(const Fetcher&) = delete;

  // Emits the tasks that bring the weights of the visit's stage to the device, writes into the visit where they will
  // be, and holds them there. If the visit names needed units, it brings these instead, beside the stage's own. Returns
  // false and emits nothing if the ring has no room yet. A forced fetch always succeeds if the weights fit at all: it
  // gives up cached weights, held or not.
  bool fetch(Visit& visit, bool forced);
  // Ends this many holds on the weights of units. Without holds, weights are only cached.
  void release(const std::vector<int>& units, int holds = 1);
  // The copies of the unit on the device and in a slot in RAM are stale.
  void invalidate(int unit) {
    ring_of(unit).invalidate(unit);
    cache_.drop(unit);
  }
  // A visit of the stage needs these of its units on demand. What is used more stays longer on the device and in RAM.
  void count_use(int stage, const std::vector<int>& needed) { use_.count(stage, needed); }
  // Holds those of these units on demand that are on the device.
  void hold(const std::vector<int>& units) {
    for (const int unit : units) needed_ring_.hold(unit);
  }
  std::uint64_t bytes_of(const std::vector<int>& units) const;

  // From here on plans use these sparse chunks. The device's copies of sparse units are given up, unless all of their
  // chunks were used before and all are used now.
  void set_sparse(SparseChunks sparse);
  const SparseChunks& sparse() const { return sparse_; }
  void owe(int unit, Owed update) { owed_[unit] = update; }
  bool owes(int unit) const { return owed_[unit] != Owed::nothing; }
  // Emits the update that the unit owes. If the unit's state stays on the device, the update runs there, and the words
  // are brought to it.
  void apply_owed(int unit);
  // Emits the updates that sparse chunks have missed.
  void catch_up();

 private:
  // Whether the update that the unit owes changes its words on the device too, so that they stay valid there.
  bool updates_in_place(int unit) const;
  bool updates_there(int unit) const;
  // The slot in RAM of a unit that comes to the device. Without words: they are read into it. -1: the unit has none.
  struct Slot {
    int index = -1;
    bool has_words = false;
  };
  Slot slot_of(int unit);
  // The words of a chunk whose unit comes to the device.
  HostRef bring(const Chunk& chunk, Slot slot);
  std::uint64_t allocate_needed(std::uint64_t bytes);
  std::uint64_t worth_in_ram(int unit) const;
  WeightRing& ring_of(int unit) { return layout_.on_demand(unit) ? needed_ring_ : ring_; }

  const Layout& layout_;
  const Arrangement& arrangement_;
  TaskEmitter& emitter_;
  WeightRing ring_, needed_ring_;
  UnitUse use_;
  UnitCache cache_;
  std::uint64_t leaving_ = 0;  // about the use of the most used units that leave the device
  SparseChunks sparse_;
  std::vector<Owed> owed_;  // by unit
};

}  // namespace tierflow::swap
