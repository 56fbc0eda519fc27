// The lanes of the executor: what each kind of task does.
#include <algorithm>
#include <new>
#include <random>
#include <utility>

#include "swap/executor_impl.h"

namespace tierflow::swap {

namespace {
// The exception being handled, as the error that ends the run.
io::Error thrown_in(const Task& task) {
  io::Error error{.kind = io::ErrorKind::internal, .operation = task_name(task.kind)};
  try {
    throw;
  } catch (const std::bad_alloc&) {
    error.kind = io::ErrorKind::memory;
    error.detail = "the system has no memory left";
  } catch (const std::exception& thrown) {
    error.detail = thrown.what();
  } catch (...) {
    error.detail = "an exception of no known type";
  }
  return error;
}
}  // namespace

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
    ++in_flight;
    lock.unlock();
    if (options.chaos_seed != 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    run(lane, id, at);
    lock.lock();
  }
}

void Executor::Impl::run(Lane lane, TaskId id, Node& at) {
  io::Error failed;
  try {
    switch (lane) {
      case Lane::disk_read:
        return start_read(id, at);
      case Lane::disk_write:
        return start_write(id, at);
      case Lane::update:
        failed = work(at);
        break;
      case Lane::commit:
        failed = store->commit(at.work->progress());
        break;
      default:
        return start_copy(id, at);
    }
  } catch (...) {
    failed = thrown_in(at.task);
  }
  finish(id, std::move(failed));
}

// The extent that a disk task moves and the buffer it moves through.
Executor::Impl::Extent Executor::Impl::extent_of(const Task& task) const {
  switch (task.kind) {
    case TaskKind::read_hi:
    case TaskKind::write_hi:
      return {ExtentKind::hi, task.chunk, task.words};
    case TaskKind::read_state:
    case TaskKind::write_state:
      return {ExtentKind::state, task.chunk, task.state};
    case TaskKind::read_gradient_low:
    case TaskKind::write_gradient_low:
      return {ExtentKind::gradient_low, task.chunk, task.gradient_low};
    case TaskKind::read_gradient:
    case TaskKind::write_gradient:
      return {ExtentKind::gradient, task.chunk, task.gradient};
    default:
      return {ExtentKind::activations, task.item, task.words};
  }
}

// What is enqueued on the stream from here on starts after the computation that the task depends on.
void Executor::Impl::follow_compute(StreamId stream, const Node& at) {
  Event follows;
  {
    std::lock_guard lock(mutex);
    // What has left the window has happened.
    if (at.compute_dependency > base) follows = node(at.compute_dependency - 1).ended;
  }
  device.wait(stream, follows);
}

// Returns when the copy is enqueued; land_loop() finishes the task.
void Executor::Impl::start_copy(TaskId id, Node& at) {
  const StreamId stream = stream_of(at.task.lane);
  if (at.task.kind == TaskKind::download_gradient) {
    start_gradient(stream, at);
  } else {
    follow_compute(stream, at);
    at.began = device.record_timed(stream);
    enqueue_copy(stream, at.task);
  }
  at.ended = device.record_timed(stream);
  std::lock_guard lock(mutex);
  Flight& to = flight(stream);
  to.tasks.push_back(id);
  ++to.copying;
  to.wakes.notify_one();
}

// A copy is done once what came is stamped. Meanwhile the device goes on with the next.
void Executor::Impl::land_loop(StreamId stream) {
  Flight& from = flight(stream);
  std::unique_lock lock(mutex);
  for (;;) {
    from.wakes.wait(lock, [&] { return stopping || !from.tasks.empty(); });
    if (from.tasks.empty()) return;
    const TaskId id = from.tasks.front();
    from.tasks.pop_front();
    Node& at = node(id);
    lock.unlock();
    io::Error failed;
    try {
      failed = device.synchronize(at.ended);
      if (stream != StreamId::compute) {
        if (!failed && at.rounded_in != -1 && arrangement.measured_bytes != 0)
          failed = at.work->take_measured(layout.chunks()[at.task.chunk], measured_on_host(at.rounded_in));
        has_room(stream);
        if (!failed) stamp_copy(at.task);
      }
    } catch (...) {
      failed = thrown_in(at.task);
    }
    finish(id, std::move(failed));
    lock.lock();
  }
}

void Executor::Impl::has_room(StreamId stream) {
  std::lock_guard lock(mutex);
  --flight(stream).copying;
  lane_wakes[index_of(stream == StreamId::upload ? Lane::upload : Lane::download)].notify_one();
}

// Beside it there is at most one other copy in flight, from the other slot.
void Executor::Impl::round_first(Node& at) {
  follow_compute(StreamId::round, at);
  at.rounded_in = static_cast<int>(gradients_rounded++ % kGradientSlots);
  auto* rounded = reinterpret_cast<std::uint16_t*>(gradient_slot(at.rounded_in));
  device.round_gradient(StreamId::round, rounded, reinterpret_cast<const float*>(arena.data() + at.task.device_offset),
                        at.task.bytes / 2);
  if (arrangement.measured_bytes != 0)
    at.work->enqueue_measuring(layout.chunks()[at.task.chunk], device, StreamId::round, rounded,
                               measured_in(at.rounded_in));
}

