#pragma once
// FRONT DOOR of swap. Plays plans on lanes around computation that happens elsewhere: the client calls enter() before
// it computes a stage for a micro-batch and leave() after; every other task runs on its own lane as soon as its
// dependencies and the order of its lane allow. The first error wins: everything in flight drains, nothing new starts,
// and every later call returns that error.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"
#include "swap/device.h"
#include "swap/layout.h"
#include "swap/store.h"
#include "swap/timeline.h"

namespace tierflow::swap {

// A chunk in an update slot of the device, all of it device memory. Updated in place.
struct DeviceUpdate {
  const float* sum = nullptr;         // the fp32 gradient; null: `gradient` holds it as bf16 already
  std::uint16_t* gradient = nullptr;  // room for it as bf16
  std::uint16_t* words = nullptr;
  std::byte* state = nullptr;
  std::byte* scratch = nullptr;  // ArrangeRequest::update_scratch bytes
};

// Elements [begin, end) of a chunk.
struct ElementRange {
  std::uint64_t begin = 0, end = 0;
};

// What the update lane calls, one chunk at a time, on the lane's own thread. What it throws ends the run, as an error
// of kind internal (memory, where that ran out).
class HostWork {
 public:
  virtual ~HostWork() = default;
  // gradient: chunk.elements bf16. Called once a chunk and step where gradients are staged.
  virtual io::Error measure(const Chunk& chunk, std::span<const std::byte> gradient) = 0;
  // Where the chunk's gradient, which is computed now, consists of zeros: ranges in their order, none touching another.
  // They are not moved; measure() and update() find zeros there. Called by the download lane, on its own thread.
  virtual std::vector<ElementRange> zero_gradient(const Chunk& /*chunk*/) const { return {}; }
  // words: chunk.elements hi words, state: chunk.state_bytes; both are updated in place.
  virtual io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                           std::span<std::byte> state) = 0;
  // The updates that the chunk, a sparse one, has missed (TaskKind::catch_up), with gradients of zero. In place.
  virtual io::Error catch_up(const Chunk& chunk, std::span<std::byte> words, std::span<std::byte> state);
  // The same as update() on the device, on its update stream; returns when it is done. Measures what update() would
  // measure.
  virtual io::Error update_on_device(const Chunk& chunk, Device& device, const DeviceUpdate& at);
  // Adds bf16 `incoming` to the fp32 sum whose high and low words are given; if `first`, the sum so far is in `high` as
  // bf16 and `low` holds nothing yet. Called instead of measure(): it also measures the result.
  virtual io::Error accumulate(const Chunk& chunk, std::span<const std::byte> incoming, std::span<std::byte> high,
                               std::span<std::byte> low, bool first);
  // What goes with the generation that a commit task makes durable: see Store::commit().
  virtual std::string progress() const { return {}; }
  // Turns a sum into the bf16 gradient that update() takes, in place in `high`.
  virtual io::Error round_sum(const Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low);
};

struct Entered {
  const Visit* visit = nullptr;  // valid until leave()
  std::byte* arena = nullptr;    // base of the visit's offsets
  const Item* item = nullptr;    // what the computation makes or reads; null where it does neither
  // Device slot; null where nothing of the item leaves the device. Who makes the item copies it here, in the order that
  // Item says. Who reads it takes it from here.
  std::byte* slot = nullptr;
  Activations activations = Activations::recompute;
};

// busy_seconds of copies, of computation and of updates on the device are by the device's clock, without what they
// waited for. Computation is counted there once the device has done it.
// left_out: bytes of gradients that were not moved, because they are zeros (HostWork::zero_gradient()).
struct LaneCounters {
  std::uint64_t tasks = 0, bytes = 0, left_out = 0;
  double busy_seconds = 0;
};

struct ExecutorOptions {
  std::uint64_t chaos_seed = 0;  // non-zero: buffers are filled with NaN before each read, and lanes pause at random
  bool record = false;           // keep a TaskRecord for each task
};

class Executor {
 public:
  // `store` is null where everything is resident. All outlive the executor. Allocates the device arena and the host
  // slab, which the store keeps for as long as its volume knows it.
  static io::Result<std::unique_ptr<Executor>> create(Device& device, Store* store, const Layout& layout,
                                                      const Arrangement& arrangement,
                                                      const ExecutorOptions& options = {});
  ~Executor();  // drains

  // Continues the run with a plan; `work` serves its update lane. Never blocks.
  void append(Plan plan, std::shared_ptr<HostWork> work);

  // One client thread. Waits until the next compute task of the plan, which must be the one named, may start.
  io::Result<Entered> enter(int stage, Pass pass, int micro_batch);
  io::Error leave();
  // Inside of a visit: continues the run with the plan of a further part, as append(), and waits until it may start.
  // What enter() returned is valid no more; leave() then ends the visit.
  io::Result<Entered> need(Plan plan, std::shared_ptr<HostWork> work);

  // Waits until every gradient that was planned so far is measured or applied, and the device has computed what was
  // entered.
  io::Error finish_updates();
  // Waits until everything planned so far is done. Compute tasks that were never entered count as an error of the
  // client.
  io::Error drain();

  // Between plans: hands `use` the bytes of an extent, wherever it lives; writes == true stores what `use` left in them
  // (their former content is not read). For loading a model, exporting and looking.
  io::Error access(ExtentKind kind, int chunk, bool writes, const std::function<void(std::span<std::byte>)>& use);
  // Between plans: writes what is resident and not as the store has it, so that a commit there covers it. A commit task
  // of a plan does the same for what is trainable.
  io::Error write_back();
  // Between plans: what is resident is what the store has, so that write_back() need not write it.
  void matches_store();
  std::array<LaneCounters, kLanes> counters() const;
  // The tasks that ended since the last call, if options.record is set. Times are in seconds since the executor was
  // made; those of what the device did are by its clock. This call waits for what was entered so far.
  std::vector<TaskRecord> take_records();
  double now() const;  // on that clock
  // Why part of the host memory is not pinned; empty where all of it is.
  std::string pin_note() const;
  // A client stops the run with this: every later call returns the error.
  void fail(io::Error error);
  bool failed() const;

 private:
  struct Impl;
  explicit Executor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow::swap
