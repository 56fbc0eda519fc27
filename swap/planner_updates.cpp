// How gradients leave the device and become updates: at once, or in the next step ahead of the unit's forward.
#include <algorithm>

#include "swap/access.h"
#include "swap/planner.h"

namespace tierflow::swap {
namespace {

// How a chunk's extent of each kind moves between storage and the host.
struct ExtentTasks {
  TaskKind read, write;
  Space stored;
  HostRef Task::*place;
};
constexpr ExtentTasks kExtentTasks[] = {
    {TaskKind::read_hi, TaskKind::write_hi, Space::stored_hi, &Task::words},
    {TaskKind::read_state, TaskKind::write_state, Space::stored_state, &Task::state},
    {TaskKind::read_gradient, TaskKind::write_gradient, Space::stored_gradient, &Task::gradient},
    {TaskKind::read_gradient_low, TaskKind::write_gradient_low, Space::stored_gradient_low, &Task::gradient_low}};

}  // namespace

// After the last visit that adds to a unit's gradient: keep it for later, or update at once, chunk by chunk.
void Planner::take_gradients(const Visit& visit) {
  const StageShape& stage = layout_.stages()[visit.stage];
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    const int unit = stage.units[i];
    if (layout_.gradient_bytes(unit) == 0) continue;
    // Backward runs from the last stage to the first: the first stage that uses a unit is the last to add to its
    // gradient.
    const auto uses = [&](const StageShape& other) {
      return std::find(other.units.begin(), other.units.end(), unit) != other.units.end();
    };
    const auto first_user = std::find_if(layout_.stages().begin(), layout_.stages().end(), uses);
    if (first_user - layout_.stages().begin() != visit.stage) continue;
    bool updated = false;
    for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) {
      const std::uint64_t from = visit.gradients[i] + 4 * chunk.first;
      if (arrangement_.deferred[layout_.first_chunk(unit) + chunk.index]) {
        stage_gradient(chunk, from);
        continue;
      }
      updated = true;
      if (arrangement_.on_device[layout_.first_chunk(unit) + chunk.index])
        update_on_device(chunk, visit.weights[i] + 2 * chunk.first, from, {});
      else
        update_now(chunk, from, visit.weights[i] == kNowhere ? kNowhere : visit.weights[i] + 2 * chunk.first);
    }
    if (updated) invalidate(unit);
  }
}

HostRef Planner::download_gradient(const Chunk& chunk, std::uint64_t from) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const HostRef to =
      arrangement_.gradient_resident[id] ? HostRef{HostRef::Where::resident_gradient, id} : take_word_buffer();
  download_gradient(chunk, from, to);
  return to;
}

void Planner::download_gradient(const Chunk& chunk, std::uint64_t from, HostRef to) {
  Task& download = emit(TaskKind::download_gradient, Lane::download,
                        {device_access(from, 4 * chunk.elements, false), host_access(to, true)});
  download.chunk = layout_.first_chunk(chunk.unit) + chunk.index;
  download.gradient = to;
  download.device_offset = from;
  download.bytes = chunk.word_bytes();
}

void Planner::stage_gradient(const Chunk& chunk, std::uint64_t from) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const HostRef gradient = download_gradient(chunk, from);
  Task& measure = emit(TaskKind::measure, Lane::update, {host_access(gradient, false)});
  measure.chunk = id;
  measure.gradient = gradient;
  measure.bytes = chunk.word_bytes();
  if (gradient.where != HostRef::Where::word_buffer) return;
  // It follows measure(), which makes the checksum that goes with the data.
  write_extent(ExtentKind::gradient, id, gradient, /*follows_readers=*/true);
}

void Planner::update_now(const Chunk& chunk, std::uint64_t gradient_from, std::uint64_t words_from) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const HostRef gradient = download_gradient(chunk, gradient_from);
  HostRef words{HostRef::Where::resident_hi, id};
  if (!arrangement_.hi_resident[id] && words_from != kNowhere) {
    words = take_word_buffer();
    Task& download = emit(TaskKind::download_hi, Lane::download,
                          {device_access(words_from, chunk.word_bytes(), false), host_access(words, true)});
    download.chunk = id;
    download.words = words;
    download.device_offset = words_from;
    download.bytes = chunk.word_bytes();
  } else {
    words = read_words(chunk);
  }
  emit_update(chunk, words, gradient, read_state(chunk));
}

HostRef Planner::update_pending(const Chunk& chunk) {
  const HostRef words = read_words(chunk), gradient = read_gradient(chunk);
  emit_update(chunk, words, gradient, read_state(chunk));
  return words;
}

HostRef Planner::read_gradient(const Chunk& chunk) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  if (arrangement_.gradient_resident[id]) return {HostRef::Where::resident_gradient, id};
  return read_extent(ExtentKind::gradient, id, take_word_buffer());
}

