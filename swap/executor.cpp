#include "swap/executor.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "swap/host_memory.h"

namespace tierflow::swap {
namespace {

using Clock = std::chrono::steady_clock;

struct Node {
  Task task;
  std::shared_ptr<HostWork> work;
  std::shared_ptr<const std::vector<Visit>> visits;
  int waiting = 0;
  std::vector<TaskId> dependents;
  TaskId compute_dependency = 0;  // newest compute task it follows, plus one; 0: none
  double begin = 0;
  bool done = false;
};

constexpr std::size_t kEventsKept = 256;
constexpr int kWritesBack = 4;  // in flight at once

std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace

struct Executor::Impl {
  Impl(Device& device_, Store* store_, const Layout& layout_, const Arrangement& arrangement_, const ExecutorOptions& options_)
      : device(device_), store(store_), layout(layout_), arrangement(arrangement_), options(options_) {}

  io::Error allocate();
  void start();
  void stop();

  // Scheduling; all under `mutex`.
  Node& node(TaskId id) { return window[id - base]; }
  bool ready(Lane lane) {
    auto& queue = queues[index_of(lane)];
    return !queue.empty() && (error || node(queue.front()).waiting == 0);
  }
  void finish_locked(TaskId id);
  void finish(TaskId id, io::Error task_error);
  io::Error forget_old_events();
  double now() const { return std::chrono::duration<double>(Clock::now() - started).count(); }

  void lane_loop(Lane lane);
  void verify_loop();
  void run(Lane lane, TaskId id, Node& at);
  io::Error copy(Node& at);
  void start_read(TaskId id, Node& at);
  void start_write(TaskId id, Node& at);
  io::Error work(Node& at);
  std::span<std::byte> host(const HostRef& ref, std::size_t bytes);
  io::Buffer& buffer(const HostRef& ref) {
    return ref.where == HostRef::Where::state_buffer ? state_buffers[ref.index] : word_buffers[ref.index];
  }

  Device& device;
  Store* store;
  const Layout& layout;
  const Arrangement& arrangement;
  const ExecutorOptions options;
  const Clock::time_point started = Clock::now();

  io::Buffer arena;
  std::unique_ptr<HostMemory> memory;
  std::vector<io::Buffer> word_buffers, state_buffers;
  // The same memory: an upload may read what a write in flight, which holds the Buffer, reads as well.
  std::vector<std::span<std::byte>> word_bytes, state_bytes;
  std::vector<std::span<std::byte>> residents[3];
  std::vector<std::span<std::byte>> carries;

