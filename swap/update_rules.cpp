#include "swap/update_rules.h"

#include <tuple>
#include <utility>

namespace tierflow::swap {

UpdateRules::UpdateRules(const Layout& layout, const Arrangement& arrangement, Ledger& ledger)
    : layout_(layout), arrangement_(arrangement), ledger_(ledger) {
  for (auto* list : {&version_, &updated_, &measured_}) list->assign(layout.chunks().size(), 0);
}

void UpdateRules::begin_plan() {
  for (const int chunk : seen_) updated_[chunk] = measured_[chunk] = 0;
  seen_.clear();
}

void UpdateRules::changed(int chunk) {
  ++version_[chunk];
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    ledger_.home(kind, chunk).content.version = version_[chunk];
}

void UpdateRules::go_back(int chunk) {
  --version_[chunk];
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    ledger_.stored(kind, chunk).content.version = version_[chunk];
}

void UpdateRules::commit(const std::vector<int>& versions) {
  for (const Chunk& chunk : layout_.chunks()) {
    if (!chunk.trainable) continue;
    const int id = chunk.id;
    ledger_.read(ledger_.stored(ExtentKind::hi, id), {What::words, id, versions[id]}, "storage");
    ledger_.read(ledger_.stored(ExtentKind::state, id), {What::state, id, versions[id]}, "storage");
  }
}

bool UpdateRules::names_chunk(const Task& task) {
  const bool named = task.chunk >= 0 && task.chunk < static_cast<int>(version_.size());
  if (!named) ledger_.wrong("names no chunk");
  return named;
}

bool UpdateRules::move(const Task& task) {
  const bool is_state = task.kind == TaskKind::read_state || task.kind == TaskKind::write_state ||
                        task.kind == TaskKind::upload_state || task.kind == TaskKind::download_state;
  const Content content{is_state ? What::state : What::words, task.chunk, version_[task.chunk]};
  Ledger::Held& stored = ledger_.stored(is_state ? ExtentKind::state : ExtentKind::hi, task.chunk);
  const HostRef& place = is_state ? task.state : task.words;
  switch (task.kind) {
    case TaskKind::read_hi:
    case TaskKind::read_state:
      ledger_.read(stored, content, "storage");
      ledger_.write(ledger_.host(place), content);
      return true;
    case TaskKind::write_hi:
    case TaskKind::write_state:
      ledger_.read(ledger_.host(place), content, "the host buffer");
      ledger_.write(stored, content);
      return true;
    case TaskKind::upload_hi:
    case TaskKind::upload_state:
      ledger_.read(ledger_.host(place), content, "the host buffer");
      ledger_.write_device(task.device_offset, task.bytes, content);
      return true;
    case TaskKind::download_hi:
    case TaskKind::download_state:
      ledger_.read_device(task.device_offset, task.bytes, content);
      ledger_.write(ledger_.host(place), content);
      return true;
    default:
      return false;
  }
}

void UpdateRules::measure(const Task& task, const Content& gradient) {
  Ledger::Held& held = ledger_.host(task.gradient);
  ++measured_[task.chunk];
  seen_.push_back(task.chunk);
  ledger_.read(held, gradient, "the gradient");
  // What writes it to storage takes the checksum made here along.
  if (task.gradient.where == HostRef::Where::word_buffer) ledger_.write(held, gradient);
}

void UpdateRules::keep_gradient(const Task& task, const Content& gradient) {
  ++measured_[task.chunk];
  seen_.push_back(task.chunk);
  const UpdateSlots& slots = arrangement_.update_slots;
  ledger_.write_device(task.held_gradient, layout_.chunks()[task.chunk].word_bytes(), gradient);
  ledger_.write_device(task.slot + slots.scratch, slots.bytes - slots.scratch, {});
}

void UpdateRules::update(const Task& task) {
  ++updated_[task.chunk];
  seen_.push_back(task.chunk);
  change(task, version_[task.chunk] + 1);
}

void UpdateRules::catch_up(const Task& task, int to) {
  if (to <= version_[task.chunk]) ledger_.wrong("the chunk has missed nothing");
  change(task, to);
}

// Of words and state on the host.
void UpdateRules::change(const Task& task, int to) {
  const int before = std::exchange(version_[task.chunk], to);
  for (const auto& [place, what, name] :
       {std::tuple{&task.words, What::words, "the words"}, std::tuple{&task.state, What::state, "the state"}}) {
    Ledger::Held& held = ledger_.host(*place);
    ledger_.read(held, {what, task.chunk, before}, name);
    ledger_.write(held, {what, task.chunk, to});
  }
}

void UpdateRules::update_on_device(const Task& task) {
  const int before = version_[task.chunk]++;
  ++updated_[task.chunk];
  seen_.push_back(task.chunk);
  const Chunk& chunk = layout_.chunks()[task.chunk];
  const UpdateSlots& slots = arrangement_.update_slots;
  const std::uint64_t state = task.held_state == kNowhere ? task.slot + slots.state : task.held_state;
  for (const auto& [begin, bytes, what] : {std::tuple{task.device_offset, chunk.word_bytes(), What::words},
                                           std::tuple{state, chunk.state_bytes, What::state}}) {
    ledger_.read_device(begin, bytes, {what, task.chunk, before});
    ledger_.write_device(begin, bytes, {what, task.chunk, before + 1});
  }
  ledger_.write_device(task.slot + slots.scratch, slots.bytes - slots.scratch, {});
}

}  // namespace tierflow::swap