void Planner::update_on_device(const Chunk& chunk, std::uint64_t words_at, std::uint64_t sum, HostRef home) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const UpdateSlots& slots = arrangement_.update_slots;
  const std::uint64_t slot =
      arrangement_.update_slots_begin() + static_cast<std::uint64_t>(next_update_slot_++ % slots.count) * slots.bytes;
  const HostRef state = read_state(chunk);
  Task& up = emit(TaskKind::upload_state, Lane::upload,
                  {host_access(state, false), device_access(slot + slots.state, chunk.state_bytes, true)});
  up.chunk = id;
  up.state = state;
  up.device_offset = slot + slots.state;
  up.bytes = chunk.state_bytes;
  std::vector<Access> accesses{device_access(words_at, chunk.word_bytes(), true),
                               device_access(slot, slots.bytes, true)};
  if (sum == kNowhere) {
    const HostRef gradient = read_gradient(chunk);
    Task& upload = emit(TaskKind::upload_gradient, Lane::upload,
                        {host_access(gradient, false), device_access(slot, chunk.word_bytes(), true)});
    upload.chunk = id;
    upload.gradient = gradient;
    upload.device_offset = slot;
    upload.bytes = chunk.word_bytes();
  } else {
    accesses.push_back(device_access(sum, 4 * chunk.elements, false));
  }
  Task& update = emit(TaskKind::update_on_device, Lane::update, std::move(accesses));
  update.chunk = id;
  update.device_offset = words_at;
  update.sum = sum;
  update.slot = slot;
  update.bytes = chunk.word_bytes();
  Task& down = emit(TaskKind::download_state, Lane::download,
                    {device_access(slot + slots.state, chunk.state_bytes, false), host_access(state, true)});
  down.chunk = id;
  down.state = state;
  down.device_offset = slot + slots.state;
  down.bytes = chunk.state_bytes;
  down.updated = true;
  if (home.where == HostRef::Where::none)
    home = arrangement_.hi_resident[id] ? HostRef{HostRef::Where::resident_hi, id} : take_word_buffer();
  Task& words = emit(TaskKind::download_hi, Lane::download,
                     {device_access(words_at, chunk.word_bytes(), false), host_access(home, true)});
  words.chunk = id;
  words.words = home;
  words.device_offset = words_at;
  words.bytes = chunk.word_bytes();
  words.updated = true;
  write_updated(chunk, home, state);
}

HostRef Planner::read_words(const Chunk& chunk) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  if (arrangement_.hi_resident[id]) return {HostRef::Where::resident_hi, id};
  return read_extent(ExtentKind::hi, id, take_word_buffer());
}

HostRef Planner::read_state(const Chunk& chunk) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  if (arrangement_.state_resident[id]) return {HostRef::Where::resident_state, id};
  return read_extent(ExtentKind::state, id, take_state_buffer());
}

void Planner::emit_update(const Chunk& chunk, HostRef words, HostRef gradient, HostRef state, HostRef low) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const bool sum = low.where != HostRef::Where::none;
  std::vector<Access> accesses{host_access(words, true), host_access(gradient, sum), host_access(state, true)};
  if (sum) accesses.push_back(host_access(low, false));
  Task& update = emit(TaskKind::update, Lane::update, std::move(accesses));
  update.gradient_low = low;
  update.chunk = id;
  update.words = words;
  update.gradient = gradient;
  update.state = state;
  update.bytes = chunk.word_bytes();
  write_updated(chunk, words, state);
}

void Planner::write_updated(const Chunk& chunk, HostRef words, HostRef state) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  if (!arrangement_.hi_resident[id]) write_extent(ExtentKind::hi, id, words);
  if (!arrangement_.state_resident[id]) write_extent(ExtentKind::state, id, state);
}

HostRef Planner::read_extent(ExtentKind kind, int chunk, HostRef to) {
  const ExtentTasks& of = kExtentTasks[static_cast<int>(kind)];
  fill_in(emit(of.read, Lane::disk_read, {cell_access(of.stored, chunk, false), host_access(to, true)}), kind, chunk,
          to);
  return to;
}

void Planner::write_extent(ExtentKind kind, int chunk, HostRef from, bool follows_readers) {
  const ExtentTasks& of = kExtentTasks[static_cast<int>(kind)];
  fill_in(emit(of.write, Lane::disk_write, {host_access(from, follows_readers), cell_access(of.stored, chunk, true)}),
          kind, chunk, from);
}

void Planner::fill_in(Task& task, ExtentKind kind, int chunk, HostRef place) const {
  const Chunk& shape = layout_.chunks()[chunk];
  task.chunk = chunk;
  task.*kExtentTasks[static_cast<int>(kind)].place = place;
  task.bytes = kind == ExtentKind::state ? shape.state_bytes : shape.word_bytes();
}

}  // namespace tierflow::swap
