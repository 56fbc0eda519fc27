#pragma once
// The plan as data: a list of tasks whose order is a correct sequential program. Each task says which bytes of which
// tier it reads and writes; dependencies are derived from those hazards alone. Executor and simulator play the same
// list.
#include <cstdint>
#include <vector>

#include "io/error.h"
#include "swap/layout.h"

namespace tierflow::swap {

enum class Lane : std::uint8_t { disk_read, disk_write, upload, download, compute, update };
inline constexpr int kLanes = 6;
const char* lane_name(Lane lane);

enum class TaskKind : std::uint8_t {
  read_hi,
  read_state,
  read_gradient,  // storage -> host buffer
  write_hi,
  write_state,
  write_gradient,  // host buffer -> storage
  upload_hi,       // host -> device weights
  download_hi,
  download_gradient,  // device -> host; the gradient becomes bf16 on the way
  save_activations,
  load_activations,  // device slot -> host, host -> device slot
  read_activations,
  write_activations,  // storage -> host buffer, host buffer -> storage
  compute,            // external: between enter() and leave()
  measure,            // squares and finiteness of a staged gradient
  update,             // optimizer, in place on host bytes
  // Sums of several visits' gradients, kept in fp32 as high and low words (VisitPlanner alone).
  read_gradient_low,
  write_gradient_low,
  accumulate,  // adds a downloaded gradient to the sum
  // Updates on the device, in an update slot of it.
  upload_state,
  upload_gradient,   // a deferred one
  update_on_device,  // in place on the unit's words on the device and the state in the slot
  download_state,
};
const char* task_name(TaskKind kind);

// What becomes of what a stage's forward computes for one micro-batch, beside the carries: computed again in the
// backward; kept on the device, by whoever computes; or swapped, through a slot, to the host and perhaps to storage.
enum class Activations : std::uint8_t { recompute, keep, swap };

// head: forward and backward of the last stage in one visit.
enum class Pass : std::uint8_t { forward, head, backward, evaluate };
const char* pass_name(Pass pass);

// Extents: what is stored, a chunk each.
// gradient: bf16, or the high words of an fp32 sum whose low words are gradient_low.
// activations: what a stage saved of a micro-batch, an extent for each.
enum class ExtentKind : std::uint8_t { hi, state, gradient, gradient_low, activations };
inline constexpr int kExtentKinds = 5;

// Host bytes of a task: a streaming buffer, an extent that is resident in RAM, or what a stage saved of a micro-batch.
struct HostRef {
  enum class Where : std::uint8_t {
    none,
    word_buffer,
    state_buffer,
    resident_hi,
    resident_state,
    resident_gradient,
    resident_gradient_low,
    activation_buffer,
    activations
  };
  Where where = Where::none;
  int index = -1;  // of the buffer; the chunk; stage * micro_batches + micro-batch
};

struct HostBuffer {
  HostRef place;
  std::uint64_t bytes = 0;
};

// A range that a task reads or writes. Ranges of different spaces never meet.
enum class Space : std::uint8_t {
  device,
  word_buffer,
  state_buffer,
  resident_hi,
  resident_state,
  resident_gradient,
  resident_gradient_low,
  activation_buffer,
  activations,
  stored_hi,
  stored_state,
  stored_gradient,
  stored_gradient_low,
  stored_activations
};
inline constexpr int kSpaces = 14;
struct Access {
  Space space = Space::device;
  std::uint64_t begin = 0, end = 0;
  bool writes = false;
};

using TaskId = std::uint64_t;  // counts on over all plans of a run
inline constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

struct Task {
  TaskKind kind = TaskKind::compute;
  Lane lane = Lane::compute;
  Pass pass = Pass::forward;  // of the visit that the task serves
  int stage = -1, micro_batch = -1;
  int chunk = -1;
  int visit = -1;                  // index into Plan::visits of the compute task
  HostRef words, gradient, state;  // hi words or what a stage saved; gradient; optimizer state
  HostRef gradient_low;            // of a sum; none where the gradient is bf16
  HostRef incoming;                // accumulate: the gradient to add
  bool first_sum = false;          // accumulate: the sum so far is bf16, its low words are zero and not read
  Activations activations = Activations::recompute;  // of a compute task, forward and backward
  std::uint64_t device_offset = 0;  // in the device arena: source or target; update_on_device: the hi words
  std::uint64_t sum = kNowhere;     // update_on_device: offset of the fp32 gradient; kNowhere: it is in the slot
  std::uint64_t slot = kNowhere;    // update_on_device: offset of the slot
  bool updated = false;             // downloads: what an update on the device left, to be stamped before it is written
  std::uint64_t bytes = 0;          // moved; elements * 2 for updates and measure
  std::vector<Access> accesses;
  std::vector<TaskId> dependencies;  // each smaller than the task's own id
};

// One stage visited in one pass: where its weights and gradients lie in the device arena, unit by unit.
struct Visit {
  int stage = 0;
  Pass pass = Pass::forward;
  std::vector<std::uint64_t> weights;    // offset of each unit's hi words; kNowhere where the pass does not need them
  std::vector<std::uint64_t> gradients;  // offset of each unit's fp32 gradient; kNowhere in passes without
  std::vector<bool> fresh_gradient;      // the gradient region holds nothing yet: zero it before the first addition
};

struct Plan {
  TaskId first_id = 0;
  std::vector<Task> tasks;
  std::vector<Visit> visits;
};

// Memory of the device in which a chunk is updated: its bf16 gradient at the beginning, its state, and the client's
// scratch.
struct UpdateSlots {
  int count = 0;
  std::uint64_t state = 0, scratch = 0, bytes = 0;  // offsets within a slot, and its size
};

// Where everything lives and how many buffers there are: what budgets decide. None of it changes a result.
struct Arrangement {
  std::vector<bool> hi_resident, state_resident, gradient_resident;  // by chunk
  std::vector<bool> gradient_low_resident;                           // by chunk; empty where no sums are kept
  bool staged = true;  // gradients are kept until the global norm is known: all of them are deferred
  // By chunk: its gradient is kept on the host, and its update runs ahead of its unit's next forward instead of in the
  // backward. Of trainable chunks alone.
  std::vector<bool> deferred;
  int micro_batches = 1;
  int word_buffers = 0, state_buffers = 0;
  std::uint64_t weight_ring = 0, gradient_ring = 0, held_gradients = 0;  // bytes of the device arena, in this order
  // What the backward wants of the forward. An item is stage * micro_batches + micro-batch; what leaves the device of
  // it is saved in one piece: first the stage's input, where that leaves, then the activations, where they are swapped.
  std::vector<bool> input_leaves;            // by stage, for every micro-batch
  std::vector<Activations> activations;      // by item
  std::vector<bool> saved_on_storage;        // by item: goes on to storage
  std::vector<std::uint64_t> swapped_bytes;  // by stage: of one micro-batch's activations, swapped
  int slots = 0;                             // of the device, through which all that passes
  std::uint64_t slot_bytes = 0;
  int activation_buffers = 0;  // of the host, through which it passes to storage, as large as a slot

