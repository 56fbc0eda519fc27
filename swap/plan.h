#pragma once
// A plan is a list of tasks whose order is a correct sequential program. Each task says which bytes of which tier it
// reads and writes; its dependencies follow from these accesses alone. Executor and simulator run the same list.
#include <compare>
#include <cstdint>
#include <vector>

namespace tierflow::swap {

enum class Lane : std::uint8_t { disk_read, disk_write, upload, download, compute, update, commit };
inline constexpr int kLanes = 7;
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
  commit,         // what is stored of every trainable chunk becomes a durable generation
  catch_up,       // on host bytes: the updates that a sparse chunk missed, whose gradients were zero
  keep_gradient,  // rounds and measures a gradient that waits on the device for its update
};
const char* task_name(TaskKind kind);

// What happens to an item's activations. recompute: the backward computes them again. keep: whoever computes keeps them
// on the device. swap: they go through a slot to the host, and perhaps on to storage.
enum class Activations : std::uint8_t { recompute, keep, swap };

// head: forward and backward of the last stage in one visit.
enum class Pass : std::uint8_t { forward, head, backward, evaluate };
const char* pass_name(Pass pass);

// What a stage computes in one pass for one micro-batch, or for those that it takes together (StageShape::together).
struct Computation {
  int stage = -1;
  Pass pass = Pass::forward;
  int micro_batch = -1;

  auto operator<=>(const Computation&) const = default;
};

// Host bytes of a task: a streaming buffer, an extent that is resident in RAM, or what is saved for an item.
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
    activations,
    cached,          // a chunk of a unit on demand, for as long as the unit has the slot
    measured_buffer  // what measuring a gradient on its way to the host found; no task names it
  };
  Where where = Where::none;
  int index = -1;  // of the buffer; the chunk; the item; of the part of a slot (Arrangement::cached_place)
};

inline constexpr int kHostPlaces = 11;

// A range that a task reads or writes. Ranges of different spaces never meet. Each kind of place on the host is a space
// with its number (HostRef::Where); these are the others.
enum class Space : std::uint8_t {
  device = kHostPlaces,
  stored_hi,
  stored_state,
  stored_gradient,
  stored_gradient_low,
  stored_activations
};
inline constexpr int kSpaces = kHostPlaces + 6;
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
  int item = -1;                   // whose bytes it moves; of a compute task: which it makes or reads
  int visit = -1;                  // index into Plan::visits of the compute task
  HostRef words, gradient, state;  // hi words or what a stage saved; gradient; optimizer state
  HostRef gradient_low;            // of a sum; none where the gradient is bf16
  HostRef incoming;                // accumulate: the gradient to add
  bool first_sum = false;          // accumulate: the sum so far is bf16, its low words are zero and not read
  Activations activations = Activations::recompute;  // of a compute task, forward and backward
  std::uint64_t device_offset = 0;         // in the device arena: source or target; update_on_device: the hi words
  std::uint64_t sum = kNowhere;            // of both: offset of the fp32 gradient; kNowhere: it is bf16 already
  std::uint64_t slot = kNowhere;           // update_on_device, keep_gradient: offset of the slot
  std::uint64_t held_state = kNowhere;     // update_on_device: offset of the state; kNowhere: it is in the slot
  std::uint64_t held_gradient = kNowhere;  // both: offset of the bf16 gradient; kNowhere: it is in the slot
  bool found = false;       // measure, update on the host: the gradient was measured on its way from the device
  bool measures = false;    // update on the host: also measures its gradient, which is of the plan's own step
  bool updated = false;     // downloads: bytes of an update on the device, stamped before they are written
  std::uint64_t bytes = 0;  // moved; elements * 2 for updates and measure
  std::vector<Access> accesses;
  std::vector<TaskId> dependencies;  // each smaller than the task's own id
};

// A visit of a stage in one pass. It says where weights and gradients lie in the device arena, unit by unit: first the
// units of the stage, then those that it needs on demand.
struct Visit {
  int stage = 0;
  Pass pass = Pass::forward;
  std::vector<std::uint64_t> weights;    // offset of each unit's hi words; kNowhere where the pass does not need them
  std::vector<std::uint64_t> gradients;  // offset of each unit's fp32 gradient; kNowhere in passes without
  std::vector<bool> fresh_gradient;      // the gradient region holds nothing yet: zero it before the first addition
  std::vector<int> needed;               // the units on demand, of a part of the visit (VisitPlanner alone)

  // The unit at a position of weights and gradients; of_stage: the stage's own units.
  int unit(const std::vector<int>& of_stage, std::size_t position) const {
    return position < of_stage.size() ? of_stage[position] : needed[position - of_stage.size()];
  }
};

struct Plan {
  TaskId first_id = 0;
  std::vector<Task> tasks;
  std::vector<Visit> visits;
};

}  // namespace tierflow::swap
