#pragma once
// Inside of Executor: the window of tasks, their lanes and the memory they work on. Included by executor*.cpp alone.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "swap/executor.h"
#include "swap/host_memory.h"

namespace tierflow::swap {

using Clock = std::chrono::steady_clock;

struct Node {
  Task task;
  std::shared_ptr<UpdateWork> work;
  std::shared_ptr<const std::vector<Visit>> visits;
  int waiting = 0;
  std::uint64_t left_out = 0;  // of its bytes, those that were not moved
  std::vector<TaskId> dependents;
  TaskId compute_dependency = 0;  // newest compute task it follows, plus one; 0: none
  double begin = 0;
  Event began, ended;       // of what the device does, around the task's own work, behind what it waits for
  bool done = false;        // others may follow; a compute task is done when it is enqueued
  bool on_device = false;   // enqueued, and not landed
  bool read_again = false;  // what was read first did not match its checksum
  int rounded_in = -1;      // the gradient slot in which it is rounded before it is copied; -1: none
};

// A stream's tasks that the device has, in order. A thread for each stream waits for them and says that they are done.
struct Flight {
  std::deque<TaskId> tasks;  // that nobody waits for yet
  int copying = 0;           // copies that the device was not seen to end
  std::condition_variable wakes;
};

constexpr int kCopiesInFlight = 2;  // on a stream: the link goes on to the next while the first one is seen to
static_assert(kCopiesInFlight == kGradientSlots);
// Stages that are enqueued and not computed, at most: a device's queue has room for about a thousand kernels, and
// whoever enqueues more waits in the driver, where lanes may have to wait with it.
constexpr std::size_t kMostComputing = 16;
constexpr int kWritesBack = 4;  // in flight at once

inline std::size_t index_of(Lane lane) {
  return static_cast<std::size_t>(lane);
}
inline std::size_t index_of(HostRef::Where where) {
  return static_cast<std::size_t>(where);
}

struct Executor::Impl {
  Impl(Device& device_, Store* store_, const Layout& layout_, const Arrangement& arrangement_,
       const ExecutorOptions& options_)
      : device(device_), store(store_), layout(layout_), arrangement(arrangement_), options(options_) {}

  io::Error allocate();
  void start();
  void stop();

  // Scheduling; all under `mutex`.
  Node& node(TaskId id) { return window[id - base]; }
  bool ready(Lane lane) {
    auto& queue = queues[index_of(lane)];
    return !error && !queue.empty() && node(queue.front()).waiting == 0 && !(is_copy(lane) && full(stream_of(lane)));
  }
  static bool is_copy(Lane lane) { return lane == Lane::upload || lane == Lane::download; }
  static StreamId stream_of(Lane lane) { return lane == Lane::upload ? StreamId::upload : StreamId::download; }
  Flight& flight(StreamId stream) { return flights[static_cast<std::size_t>(stream)]; }
  bool full(StreamId stream) { return flight(stream).copying == kCopiesInFlight; }
  void finish_locked(TaskId id);
  void finish(TaskId id, io::Error task_error);
  void account(TaskId id, const Node& at);
  void forget_landed();
  double now() const { return std::chrono::duration<double>(Clock::now() - started).count(); }