// Of a gradient what is not known to be zeros. Those are written on the host.
void Executor::Impl::start_gradient(StreamId stream, Node& at) {
  Task& task = at.task;
  const std::uint64_t elements = task.bytes / swap::word_bytes(1);
  const std::vector<ElementRange> zeros = at.work->zero_gradient(layout.chunks()[task.chunk]);
  for (const ElementRange& range : zeros) at.left_out += swap::word_bytes(range.end - range.begin);
  // Where gradients add up, no client knows zeros, and other lanes may look here now.
  if (const bool all = at.left_out == task.bytes; all != static_cast<bool>(zero_gradient[task.chunk]))
    zero_gradient[task.chunk] = all;
  if (at.left_out < task.bytes && rounds_first(task)) {
    round_first(at);
    device.wait(stream, device.record(StreamId::round));
  } else if (at.left_out < task.bytes) {
    follow_compute(stream, at);
  }
  at.began = device.record_timed(stream);
  std::byte* to = host(task.gradient, task.bytes).data();
  const auto copy = [&](std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    if (at.rounded_in != -1)
      device.copy_to_host(stream, to + swap::word_bytes(begin), gradient_slot(at.rounded_in) + swap::word_bytes(begin),
                          swap::word_bytes(end - begin));
    else
      device.gradient_to_host(stream, reinterpret_cast<std::uint16_t*>(to) + begin,
                              reinterpret_cast<const float*>(arena.data() + task.device_offset) + begin, end - begin);
  };
  std::uint64_t next = 0;
  for (const ElementRange& range : zeros) {
    copy(next, range.begin);
    std::fill(to + swap::word_bytes(range.begin), to + swap::word_bytes(range.end), std::byte{0});
    next = range.end;
  }
  copy(next, elements);
  if (at.rounded_in != -1 && arrangement.measured_bytes != 0)
    device.copy_to_host(stream, measured_on_host(at.rounded_in).data(), measured_in(at.rounded_in),
                        arrangement.measured_bytes);
  task.bytes -= at.left_out;
}

void Executor::Impl::enqueue_copy(StreamId stream, const Task& task) {
  std::byte* on_device = arena.data() + task.device_offset;
  switch (task.kind) {
    case TaskKind::upload_hi:
    case TaskKind::load_activations:
      device.copy_to_device(stream, on_device, host(task.words, task.bytes).data(), task.bytes);
      break;
    case TaskKind::upload_state:
      device.copy_to_device(stream, on_device, host(task.state, task.bytes).data(), task.bytes);
      break;
    case TaskKind::upload_gradient:
      device.copy_to_device(stream, on_device, host(task.gradient, task.bytes).data(), task.bytes);
      break;
    case TaskKind::download_state:
      device.copy_to_host(stream, host(task.state, task.bytes).data(), on_device, task.bytes);
      break;
    default:
      device.copy_to_host(stream, host(task.words, task.bytes).data(), on_device, task.bytes);
  }
}

// Words or state that a task changed, in their place on the host.
void Executor::Impl::changed(ExtentKind kind, int chunk, const HostRef& place) {
  if (place.where == resident_place(kind, chunk).where)
    unsaved[static_cast<int>(kind)][chunk] = true;
  else
    store->stamp(kind, chunk, host(place, layout.chunks()[chunk].bytes(kind)));
}

void Executor::Impl::stamp_copy(const Task& task) {
  if (task.kind == TaskKind::save_activations && task.words.where == HostRef::Where::activation_buffer)
    store->stamp(ExtentKind::activations, extent_of(task).index, host(task.words, task.bytes));
  if (!task.updated) return;
  if (task.kind == TaskKind::download_hi) changed(ExtentKind::hi, task.chunk, task.words);
  if (task.kind == TaskKind::download_state) changed(ExtentKind::state, task.chunk, task.state);
  // Of state that stays there a download is a commit's.
  if (task.kind == TaskKind::download_state && arrangement.device_place(ExtentKind::state, task.chunk) != kNowhere)
    unsaved[static_cast<int>(ExtentKind::state)][task.chunk] = false;
}

io::Error Executor::Impl::work_on_device(Node& at) {
  const Task& task = at.task;
  const Chunk& chunk = layout.chunks()[task.chunk];
  follow_compute(StreamId::update, at);
  at.began = device.record_timed(StreamId::update);
  std::byte *base = arena.data(), *slot = base + task.slot;
  const auto held = [&](std::uint64_t place, std::byte* in_slot) { return place == kNowhere ? in_slot : base + place; };
  DeviceUpdate on{.sum = task.sum == kNowhere ? nullptr : reinterpret_cast<const float*>(base + task.sum),
                  .gradient = reinterpret_cast<std::uint16_t*>(held(task.held_gradient, slot)),
                  .scratch = slot + arrangement.update_slots.scratch};
  io::Error failed;
  if (task.kind == TaskKind::keep_gradient) {
    failed = at.work->keep_gradient(chunk, device, on);
  } else {
    on.words = reinterpret_cast<std::uint16_t*>(base + task.device_offset);
    on.state = held(task.held_state, slot + arrangement.update_slots.state);
    if (task.held_state != kNowhere) unsaved[static_cast<int>(ExtentKind::state)][task.chunk] = true;
    failed = at.work->update_on_device(chunk, device, on);
  }
  if (failed) return failed;
  const Event ended = device.record_timed(StreamId::update);
  {
    std::lock_guard lock(mutex);  // whoever looks at the counters looks at it too
    at.ended = ended;
  }
  return device.synchronize(ended);
}