  mutable std::mutex mutex;
  std::condition_variable lane_wakes[kLanes], verify_wakes, client_wakes;
  std::deque<Node> window;  // tasks not yet retired, by id from `base`
  TaskId base = 0;
  std::deque<TaskId> queues[kLanes];
  std::deque<TaskId> verify_queue;
  std::map<TaskId, Event> compute_events;
  std::size_t unfinished = 0, unfinished_updates = 0, in_flight = 0;
  TaskId entered = 0;
  bool inside = false, stopping = false;
  io::Error error;
  std::array<LaneCounters, kLanes> counters{};
  int disk_outstanding[2] = {0, 0};
  double disk_since[2] = {0, 0};
  std::vector<TaskRecord> records;
  std::vector<std::thread> threads;
};

io::Error Executor::Impl::allocate() {
  auto device_memory = device.allocate(arrangement.device_bytes());
  if (!device_memory.ok()) return device_memory.error();
  arena = std::move(device_memory).value();

  constexpr std::size_t kGibibyte = std::size_t{1} << 30;
  const std::size_t bytes = arrangement.host_bytes(layout), piece = std::max(layout.max_word_bytes(), layout.max_state_bytes());
  auto slab = HostMemory::create(round_up(bytes + (bytes / kGibibyte + 1) * round_up(piece, kSector) * (bytes > kGibibyte), kSector), device);
  if (!slab.ok()) return slab.error();
  memory = std::move(slab).value();
  if (store != nullptr && bytes != 0) store->volume().register_memory(memory->all());

  const auto cut_buffers = [&](auto& buffers, auto& spans, int count, std::size_t size) {
    for (int i = 0; i < count; ++i) {
      spans.push_back(memory->cut(round_up(size, kSector)));
      buffers.emplace_back(spans.back().data(), spans.back().size(), nullptr, nullptr);
    }
  };
  cut_buffers(word_buffers, word_bytes, arrangement.word_buffers, layout.max_word_bytes());
  cut_buffers(state_buffers, state_bytes, arrangement.state_buffers, layout.max_state_bytes());
  for (auto& list : residents) list.resize(layout.chunks().size());
  for (std::size_t id = 0; id < layout.chunks().size(); ++id) {
    const Chunk& chunk = layout.chunks()[id];
    if (arrangement.hi_resident[id]) residents[0][id] = memory->cut(chunk.word_bytes());
    if (arrangement.state_resident[id]) residents[1][id] = memory->cut(chunk.state_bytes);
    if (arrangement.gradient_resident[id]) residents[2][id] = memory->cut(chunk.word_bytes());
  }
  carries.resize(arrangement.carry_on_host.size() * arrangement.micro_batches);
  for (std::size_t stage = 0; stage < arrangement.carry_on_host.size(); ++stage)
    for (int micro_batch = 0; arrangement.carry_on_host[stage] && micro_batch < arrangement.micro_batches; ++micro_batch)
      carries[stage * arrangement.micro_batches + micro_batch] = memory->cut(layout.stages()[stage].carry_bytes);
  return {};
}

void Executor::Impl::start() {
  for (Lane lane : {Lane::disk_read, Lane::disk_write, Lane::upload, Lane::download, Lane::update})
    threads.emplace_back([this, lane] { lane_loop(lane); });
  threads.emplace_back([this] { verify_loop(); });
}

void Executor::Impl::stop() {
  {
    std::unique_lock lock(mutex);
    inside = false;
    if (!error && unfinished != 0) error = {.kind = io::ErrorKind::cancelled, .detail = "the run was stopped"};
    for (auto& wake : lane_wakes) wake.notify_all();
    // Tasks that were never entered stay in the compute queue: nobody waits for them.
    client_wakes.wait(lock, [this] { return in_flight == 0; });
    stopping = true;
    for (auto& wake : lane_wakes) wake.notify_all();
    verify_wakes.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

void Executor::Impl::finish_locked(TaskId id) {
  Node& at = node(id);
  at.done = true;
  --unfinished;
  if (at.task.lane == Lane::update) --unfinished_updates;
  LaneCounters& counter = counters[index_of(at.task.lane)];
  ++counter.tasks;
  counter.bytes += at.task.bytes;
  const double end = now();
  if (at.task.lane != Lane::disk_read && at.task.lane != Lane::disk_write) counter.busy_seconds += end - at.begin;
  if (options.record)
    records.push_back({at.task.kind, at.task.lane, at.task.pass, at.task.stage, at.task.micro_batch, at.task.chunk, at.begin, end});
  for (TaskId dependent : at.dependents) {
    Node& next = node(dependent);
    if (--next.waiting != 0) continue;
    if (next.task.lane == Lane::compute)
      client_wakes.notify_all();
    else
      lane_wakes[index_of(next.task.lane)].notify_one();
  }
  while (!window.empty() && window.front().done) {
    window.pop_front();
    ++base;
  }
  client_wakes.notify_all();
}

// Called by the client's thread alone, the only one that adds events.
io::Error Executor::Impl::forget_old_events() {
  Event oldest;
  {
    std::lock_guard lock(mutex);
    if (compute_events.size() < kEventsKept) return {};
    oldest = compute_events.begin()->second;
    compute_events.erase(compute_events.begin());
  }
  return device.synchronize(oldest);
}

void Executor::Impl::finish(TaskId id, io::Error task_error) {
  std::lock_guard lock(mutex);
  if (task_error && !error) {
    error = std::move(task_error);
    for (auto& wake : lane_wakes) wake.notify_all();
  }
  --in_flight;
  finish_locked(id);
}

void Executor::Impl::lane_loop(Lane lane) {
  std::minstd_rand random(options.chaos_seed + static_cast<std::uint64_t>(lane));
  std::unique_lock lock(mutex);
  for (;;) {
    lane_wakes[index_of(lane)].wait(lock, [&] { return stopping || ready(lane); });
    if (stopping) return;
    const TaskId id = queues[index_of(lane)].front();
    queues[index_of(lane)].pop_front();
    Node& at = node(id);
    at.begin = now();
    if (error) {
      finish_locked(id);
      continue;
    }
    ++in_flight;
    lock.unlock();
    if (options.chaos_seed != 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    run(lane, id, at);
    lock.lock();
  }
}

void Executor::Impl::run(Lane lane, TaskId id, Node& at) {
  switch (lane) {
    case Lane::disk_read: return start_read(id, at);
    case Lane::disk_write: return start_write(id, at);
    case Lane::update: return finish(id, work(at));
    default: return finish(id, copy(at));
  }
}

std::span<std::byte> Executor::Impl::host(const HostRef& ref, std::size_t bytes) {
  switch (ref.where) {
    case HostRef::Where::word_buffer: return word_bytes[ref.index].first(bytes);
    case HostRef::Where::state_buffer: return state_bytes[ref.index].first(bytes);
    case HostRef::Where::resident_hi: return residents[0][ref.index];
    case HostRef::Where::resident_state: return residents[1][ref.index];
    case HostRef::Where::resident_gradient: return residents[2][ref.index];
    case HostRef::Where::carry: return carries[ref.index];
    default: return {};
  }
}

io::Error Executor::Impl::copy(Node& at) {
  const Task& task = at.task;
  const StreamId stream = task.lane == Lane::upload ? StreamId::upload : StreamId::download;
  Event follows;
  if (at.compute_dependency != 0) {
    std::lock_guard lock(mutex);
    const auto found = compute_events.find(at.compute_dependency - 1);
    if (found != compute_events.end()) follows = found->second;
  }
  device.wait(stream, follows);
  std::byte* on_device = arena.data() + task.device_offset;
  switch (task.kind) {
    case TaskKind::upload_hi:
    case TaskKind::load_carry: device.copy_to_device(stream, on_device, host(task.words, task.bytes).data(), task.bytes); break;
    case TaskKind::download_hi:
    case TaskKind::save_carry: device.copy_to_host(stream, host(task.words, task.bytes).data(), on_device, task.bytes); break;
    default:
      device.gradient_to_host(stream, reinterpret_cast<std::uint16_t*>(host(task.gradient, task.bytes).data()),
                              reinterpret_cast<const float*>(on_device), task.bytes / 2);
  }
  return device.synchronize(device.record(stream));
}

namespace {

// The extent that a disk task moves and the buffer it moves through.
std::pair<ExtentKind, const HostRef*> extent_of(const Task& task) {
  switch (task.kind) {
    case TaskKind::read_hi:
    case TaskKind::write_hi: return {ExtentKind::hi, &task.words};
    case TaskKind::read_state:
    case TaskKind::write_state: return {ExtentKind::state, &task.state};
    default: return {ExtentKind::gradient, &task.gradient};
  }
}

}  // namespace

void Executor::Impl::start_read(TaskId id, Node& at) {
  const auto [kind, ref] = extent_of(at.task);
  {
    std::lock_guard lock(mutex);
    if (disk_outstanding[0]++ == 0) disk_since[0] = now();
  }
  io::Buffer& home = buffer(*ref);
  if (options.chaos_seed != 0) std::fill(home.bytes().begin(), home.bytes().end(), std::byte{0xff});
  store->read(kind, at.task.chunk, std::move(home), [this, id, &home](io::Completion&& completion) {
    home = std::move(completion.buffer);
    std::unique_lock lock(mutex);
    if (--disk_outstanding[0] == 0) counters[0].busy_seconds += now() - disk_since[0];
    if (completion.error) {
      lock.unlock();
      return finish(id, std::move(completion.error));
    }
    verify_queue.push_back(id);
    verify_wakes.notify_one();
  });
}

void Executor::Impl::start_write(TaskId id, Node& at) {
  const auto [kind, ref] = extent_of(at.task);
  {
    std::lock_guard lock(mutex);
    if (disk_outstanding[1]++ == 0) disk_since[1] = now();
  }
  io::Buffer& home = buffer(*ref);
  store->write(kind, at.task.chunk, std::move(home), [this, id, &home](io::Completion&& completion) {
    home = std::move(completion.buffer);
    {
      std::lock_guard lock(mutex);
      if (--disk_outstanding[1] == 0) counters[1].busy_seconds += now() - disk_since[1];
    }
    finish(id, std::move(completion.error));
  });
}

void Executor::Impl::verify_loop() {
  std::unique_lock lock(mutex);
  for (;;) {
    verify_wakes.wait(lock, [this] { return stopping || !verify_queue.empty(); });
    if (verify_queue.empty()) return;
    const TaskId id = verify_queue.front();
    verify_queue.pop_front();
    Node& at = node(id);
    lock.unlock();
    const auto [kind, ref] = extent_of(at.task);
    finish(id, store->verify(kind, at.task.chunk, host(*ref, at.task.bytes)));
    lock.lock();
  }
}

io::Error Executor::Impl::work(Node& at) {
  const Task& task = at.task;
  const Chunk& chunk = layout.chunks()[task.chunk];
  const auto gradient = host(task.gradient, chunk.word_bytes());
  if (task.kind == TaskKind::measure) {
    if (io::Error failed = at.work->measure(chunk, gradient)) return failed;
    if (task.gradient.where == HostRef::Where::word_buffer) store->stamp(ExtentKind::gradient, task.chunk, gradient);
    return {};
  }
  const auto words = host(task.words, chunk.word_bytes());
  const auto state = host(task.state, chunk.state_bytes);
  if (io::Error failed = at.work->update(chunk, gradient, words, state)) return failed;
  if (task.words.where == HostRef::Where::word_buffer) store->stamp(ExtentKind::hi, task.chunk, words);
  if (task.state.where == HostRef::Where::state_buffer) store->stamp(ExtentKind::state, task.chunk, state);
  return {};
}

io::Result<std::unique_ptr<Executor>> Executor::create(Device& device, Store* store, const Layout& layout, const Arrangement& arrangement,
                                                       const ExecutorOptions& options) {
  auto impl = std::make_unique<Impl>(device, store, layout, arrangement, options);
  if (io::Error error = impl->allocate()) return error;
  impl->start();
  return std::unique_ptr<Executor>(new Executor(std::move(impl)));
}

Executor::Executor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Executor::~Executor() { impl_->stop(); }

void Executor::append(Plan plan, std::shared_ptr<HostWork> work) {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  const auto visits = std::make_shared<const std::vector<Visit>>(std::move(plan.visits));
  TaskId id = plan.first_id;
  for (Task& task : plan.tasks) {
    Node& added = impl.window.emplace_back();
    added.work = work;
    if (task.lane == Lane::compute) added.visits = visits;
    for (TaskId dependency : task.dependencies) {
      // A compute task counts as done when it is enqueued on the device: who follows it waits for its event as well.
      if (impl.compute_events.contains(dependency)) added.compute_dependency = dependency + 1;
      if (dependency < impl.base) continue;
      Node& before = impl.node(dependency);
      if (before.task.lane == Lane::compute) added.compute_dependency = dependency + 1;
      if (before.done) continue;
      before.dependents.push_back(id);
      ++added.waiting;
    }
    impl.queues[index_of(task.lane)].push_back(id);
    if (task.lane == Lane::update) ++impl.unfinished_updates;
    ++impl.unfinished;
    added.task = std::move(task);
    ++id;
  }
  for (auto& wake : impl.lane_wakes) wake.notify_all();
}

io::Result<Entered> Executor::enter(int stage, Pass pass, int micro_batch) {
  Impl& impl = *impl_;
  std::unique_lock lock(impl.mutex);
  auto& queue = impl.queues[index_of(Lane::compute)];
  if (impl.error) return impl.error;
  if (impl.inside || queue.empty())
    return io::Error{.kind = io::ErrorKind::usage, .operation = "enter", .detail = impl.inside ? "leave() was not called" : "the plan is at its end"};
  const Task& task = impl.node(queue.front()).task;
  if (task.stage != stage || task.pass != pass || task.micro_batch != micro_batch)
    return io::Error{.kind = io::ErrorKind::usage, .operation = "enter",
                     .detail = std::string("stage ") + std::to_string(stage) + " " + pass_name(pass) + " micro-batch " +
                               std::to_string(micro_batch) + " departs from the plan, which has stage " + std::to_string(task.stage) + " " +
                               pass_name(task.pass) + " micro-batch " + std::to_string(task.micro_batch)};
  impl.client_wakes.wait(lock, [&] { return impl.error || impl.node(queue.front()).waiting == 0; });
  if (impl.error) return impl.error;
  impl.entered = queue.front();
  queue.pop_front();
  impl.inside = true;
  Node& at = impl.node(impl.entered);
  at.begin = impl.now();
  return Entered{.visit = &(*at.visits)[at.task.visit], .arena = impl.arena.data(),
                 .carry = at.task.device_offset == kNowhere ? nullptr : impl.arena.data() + at.task.device_offset};
}

io::Error Executor::leave() {
  Impl& impl = *impl_;
  const Event event = impl.device.record(StreamId::compute);
  if (io::Error failed = impl.forget_old_events()) fail(failed);
  std::lock_guard lock(impl.mutex);
  if (!impl.inside) return {.kind = io::ErrorKind::usage, .operation = "leave", .detail = "enter() was not called"};
  impl.inside = false;
  impl.compute_events[impl.entered] = event;
  impl.finish_locked(impl.entered);
  return impl.error;
}

io::Error Executor::finish_updates() {
  std::unique_lock lock(impl_->mutex);
  impl_->client_wakes.wait(lock, [this] { return impl_->error || impl_->unfinished_updates == 0; });
  return impl_->error;
}

io::Error Executor::drain() {
  std::unique_lock lock(impl_->mutex);
  if (!impl_->error && !impl_->queues[index_of(Lane::compute)].empty())
    return {.kind = io::ErrorKind::usage, .operation = "drain", .detail = "stages of the plan were not computed"};
  impl_->client_wakes.wait(lock, [this] { return impl_->error ? impl_->in_flight == 0 : impl_->unfinished == 0; });
  return impl_->error;
}

void Executor::fail(io::Error error) {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->error) impl_->error = std::move(error);
  for (auto& wake : impl_->lane_wakes) wake.notify_all();
  impl_->client_wakes.notify_all();
}

io::Error Executor::access(ExtentKind kind, int chunk, bool writes, const std::function<void(std::span<std::byte>)>& use) {
  Impl& impl = *impl_;
  if (const auto resident = impl.residents[static_cast<int>(kind)][chunk]; !resident.empty()) {
    use(resident);
    return {};
  }
  auto& buffers = kind == ExtentKind::state ? impl.state_buffers : impl.word_buffers;
  if (impl.store == nullptr || buffers.empty())
    return {.kind = io::ErrorKind::usage, .operation = "access", .detail = "the arrangement has no place for this extent"};
  io::Buffer& home = buffers.front();
  const auto bytes = home.bytes().first(impl.store->extent_bytes(kind, chunk));
  if (writes) {
    use(bytes);
    impl.store->stamp(kind, chunk, bytes);
  }
  bool done = false;
  io::Error error;
  const auto arrived = [&](io::Completion&& completion) {
    std::lock_guard arrived_lock(impl.mutex);
    home = std::move(completion.buffer);
    error = std::move(completion.error);
    done = true;
    impl.client_wakes.notify_all();
  };
  if (writes)
    impl.store->write(kind, chunk, std::move(home), arrived);
  else
    impl.store->read(kind, chunk, std::move(home), arrived);
  std::unique_lock lock(impl.mutex);
  impl.client_wakes.wait(lock, [&] { return done; });
  lock.unlock();
  if (error || writes) return error;
  if (io::Error wrong = impl.store->verify(kind, chunk, bytes)) return wrong;
  use(bytes);
  return {};
}

io::Error Executor::write_back() {
  Impl& impl = *impl_;
  io::Error first;
  int outstanding = 0;
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int chunk = 0; chunk < static_cast<int>(impl.layout.chunks().size()); ++chunk) {
      const auto bytes = impl.residents[static_cast<int>(kind)][chunk];
      if (bytes.empty()) continue;
      {
        std::unique_lock lock(impl.mutex);
        impl.client_wakes.wait(lock, [&] { return outstanding < kWritesBack; });
        if (first) break;
        ++outstanding;
      }
      impl.store->stamp(kind, chunk, bytes);
      impl.store->write(kind, chunk, io::Buffer(bytes.data(), bytes.size(), nullptr, nullptr), [&](io::Completion&& completion) {
        std::lock_guard lock(impl.mutex);
        if (completion.error && !first) first = std::move(completion.error);
        --outstanding;
        impl.client_wakes.notify_all();
      });
    }
  std::unique_lock lock(impl.mutex);
  impl.client_wakes.wait(lock, [&] { return outstanding == 0; });
  return first;
}

std::array<LaneCounters, kLanes> Executor::counters() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

std::vector<TaskRecord> Executor::take_records() {
  std::lock_guard lock(impl_->mutex);
  return std::exchange(impl_->records, {});
}

}  // namespace tierflow::swap
