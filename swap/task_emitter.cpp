#include "swap/task_emitter.h"

#include <utility>

#include "swap/access.h"

namespace tierflow::swap {
namespace {

// How a chunk's extent of each kind moves. The low words of a sum never meet the device.
struct ExtentTasks {
  Space stored;
  HostRef::Where buffer;
  HostRef Task::*place;
  TaskKind read, write, upload, download;
};
constexpr ExtentTasks kExtentTasks[] = {
    {Space::stored_hi, HostRef::Where::word_buffer, &Task::words, TaskKind::read_hi, TaskKind::write_hi,
     TaskKind::upload_hi, TaskKind::download_hi},
    {Space::stored_state, HostRef::Where::state_buffer, &Task::state, TaskKind::read_state, TaskKind::write_state,
     TaskKind::upload_state, TaskKind::download_state},
    {Space::stored_gradient, HostRef::Where::word_buffer, &Task::gradient, TaskKind::read_gradient,
     TaskKind::write_gradient, TaskKind::upload_gradient, TaskKind::download_gradient},
    {Space::stored_gradient_low, HostRef::Where::word_buffer, &Task::gradient_low, TaskKind::read_gradient_low,
     TaskKind::write_gradient_low}};

const Task kBlank;
constexpr std::size_t kPart = 256;  // tasks, which stay in the processor's caches

const ExtentTasks& tasks_of(ExtentKind kind) {
  return kExtentTasks[static_cast<int>(kind)];
}

}  // namespace

TaskEmitter::TaskEmitter(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout), arrangement_(arrangement) {}

Plan TaskEmitter::take() {
  tasks_.resize(std::exchange(emitted_, 0));
  Plan plan{.first_id = next_id_, .tasks = std::exchange(tasks_, {}), .visits = std::exchange(visits_, {})};
  for (Task& task : plan.tasks) task.dependencies = hazards_.add(next_id_++, task.lane, task.accesses);
  return plan;
}

void TaskEmitter::serve(Pass pass, int stage) {
  pass_ = pass;
  stage_ = stage;
}

Task& TaskEmitter::emit(TaskKind kind, Lane lane, std::initializer_list<Access> accesses) {
  if (take_part_ && emitted_ == kPart) {
    Plan part = take();
    take_part_(part);
    tasks_ = std::move(part.tasks);
  }
  if (emitted_ == tasks_.size()) tasks_.emplace_back();
  Task& task = tasks_[emitted_++];
  task = kBlank;  // its lists keep their memory
  task.kind = kind;
  task.lane = lane;
  task.pass = pass_;
  task.stage = stage_;
  task.accesses = accesses;
  return task;
}

Task& TaskEmitter::compute(const Visit& visit, int micro_batch, std::uint64_t slot, std::uint64_t slot_bytes) {
  serve(visit.pass, visit.stage);
  Task& task = emit(TaskKind::compute, Lane::compute, {});
  if (visits_.empty() || micro_batch == 0) visits_.push_back(visit);
  for (std::size_t i = 0; i < visit.weights.size(); ++i) {
    const int unit = visit.unit(layout_.stages()[visit.stage].units, i);
    if (visit.weights[i] != kNowhere)
      task.accesses.push_back(device_access(visit.weights[i], layout_.unit_word_bytes(unit), false));
    if (visit.gradients[i] != kNowhere)
      task.accesses.push_back(device_access(visit.gradients[i], layout_.gradient_bytes(unit), true));
  }
  if (slot != kNowhere) task.accesses.push_back(device_access(slot, slot_bytes, true));
  task.visit = static_cast<int>(visits_.size()) - 1;
  task.micro_batch = micro_batch;
  task.device_offset = slot;
  return task;
}

HostRef TaskEmitter::take_buffer(HostRef::Where where) {
  switch (where) {
    case HostRef::Where::word_buffer:
      return {where, next_word_++ % arrangement_.word_buffers};
    case HostRef::Where::state_buffer:
      return {where, next_state_++ % arrangement_.state_buffers};
    default:
      return {where, next_activation_++ % arrangement_.activation_buffers};
  }
}

HostRef TaskEmitter::place(ExtentKind kind, int chunk) {
  return arrangement_.resident(kind, chunk) ? resident_place(kind, chunk) : take_buffer(tasks_of(kind).buffer);
}

HostRef TaskEmitter::read(ExtentKind kind, int chunk) {
  if (arrangement_.resident(kind, chunk)) return resident_place(kind, chunk);
  return read_into(kind, chunk, take_buffer(tasks_of(kind).buffer));
}

HostRef TaskEmitter::read_into(ExtentKind kind, int chunk, HostRef to) {
  const ExtentTasks& of = tasks_of(kind);
  fill_in(emit(of.read, Lane::disk_read, {cell_access(of.stored, chunk, false), host_access(to, true)}), kind, chunk,
          to);
  return to;
}

void TaskEmitter::read_back(ExtentKind kind, int chunk) {
  if (const std::uint64_t on_device = arrangement_.device_place(kind, chunk); on_device != kNowhere) {
    upload(kind, chunk, read(kind, chunk), on_device);
    return;
  }
  if (arrangement_.resident(kind, chunk)) read_into(kind, chunk, resident_place(kind, chunk));
}

TaskEmitter::Gradient TaskEmitter::read_gradient(int chunk, bool is_sum) {
  Gradient gradient{.high = read(ExtentKind::gradient, chunk)};
  if (is_sum) gradient.low = read(ExtentKind::gradient_low, chunk);
  return gradient;
}

void TaskEmitter::write(ExtentKind kind, int chunk, HostRef from, bool follows_readers, Resident resident) {
  if (resident == Resident::stays && arrangement_.resident(kind, chunk)) return;
  const ExtentTasks& of = tasks_of(kind);
  fill_in(emit(of.write, Lane::disk_write, {host_access(from, follows_readers), cell_access(of.stored, chunk, true)}),
          kind, chunk, from);
}

Task& TaskEmitter::upload(ExtentKind kind, int chunk, HostRef from, std::uint64_t to) {
  Task& task = fill_in(emit(tasks_of(kind).upload, Lane::upload,
                            {host_access(from, false), device_access(to, layout_.chunks()[chunk].bytes(kind), true)}),
                       kind, chunk, from);
  task.device_offset = to;
  return task;
}

Task& TaskEmitter::download(ExtentKind kind, int chunk, std::uint64_t from, HostRef to) {
  const std::uint64_t bytes = layout_.chunks()[chunk].bytes(kind) * (kind == ExtentKind::gradient ? 2 : 1);
  Task& task =
      fill_in(emit(tasks_of(kind).download, Lane::download, {device_access(from, bytes, false), host_access(to, true)}),
              kind, chunk, to);
  task.device_offset = from;
  return task;
}

void TaskEmitter::take_gradient(int chunk, std::uint64_t from) {
  const std::uint64_t bytes = layout_.chunks()[chunk].word_bytes();
  if (const std::uint64_t place = arrangement_.device_place(ExtentKind::gradient, chunk); place != kNowhere) {
    const std::uint64_t slot = next_update_slot();
    Task& keep = fill_in(emit(TaskKind::keep_gradient, Lane::update,
                              {device_access(from, 2 * bytes, false), device_access(place, bytes, true),
                               device_access(slot, arrangement_.update_slots.bytes, true)}),
                         ExtentKind::gradient, chunk, {});
    keep.sum = from;
    keep.held_gradient = place;
    keep.slot = slot;
    return;
  }
  const HostRef gradient = place(ExtentKind::gradient, chunk);
  download(ExtentKind::gradient, chunk, from, gradient);
  fill_in(emit(TaskKind::measure, Lane::update, {host_access(gradient, false)}), ExtentKind::gradient, chunk, gradient)
      .found = arrangement_.measured_bytes != 0;
  // It follows measure(), which makes the checksum that goes with the data.
  write(ExtentKind::gradient, chunk, gradient, /*follows_readers=*/true);
}

void TaskEmitter::accumulate(int chunk, std::uint64_t from, bool first_sum) {
  const HostRef incoming = take_buffer(HostRef::Where::word_buffer);
  download(ExtentKind::gradient, chunk, from, incoming);
  const HostRef high = read(ExtentKind::gradient, chunk),
                low = first_sum ? place(ExtentKind::gradient_low, chunk) : read(ExtentKind::gradient_low, chunk);
  Task& sum = fill_in(emit(TaskKind::accumulate, Lane::update,
                           {host_access(incoming, false), host_access(high, true), host_access(low, true)}),
                      ExtentKind::gradient, chunk, high);
  sum.incoming = incoming;
  sum.gradient_low = low;
  sum.first_sum = first_sum;
  write(ExtentKind::gradient, chunk, high);
  write(ExtentKind::gradient_low, chunk, low);
}

void TaskEmitter::update(int chunk, HostRef words, Gradient gradient, bool measures) {
  const HostRef state = read(ExtentKind::state, chunk);
  const bool is_sum = gradient.low.where != HostRef::Where::none;
  Task& update = fill_in(emit(TaskKind::update, Lane::update,
                              {host_access(words, true), host_access(gradient.high, is_sum), host_access(state, true)}),
                         ExtentKind::hi, chunk, words);
  if (is_sum) update.accesses.push_back(host_access(gradient.low, false));
  update.gradient = gradient.high;
  update.gradient_low = gradient.low;
  update.state = state;
  update.measures = measures;
  update.found = measures && arrangement_.measured_bytes != 0;
  write(ExtentKind::hi, chunk, words);
  write(ExtentKind::state, chunk, state);
}

void TaskEmitter::catch_up(int chunk, HostRef words) {
  const HostRef state = read(ExtentKind::state, chunk);
  fill_in(emit(TaskKind::catch_up, Lane::update, {host_access(words, true), host_access(state, true)}), ExtentKind::hi,
          chunk, words)
      .state = state;
  write(ExtentKind::hi, chunk, words);
  write(ExtentKind::state, chunk, state);
}

std::uint64_t TaskEmitter::next_update_slot() {
  const UpdateSlots& slots = arrangement_.update_slots;
  return arrangement_.update_slots_begin() +
         static_cast<std::uint64_t>(next_update_slot_++ % slots.count) * slots.bytes;
}

void TaskEmitter::update_on_device(int chunk, std::uint64_t words_at, std::uint64_t sum, HostRef home) {
  const UpdateSlots& slots = arrangement_.update_slots;
  const std::uint64_t slot = next_update_slot(), held_state = arrangement_.device_place(ExtentKind::state, chunk),
                      held_gradient = arrangement_.device_place(ExtentKind::gradient, chunk);
  const Chunk& of = layout_.chunks()[chunk];
  HostRef state;
  if (held_state == kNowhere) {
    state = read(ExtentKind::state, chunk);
    upload(ExtentKind::state, chunk, state, slot + slots.state);
  }
  if (sum == kNowhere && held_gradient == kNowhere)
    upload(ExtentKind::gradient, chunk, read(ExtentKind::gradient, chunk), slot);
  Task& update = fill_in(emit(TaskKind::update_on_device, Lane::update,
                              {device_access(words_at, of.word_bytes(), true), device_access(slot, slots.bytes, true)}),
                         ExtentKind::hi, chunk, {});
  if (sum != kNowhere) update.accesses.push_back(device_access(sum, 2 * of.word_bytes(), false));
  if (held_state != kNowhere) update.accesses.push_back(device_access(held_state, of.state_bytes, true));
  if (held_gradient != kNowhere)
    update.accesses.push_back(device_access(held_gradient, of.word_bytes(), /*writes=*/sum != kNowhere));
  update.device_offset = words_at;
  update.sum = sum;
  update.slot = slot;
  update.held_state = held_state;
  update.held_gradient = held_gradient;
  if (held_state == kNowhere) download(ExtentKind::state, chunk, slot + slots.state, state).updated = true;
  download(ExtentKind::hi, chunk, words_at, home).updated = true;
  write(ExtentKind::hi, chunk, home);
  if (held_state == kNowhere) write(ExtentKind::state, chunk, state);
}

void TaskEmitter::commit() {
  serve(Pass::forward, -1);
  std::vector<Access> accesses;
  for (const Chunk& chunk : layout_.chunks()) {
    if (!chunk.trainable) continue;
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
      if (arrangement_.resident(kind, chunk.id))
        write(kind, chunk.id, resident_place(kind, chunk.id), /*follows_readers=*/false, Resident::is_written);
      if (const std::uint64_t from = arrangement_.device_place(kind, chunk.id); from != kNowhere) {
        const HostRef through = take_buffer(tasks_of(kind).buffer);
        download(kind, chunk.id, from, through).updated = true;
        write(kind, chunk.id, through);
      }
      accesses.push_back(cell_access(tasks_of(kind).stored, chunk.id, false));
    }
  }
  emit(TaskKind::commit, Lane::commit, {}).accesses = std::move(accesses);
}

Task& TaskEmitter::fill_in(Task& task, ExtentKind kind, int chunk, HostRef place) const {
  task.chunk = chunk;
  task.*tasks_of(kind).place = place;
  task.bytes = layout_.chunks()[chunk].bytes(kind);
  return task;
}

}  // namespace tierflow::swap