void Executor::Impl::start_read(TaskId id, Node& at) {
  const auto [kind, index, ref] = extent_of(at.task);
  if (is_zero_gradient(at.task)) {
    std::ranges::fill(host(ref, at.task.bytes), std::byte{0});
    at.left_out = std::exchange(at.task.bytes, 0);
    return finish(id, {});
  }
  {
    std::lock_guard lock(mutex);
    if (disk_outstanding[0]++ == 0) disk_since[0] = now();
  }
  io::Buffer* const home = is_resident(ref) ? nullptr : &buffer(ref);
  io::Buffer into = home == nullptr ? memory->lend(host(ref, at.task.bytes)) : std::move(*home);
  if (options.chaos_seed != 0) std::fill(into.bytes().begin(), into.bytes().end(), std::byte{0xff});
  store->read(kind, index, std::move(into), [this, id, home](io::Completion&& completion) {
    if (home != nullptr) *home = std::move(completion.buffer);
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
  const auto [kind, index, ref] = extent_of(at.task);
  const bool resident = is_resident(ref);
  if (is_zero_gradient(at.task)) {
    at.left_out = std::exchange(at.task.bytes, 0);
    return finish(id, {});
  }
  // A commit is planned before it is known what its step changes.
  if (resident && !std::exchange(unsaved[static_cast<int>(kind)][index], false)) {
    at.task.bytes = 0;
    return finish(id, {});
  }
  {
    std::lock_guard lock(mutex);
    if (disk_outstanding[1]++ == 0) disk_since[1] = now();
  }
  if (resident) {
    const std::span<std::byte> bytes = host(ref, at.task.bytes);
    store->stamp(kind, index, bytes);
    return store->write(kind, index, memory->lend(bytes),
                        [this, id](io::Completion&& completion) { end_write(id, std::move(completion.error)); });
  }
  io::Buffer& home = buffer(ref);
  store->write(kind, index, std::move(home), [this, id, &home](io::Completion&& completion) {
    home = std::move(completion.buffer);
    end_write(id, std::move(completion.error));
  });
}

void Executor::Impl::end_write(TaskId id, io::Error failed) {
  {
    std::lock_guard lock(mutex);
    if (--disk_outstanding[1] == 0) counters[1].busy_seconds += now() - disk_since[1];
  }
  finish(id, std::move(failed));
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
    verify(id, at);
    lock.lock();
  }
}

void Executor::Impl::verify(TaskId id, Node& at) {
  io::Error wrong;
  try {
    const auto [kind, index, ref] = extent_of(at.task);
    wrong = store->verify(kind, index, host(ref, at.task.bytes));
    if (wrong && !std::exchange(at.read_again, true)) {
      store->report_second_reading(wrong);
      return start_read(id, at);
    }
  } catch (...) {
    wrong = thrown_in(at.task);
  }
  finish(id, std::move(wrong));
}

io::Error Executor::Impl::work(Node& at) {
  const Task& task = at.task;
  if (task.kind == TaskKind::update_on_device || task.kind == TaskKind::keep_gradient) return work_on_device(at);
  const Chunk& chunk = layout.chunks()[task.chunk];
  const auto gradient = host(task.gradient, chunk.word_bytes());
  if (task.kind == TaskKind::measure) {
    if (io::Error failed = at.work->measure(chunk, gradient)) return failed;
    if (task.gradient.where == HostRef::Where::word_buffer) store->stamp(ExtentKind::gradient, task.chunk, gradient);
    return {};
  }
  const auto low = host(task.gradient_low, chunk.word_bytes());
  if (task.kind == TaskKind::accumulate) {
    if (io::Error failed =
            at.work->accumulate(chunk, host(task.incoming, chunk.word_bytes()), gradient, low, task.first_sum))
      return failed;
    if (task.gradient.where == HostRef::Where::word_buffer) store->stamp(ExtentKind::gradient, task.chunk, gradient);
    if (task.gradient_low.where == HostRef::Where::word_buffer) store->stamp(ExtentKind::gradient_low, task.chunk, low);
    return {};
  }
  if (!low.empty())
    if (io::Error failed = at.work->round_sum(chunk, gradient, low)) return failed;
  const auto words = host(task.words, chunk.word_bytes());
  const auto state = host(task.state, chunk.state_bytes);
  if (io::Error failed = task.kind == TaskKind::catch_up ? at.work->catch_up(chunk, words, state)
                                                         : at.work->update(chunk, gradient, words, state))
    return failed;
  changed(ExtentKind::hi, task.chunk, task.words);
  changed(ExtentKind::state, task.chunk, task.state);
  return {};
}

}  // namespace tierflow::swap
