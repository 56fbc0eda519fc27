#include "swap/executor.h"

#include <algorithm>
#include <utility>

#include "swap/executor_impl.h"

namespace tierflow::swap {

io::Error Executor::Impl::allocate() {
  auto device_memory = device.allocate(arrangement.device_bytes());
  if (!device_memory.ok()) return device_memory.error();
  arena = std::move(device_memory).value();

  const std::vector<HostBuffer> host_buffers = arrangement.host_buffers(layout);
  std::vector<std::size_t> sizes;
  for (const HostBuffer& one : host_buffers) sizes.push_back(one.bytes);
  auto host_memory = HostMemory::create(sizes, device);
  if (!host_memory.ok()) return host_memory.error();
  memory = std::move(host_memory).value();
  if (store != nullptr && !host_buffers.empty()) store->register_memory(memory->slab(), memory->registrations());

  for (const ExtentKind kind : kChunkExtents)
    places[index_of(resident_place(kind, 0).where)].resize(layout.chunks().size());
  for (auto& list : unsaved) list.resize(layout.chunks().size());
  zero_gradient.resize(layout.chunks().size());
  for (std::size_t i = 0; i < host_buffers.size(); ++i) {
    const auto [where, index] = host_buffers[i].place;
    const std::span<std::byte> bytes = memory->buffer(i);
    auto& alike = places[index_of(where)];
    alike.resize(std::max(alike.size(), static_cast<std::size_t>(index) + 1));
    alike[static_cast<std::size_t>(index)] = bytes;
    if (where == HostRef::Where::word_buffer || where == HostRef::Where::state_buffer ||
        where == HostRef::Where::activation_buffer)
      buffers[index_of(where)].push_back(memory->lend(bytes));
  }
  return {};
}

void Executor::Impl::start() {
  for (Lane lane : {Lane::disk_read, Lane::disk_write, Lane::upload, Lane::download, Lane::update, Lane::commit})
    threads.emplace_back([this, lane] { lane_loop(lane); });
  threads.emplace_back([this] { verify_loop(); });
  for (StreamId stream : {StreamId::upload, StreamId::download, StreamId::compute})
    threads.emplace_back([this, stream] { land_loop(stream); });
}

void Executor::Impl::stop() {
  {
    std::unique_lock lock(mutex);
    // Tasks that have not begun stay in their queues: nobody waits for them.
    if (!error) error = {.kind = io::ErrorKind::cancelled, .detail = "the run was stopped"};
    client_wakes.wait(lock, [this] { return in_flight == 0; });
    stopping = true;
    for (auto& wake : lane_wakes) wake.notify_all();
    verify_wakes.notify_all();
    for (Flight& each : flights) each.wakes.notify_all();
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
  counter.left_out += at.left_out;
  if (!at.on_device) account(id, at);
  for (TaskId dependent : at.dependents) {
    Node& next = node(dependent);
    if (--next.waiting != 0) continue;
    if (next.task.lane == Lane::compute)
      client_wakes.notify_all();
    else
      lane_wakes[index_of(next.task.lane)].notify_one();
  }
  forget_landed();
  client_wakes.notify_all();
}

void Executor::Impl::forget_landed() {
  while (!window.empty() && window.front().done && !window.front().on_device) {
    window.pop_front();
    ++base;
  }
}

// How long the task took, by the device's clock where the device did it: a lane enqueues long before that.
void Executor::Impl::account(TaskId id, const Node& at) {
  double begin = at.begin, seconds = now() - at.begin;
  if (at.ended) {
    seconds = device.seconds_between(at.began, at.ended).value_or(0);
    if (options.record) begin = zero_time + device.seconds_between(zero, at.began).value_or(0);
  }
  if (at.task.lane != Lane::disk_read && at.task.lane != Lane::disk_write)
    counters[index_of(at.task.lane)].busy_seconds += seconds;
  if (options.record)
    records.push_back({.id = id,
                       .kind = at.task.kind,
                       .lane = at.task.lane,
                       .pass = at.task.pass,
                       .stage = at.task.stage,
                       .micro_batch = at.task.micro_batch,
                       .chunk = at.task.chunk,
                       .bytes = at.task.bytes,
                       .dependencies = at.task.dependencies,
                       .begin = begin,
                       .end = begin + seconds});
}

void Executor::Impl::finish(TaskId id, io::Error task_error) {
  std::lock_guard lock(mutex);
  if (task_error && !error) error = std::move(task_error);
  --in_flight;
  Node& at = node(id);
  if (!at.on_device) return finish_locked(id);
  at.on_device = false;
  --computing;
  account(id, at);
  forget_landed();
  client_wakes.notify_all();
}

io::Result<std::unique_ptr<Executor>> Executor::create(Device& device, Store* store, const Layout& layout,
                                                       const Arrangement& arrangement, const ExecutorOptions& options) {
  auto impl = std::make_unique<Impl>(device, store, layout, arrangement, options);
  if (io::Error error = impl->allocate()) return error;
  if (options.record) {
    impl->zero = device.record_timed(StreamId::compute);
    if (io::Error error = device.synchronize(impl->zero)) return error;
    impl->zero_time = impl->now();
  }
  impl->start();
  return std::unique_ptr<Executor>(new Executor(std::move(impl)));
}

Executor::Executor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Executor::~Executor() {
  impl_->stop();
}

void Executor::append(Plan plan, std::shared_ptr<UpdateWork> work) {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  const auto visits = std::make_shared<const std::vector<Visit>>(std::move(plan.visits));
  TaskId id = plan.first_id;
  for (Task& task : plan.tasks) {
    Node& added = impl.window.emplace_back();
    added.work = work;
    if (task.lane == Lane::compute) added.visits = visits;
    for (TaskId dependency : task.dependencies) {
      if (dependency < impl.base) continue;
      // A compute task counts as done when it is enqueued on the device: who follows it waits for its event as well.
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
    return io::Error{.kind = io::ErrorKind::usage,
                     .operation = "enter",
                     .detail = impl.inside ? "leave() was not called" : "the plan is at its end"};
  const Task& task = impl.node(queue.front()).task;
  if (task.stage != stage || task.pass != pass || task.micro_batch != micro_batch)
    return io::Error{.kind = io::ErrorKind::usage,
                     .operation = "enter",
                     .detail = std::string("stage ") + std::to_string(stage) + " " + pass_name(pass) + " micro-batch " +
                               std::to_string(micro_batch) + " departs from the plan, which has stage " +
                               std::to_string(task.stage) + " " + pass_name(task.pass) + " micro-batch " +
                               std::to_string(task.micro_batch)};
  impl.client_wakes.wait(
      lock, [&] { return impl.error || (impl.node(queue.front()).waiting == 0 && impl.computing < kMostComputing); });
  if (impl.error) return impl.error;
  impl.entered = queue.front();
  queue.pop_front();
  impl.inside = true;
  Node& at = impl.node(impl.entered);
  at.begin = impl.now();
  lock.unlock();  // where the device's queue is full, this waits, and lanes may not
  at.began = impl.device.record_timed(StreamId::compute);
  return Entered{.visit = &(*at.visits)[at.task.visit],
                 .arena = impl.arena.data(),
                 .item = at.task.item == -1 ? nullptr : &impl.arrangement.items[at.task.item],
                 .slot = at.task.device_offset == kNowhere ? nullptr : impl.arena.data() + at.task.device_offset,
                 .activations = at.task.activations};
}

io::Error Executor::leave() {
  Impl& impl = *impl_;
  Event ended = impl.device.record_timed(StreamId::compute);
  std::lock_guard lock(impl.mutex);
  if (!impl.inside) return {.kind = io::ErrorKind::usage, .operation = "leave", .detail = "enter() was not called"};
  impl.inside = false;
  Node& at = impl.node(impl.entered);
  at.ended = std::move(ended);
  at.on_device = true;
  ++impl.computing;
  ++impl.in_flight;
  Flight& flight = impl.flight(StreamId::compute);
  flight.tasks.push_back(impl.entered);
  flight.wakes.notify_one();
  impl.finish_locked(impl.entered);
  return impl.error;
}

io::Result<Entered> Executor::need(Plan plan, std::shared_ptr<UpdateWork> work) {
  if (io::Error error = leave()) return error;
  if (plan.visits.empty()) return io::Error{.kind = io::ErrorKind::usage, .operation = "need", .detail = "no part"};
  const int stage = plan.visits.front().stage;
  const Pass pass = plan.visits.front().pass;
  append(std::move(plan), std::move(work));
  return enter(stage, pass, 0);
}

io::Error Executor::finish_updates() {
  std::unique_lock lock(impl_->mutex);
  impl_->client_wakes.wait(
      lock, [this] { return impl_->error || (impl_->unfinished_updates == 0 && impl_->computing == 0); });
  return impl_->error;
}

io::Error Executor::drain() {
  std::unique_lock lock(impl_->mutex);
  if (!impl_->error && !impl_->queues[index_of(Lane::compute)].empty())
    return {.kind = io::ErrorKind::usage, .operation = "drain", .detail = "stages of the plan were not computed"};
  impl_->client_wakes.wait(
      lock, [this] { return impl_->error ? impl_->in_flight == 0 : impl_->unfinished == 0 && impl_->computing == 0; });
  return impl_->error;
}

void Executor::fail(io::Error error) {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->error) impl_->error = std::move(error);
  impl_->client_wakes.notify_all();
}

std::array<LaneCounters, kLanes> Executor::counters() const {
  std::lock_guard lock(impl_->mutex);
  auto result = impl_->counters;
  const double now = impl_->now();
  for (const Lane lane : {Lane::disk_read, Lane::disk_write})
    if (impl_->disk_outstanding[index_of(lane)] != 0)
      result[index_of(lane)].busy_seconds += now - impl_->disk_since[index_of(lane)];
  for (const Node& at : impl_->window)
    if ((at.task.lane == Lane::commit || at.task.lane == Lane::update) && at.begin != 0 && !at.done && !at.ended)
      result[index_of(at.task.lane)].busy_seconds += now - at.begin;
  return result;
}

double Executor::now() const {
  return impl_->now();
}

std::string Executor::pin_note() const {
  return impl_->memory->pin_note();
}

bool Executor::failed() const {
  std::lock_guard lock(impl_->mutex);
  return static_cast<bool>(impl_->error);
}

std::vector<TaskRecord> Executor::take_records() {
  std::unique_lock lock(impl_->mutex);
  impl_->client_wakes.wait(lock, [this] { return impl_->computing == 0; });
  return std::exchange(impl_->records, {});
}

}  // namespace tierflow::swap
