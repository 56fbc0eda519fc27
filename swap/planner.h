#pragma once
// Turns a layout and an arrangement into plans. Deterministic: the same sequence of calls gives the same tasks.
#include <cstdint>
#include <vector>

#include "swap/arrangement.h"
#include "swap/hazards.h"
#include "swap/layout.h"

namespace tierflow::swap {

class Planner {
 public:
  virtual ~Planner() = default;
  Planner(const Layout& layout, const Arrangement& arrangement);

  // Layer-major forward and backward over all micro-batches. `pending`: deferred updates of the step before have not
  // run yet. They then run ahead of each unit's first forward.
  Plan train_step(bool pending);
  // Forward only, for one evaluation of `micro_batches` micro-batches.
  Plan evaluate(int micro_batches);
  // The pending updates of the step before, without a step.
  Plan flush();

 protected:                             // VisitPlanner builds on it
  static constexpr int kLookahead = 4;  // visits fetched ahead, where the weight ring has room

  // A unit's weights on the device.
  struct Region {
    int unit = -1;
    std::uint64_t begin = 0, end = 0;
    int busy = 0;  // visits that are fetched and not yet computed
  };

  Task& emit(TaskKind kind, Lane lane, std::vector<Access> accesses);
  void run_visits(int micro_batches);
  // Emits the tasks that bring a visit's weights to the device. Returns false where the ring has no room yet; a forced
  // fetch always succeeds.
  bool fetch(int visit, bool forced);
  std::uint64_t allocate_weights(std::uint64_t bytes);
  Region* find_region(int unit);
  void invalidate(int unit);
  // planner_visits.cpp
  struct Saved;
  void compute(int visit, int micro_batch, std::uint64_t slot);
  void save(int item, std::uint64_t slot);
  void bring_back(Saved& saved);
  Task& move_saved(TaskKind kind, Lane lane, int item, HostRef words, Access from, Access to);
  std::uint64_t next_slot();

  std::uint64_t gradient_region(int unit, std::vector<bool>& fresh, std::size_t position);
  void take_gradients(const Visit& visit);
  HostRef download_gradient(const Chunk& chunk, std::uint64_t from);
  void download_gradient(const Chunk& chunk, std::uint64_t from, HostRef to);
  void stage_gradient(const Chunk& chunk, std::uint64_t from);
  // Updates a chunk whose words are on the device at `words_at`; `sum` as in Task. `home` is where the words go
  // afterwards; none: a buffer is taken for them.
  void update_on_device(const Chunk& chunk, std::uint64_t words_at, std::uint64_t sum, HostRef home);
  HostRef read_gradient(const Chunk& chunk);
  void write_updated(const Chunk& chunk, HostRef words, HostRef state);
  void update_now(const Chunk& chunk, std::uint64_t gradient_from, std::uint64_t words_from);
  virtual HostRef update_pending(const Chunk& chunk);
  HostRef read_words(const Chunk& chunk);
  HostRef read_state(const Chunk& chunk);
  // low: of a gradient that is a sum.
  void emit_update(const Chunk& chunk, HostRef words, HostRef gradient, HostRef state, HostRef low = {});
  // Moves a chunk's extent between storage and the host; not for activations. follows_readers: the write also waits for
  // tasks that read `from`.
  HostRef read_extent(ExtentKind kind, int chunk, HostRef to);
  void write_extent(ExtentKind kind, int chunk, HostRef from, bool follows_readers = false);
  void fill_in(Task& task, ExtentKind kind, int chunk, HostRef place) const;
  HostRef take_word_buffer();
  HostRef take_state_buffer();
  HostRef take_activation_buffer();

  const Layout& layout_;
  const Arrangement& arrangement_;
  HazardTracker hazards_;
  TaskId next_id_ = 0;
  Plan plan_;
  Pass pass_ = Pass::forward;  // of the visit being fetched or run
  int stage_ = -1;
  bool pending_ = false;
  std::vector<bool> updated_;  // by unit: it owes no deferred update any more in this step
  std::vector<bool> defers_;   // by unit: some of its chunks are deferred
  std::vector<Region> regions_;
  std::uint64_t ring_position_ = 0, gradient_position_ = 0;
  std::vector<std::uint64_t>
      gradient_of_;  // by unit: offset of its gradient in this step, kNowhere before the first use
  std::vector<std::uint64_t> held_offset_;  // by unit: place of a tied unit's gradient
  std::vector<TaskId> word_last_use_, state_last_use_, activation_last_use_;
  TaskId use_counter_ = 0;
  int next_slot_ = 0, next_update_slot_ = 0;
};

}  // namespace tierflow::swap