  void lane_loop(Lane lane);
  void verify_loop();
  void verify(TaskId id, Node& at);
  void run(Lane lane, TaskId id, Node& at);
  void start_copy(TaskId id, Node& at);
  bool rounds_first(const Task& task) const {
    return task.kind == TaskKind::download_gradient && arrangement.gradient_slot != 0;
  }
  void round_first(Node& at);
  std::byte* gradient_slot(int slot) {
    return arena.data() + arrangement.gradient_slots_begin() +
           static_cast<std::uint64_t>(slot) * arrangement.gradient_slot;
  }
  std::byte* measured_in(int slot) {
    return gradient_slot(slot) + arrangement.gradient_slot - arrangement.measured_buffer_bytes();
  }
  void enqueue_copy(StreamId stream, const Task& task);
  void start_gradient(StreamId stream, Node& at);
  bool is_zero_gradient(const Task& task) const {
    return (task.kind == TaskKind::write_gradient || task.kind == TaskKind::read_gradient) && zero_gradient[task.chunk];
  }
  void land_loop(StreamId stream);
  void has_room(StreamId stream);
  void stamp_copy(const Task& task);
  void follow_compute(StreamId stream, const Node& at);
  io::Error work_on_device(Node& at);
  void start_read(TaskId id, Node& at);
  void start_write(TaskId id, Node& at);
  void end_write(TaskId id, io::Error failed);
  io::Error work(Node& at);
  void changed(ExtentKind kind, int chunk, const HostRef& place);
  io::Error write_back_from_device();
  io::Error copy_to_host(ExtentKind kind, int chunk, std::span<std::byte> to);
  io::Error copy_to_device(ExtentKind kind, int chunk, std::span<const std::byte> from);
  struct Extent {
    ExtentKind kind;
    int index;
    HostRef through;
  };
  Extent extent_of(const Task& task) const;
  static bool is_resident(const HostRef& ref) {
    return ref.where == HostRef::Where::resident_hi || ref.where == HostRef::Where::resident_state ||
           ref.where == HostRef::Where::cached;
  }
  // The first bytes of a place; none of none.
  std::span<std::byte> host(const HostRef& ref, std::size_t bytes) {
    if (ref.where == HostRef::Where::none) return {};
    return places[index_of(ref.where)][static_cast<std::size_t>(ref.index)].first(bytes);
  }
  // An extent that stays in RAM; none if it does not.
  std::span<std::byte> resident(ExtentKind kind, int chunk) const {
    return places[index_of(resident_place(kind, chunk).where)][static_cast<std::size_t>(chunk)];
  }
  std::span<std::byte> measured_on_host(int gradient_slot) {
    return host({HostRef::Where::measured_buffer, gradient_slot}, arrangement.measured_bytes);
  }
  io::Buffer& buffer(const HostRef& ref) { return buffers[index_of(ref.where)][static_cast<std::size_t>(ref.index)]; }

  Device& device;
  Store* store;
  const Layout& layout;
  const Arrangement& arrangement;
  const ExecutorOptions options;
  const Clock::time_point started = Clock::now();

  io::Buffer arena;
  std::unique_ptr<HostMemory> memory;
  std::vector<std::span<std::byte>> places[kHostPlaces];  // by HostRef
  // Of streaming buffers, as the store takes them. While it has one, an upload may read the same memory.
  std::vector<io::Buffer> buffers[kHostPlaces];
  // Of those that stay in RAM or on the device: not what the store has. A byte each: lanes set them beside one another.
  std::vector<char> unsaved[kExtentKinds];
  // By chunk: its newest gradient is zeros alone, and is not stored. A byte each, as above.
  std::vector<char> zero_gradient;

  mutable std::mutex mutex;
  std::condition_variable lane_wakes[kLanes], verify_wakes, client_wakes;
  std::deque<Node> window;  // tasks not yet retired, by id from `base`
  TaskId base = 0;
  std::deque<TaskId> queues[kLanes];
  std::deque<TaskId> verify_queue;
  Flight flights[3];  // by StreamId: uploads, downloads, computation
  std::size_t unfinished = 0, unfinished_updates = 0, in_flight = 0, computing = 0;
  TaskId entered = 0;
  bool inside = false, stopping = false;
  io::Error error;
  std::array<LaneCounters, kLanes> counters{};
  std::uint64_t gradients_rounded = 0;  // the download lane's alone
  int disk_outstanding[2] = {0, 0};
  double disk_since[2] = {0, 0};
  std::vector<TaskRecord> records;
  Event zero;  // where the device's clock is set against ours
  double zero_time = 0;
  std::vector<std::thread> threads;
};

}  // namespace tierflow::swap
