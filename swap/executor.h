#pragma once
// FRONT DOOR of swap. Runs plans around computation that happens elsewhere. The client calls enter() before it computes
// a stage for a micro-batch, and leave() afterwards. Every other task runs on its lane as soon as its dependencies and
// the order of its lane allow. The first error wins: everything in flight ends, nothing new starts, and every later
// call returns that error.
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

// A chunk that is updated in place on the device. All pointers are to device memory.
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

// The client's work on the update lane. It is called for one chunk at a time, on the lane's own thread. An exception
// from it ends the run with an error of kind internal (memory for std::bad_alloc).
class UpdateWork {
 public:
  virtual ~UpdateWork() = default;
  // gradient: chunk.elements bf16. Called once for each chunk and step if gradients are staged.
  virtual io::Error measure(const Chunk& chunk, std::span<const std::byte> gradient) = 0;
  // Where the chunk's gradient, which is computed now, consists of zeros: ranges in their order, none touching another.
  // They are not moved; measure() and update() find zeros there. Called by the download lane, on its own thread. Not
  // for gradients of several visits that add up (ArrangeRequest::sums): none are known there.
  virtual std::vector<ElementRange> zero_gradient(const Chunk& /*chunk*/) const { return {}; }
  // words: chunk.elements hi words, state: chunk.state_bytes; both are updated in place.
  virtual io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                           std::span<std::byte> state) = 0;
  // The updates that a sparse chunk has missed (TaskKind::catch_up), with gradients of zero. In place.
  virtual io::Error catch_up(const Chunk& chunk, std::span<std::byte> words, std::span<std::byte> state);
  // Does what update() does, on the device and its update stream, and returns when it is done. It measures what
  // update() would measure.
  virtual io::Error update_on_device(const Chunk& chunk, Device& device, const DeviceUpdate& at);
  // For a gradient that waits on the device for its update: rounds it there, from `sum` to `gradient`, on the update
  // stream, measures it, and returns when it is done. Neither words nor state are given.
  virtual io::Error keep_gradient(const Chunk& chunk, Device& device, const DeviceUpdate& at);
  // If gradients are measured on their way to the host: enqueues on `stream` what writes to `found`
  // (ArrangeRequest::measured_bytes of device memory) what measure() would find of the bf16 `gradient`. It is called on
  // another lane than measure().
  virtual void enqueue_measuring(const Chunk& chunk, Device& device, StreamId stream, const std::uint16_t* gradient,
                                 std::byte* found);
  // Gives what enqueue_measuring() wrote, once it is on the host, before measure() or update() of the chunk. These then
  // need not read the gradient to measure it. It is called on another thread than they are.
  virtual io::Error take_measured(const Chunk& chunk, std::span<const std::byte> found);
  // Adds bf16 `incoming` to the fp32 sum whose high and low words are given. If `first`, the sum so far is in `high` as
  // bf16, and `low` holds nothing yet. It is called instead of measure(), so it also measures the result.
  virtual io::Error accumulate(const Chunk& chunk, std::span<const std::byte> incoming, std::span<std::byte> high,
                               std::span<std::byte> low, bool first);
  // The `progress` of the generation that a commit task makes durable: see Store::commit().
  virtual std::string progress() const { return {}; }
  // Turns a sum into the bf16 gradient that update() takes, in place in `high`.
  virtual io::Error round_sum(const Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low);
};

struct Entered {
  const Visit* visit = nullptr;  // valid until leave()
  std::byte* arena = nullptr;    // base of the visit's offsets
  const Item* item = nullptr;    // the item that the computation makes or reads; null if it does neither
  // Device slot of the item; null if nothing leaves the device for it. A computation that makes the item copies it to
  // the slot, in the order that Item says. A computation that reads the item finds it there.
  std::byte* slot = nullptr;
  Activations activations = Activations::recompute;
};

// busy_seconds of copies, of computation and of updates on the device are by the device's clock, without the time that
// they waited. Computation and copies count once the device has done them; what the host and the drives do counts while
// they do it.
// left_out: bytes of gradients that were not moved, because they are zeros (UpdateWork::zero_gradient()).
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
  // `store` is null if everything is resident. All arguments outlive the executor. Allocates the device arena and the
  // host slab. The store keeps the slab alive as long as its volume knows it.
  static io::Result<std::unique_ptr<Executor>> create(Device& device, Store* store, const Layout& layout,
                                                      const Arrangement& arrangement,
                                                      const ExecutorOptions& options = {});
  ~Executor();  // drains

  // Continues the run with a plan; `work` serves its update lane. Never blocks.
  void append(Plan plan, std::shared_ptr<UpdateWork> work);

  // enter(), leave() and need() are for one client thread. enter() waits until the next compute task of the plan may
  // start; this task must be the one that the arguments name.
  io::Result<Entered> enter(int stage, Pass pass, int micro_batch);
  io::Error leave();
  // Inside of a visit: continues the run with the plan of a further part, as append() does, and waits until that part
  // may start. What enter() returned is then no longer valid. leave() ends the visit.
  io::Result<Entered> need(Plan plan, std::shared_ptr<UpdateWork> work);

  // Waits until every gradient that was planned so far is measured or applied, and the device has computed what was
  // entered.
  io::Error finish_updates();
  // Waits until everything planned so far is done. Compute tasks that were never entered count as an error of the
  // client.
  io::Error drain();

  // Between plans: hands `use` the bytes of an extent, wherever it lives. With `writes`, stores what `use` left in
  // them; their former content is then not read. For loading and exporting a model, and for looking at it.
  io::Error access(ExtentKind kind, int chunk, bool writes, const std::function<void(std::span<std::byte>)>& use);
  // Between plans: writes the resident extents that differ from the store, so that a commit of the store covers them. A
  // commit task of a plan does the same for trainable chunks.
  io::Error write_back();
  // Between plans: the client says that every resident extent equals the store's, so that write_back() need not write
  // it.
  void matches_store();
  std::array<LaneCounters, kLanes> counters() const;
  // The tasks that ended since the last call, if options.record is set. Times are in seconds since the executor was
  // made; times of what the device did are by its clock. This call waits for the computation that was entered so far.
  std::vector<TaskRecord> take_records();
  double now() const;  // seconds since the executor was made
  // Why part of the host memory is not pinned; empty if all of it is.
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