  std::vector<bool> on_device;  // by chunk: it is updated on the device
  UpdateSlots update_slots;     // at the end of the arena

  std::uint64_t device_bytes() const {
    return update_slots.count == 0
               ? slot_offset(slots)
               : update_slots_begin() + static_cast<std::uint64_t>(update_slots.count) * update_slots.bytes;
  }
  std::uint64_t update_slots_begin() const { return round_up(slot_offset(slots), kSector); }
  std::uint64_t slot_offset(int slot) const { return weight_ring + gradient_ring + held_gradients + slot * slot_bytes; }
  int items() const { return static_cast<int>(activations.size()); }
  // Of what is saved of an item, 0 where nothing leaves the device.
  std::uint64_t saved_bytes(const Layout& layout, int item) const;
  std::uint64_t buffer_bytes(const Layout& layout) const;
  std::uint64_t resident_bytes(const Layout& layout) const;
  std::uint64_t saved_on_host(const Layout& layout) const;
  // By item, as StoreOptions::activation_bytes.
  std::vector<std::uint64_t> stored_activations(const Layout& layout) const;
  std::uint64_t host_bytes(const Layout& layout) const {
    return buffer_bytes(layout) + resident_bytes(layout) + saved_on_host(layout);
  }
  // All host memory that a run takes, buffer by buffer in the order in which it lies there: host_bytes() in sum. Sizes
  // are multiples of kSector. Streaming buffers come first, each kind in the order of their indices.
  std::vector<HostBuffer> host_buffers(const Layout& layout) const;
};

struct ArrangeRequest {
  std::uint64_t host_budget = 0;
  std::uint64_t device_budget = 0;
  std::uint64_t workspace = 0;  // of the device budget: what computing a stage takes besides weights and gradients
  // By stage: bytes of one micro-batch's activations where the stage can keep them, 0 where it cannot. Empty: none can.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: bytes of what is swapped of them, 0 where they cannot be. Empty: none can.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t swap_workspace = 0;  // what computing a stage takes more where its activations are swapped
  // How many items swap their activations to the host and to storage, of those that do not keep them. The last ones
  // stay on the device, those before them go to the host, those before to storage: as many as there are and fit.
  int swap_to_host = 0, swap_to_storage = 0;
  int micro_batches = 1;
  bool staged = true;
  // Of the updates, where nothing is staged: which share is deferred, evenly in all units. Less where everything has to
  // be resident and the gradients would not fit.
  double deferred_share = 0;
  // Of the units: whose updates run on the device where it has room. An update at once needs weights on the device in
  // the backward, so that of an embedding is not concerned.
  double device_update_share = 0;
  std::uint64_t update_scratch = 0;  // bytes that the client needs in each update slot
  bool storage = true;               // false: everything must be resident
  bool train = true;                 // false: forward only
  bool sums = false;                 // for VisitPlanner: gradients of several visits add up on the host
};
// An arrangement within the budgets, or an error of kind usage that names the smallest budget that works.
io::Result<Arrangement> arrange(const Layout& layout, const ArrangeRequest& request);

}  // namespace tierflow::swap
