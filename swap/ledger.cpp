#include "swap/ledger.h"

#include <algorithm>

namespace tierflow::swap {

Ledger::Ledger(const Layout& layout, const Arrangement& arrangement) : arrangement_(arrangement) {
  for (const ExtentKind kind : kChunkExtents) stored_[static_cast<int>(kind)].resize(layout.chunks().size());
  stored_[static_cast<int>(ExtentKind::activations)].resize(arrangement.items.size());
  for (const HostBuffer& buffer : arrangement.host_buffers(layout)) {
    std::vector<Held>& list = host_[static_cast<int>(buffer.place.where)];
    list.resize(std::max<std::size_t>(list.size(), buffer.place.index + 1));
    list[buffer.place.index].exists = true;
  }
  for (const Chunk& chunk : layout.chunks()) {
    if (const std::uint64_t at = arrangement.device_place(ExtentKind::state, chunk.id); at != kNowhere)
      device_[at].end = at + chunk.state_bytes;
    home(ExtentKind::hi, chunk.id).content = {What::words, chunk.id};
    home(ExtentKind::state, chunk.id).content = {What::state, chunk.id};
  }
}

void Ledger::begin(const Task& task) {
  task_ = &task;
  if (dependencies_begin_.empty()) {
    first_id_ = id_;
    dependencies_begin_ = {0};
  }
  const auto begin = dependencies_.insert(dependencies_.end(), task.dependencies.begin(), task.dependencies.end());
  if (!std::is_sorted(begin, dependencies_.end())) std::sort(begin, dependencies_.end());
  dependencies_begin_.push_back(dependencies_.size());
  seen_.push_back(0);
  known_by_.push_back(id_);
  in_place_of_.push_back(id_);
  after_.push_back(0);
  before_.push_back(0);
  if (!task.dependencies.empty() && dependencies_.back() >= id_)
    return wrong("depends on a later task: the lanes would deadlock");
  for (const TaskId earlier : dependencies_of(id_))
    after_.back() = std::max(after_.back(), after_[earlier - first_id_]);
  if (task.lane == Lane::compute && after_.back() == chain_length_) lengthen_chain();
}

void Ledger::lengthen_chain() {
  after_.back() = before_.back() = ++chain_length_;
  open_.assign(1, id_);
  while (!open_.empty()) {
    const auto earlier = dependencies_of(open_.back());
    open_.pop_back();
    for (const TaskId task : earlier)
      if (std::uint32_t& before = before_[task - first_id_]; before == 0) {
        before = chain_length_;
        open_.push_back(task);
      }
  }
}

void Ledger::wrong(const std::string& detail) {
  if (!problem_.empty()) return;
  problem_ = "at the end of the plan: ";
  if (task_ != nullptr)
    problem_ = "task " + std::to_string(id_) + " (" + task_name(task_->kind) + ", stage " +
               std::to_string(task_->stage) + ", chunk " + std::to_string(task_->chunk) + "): ";
  problem_ += detail;
}

io::Error Ledger::error() const {
  if (problem_.empty()) return {};
  return {.kind = io::ErrorKind::corruption, .operation = "check the plan", .detail = problem_};
}

Ledger::Held& Ledger::host(const HostRef& ref) {
  std::vector<Held>& list = host_[static_cast<int>(ref.where)];
  if (ref.index >= 0 && ref.index < static_cast<int>(list.size()) && list[ref.index].exists) return list[ref.index];
  wrong("names host memory that does not exist");
  return nowhere_;
}

Ledger::Held& Ledger::home(ExtentKind kind, int chunk) {
  if (const std::uint64_t at = arrangement_.device_place(kind, chunk); at != kNowhere) {
    if (const auto found = device_.find(at); found != device_.end()) return found->second;
    wrong("has lost what stays on the device");
    return nowhere_;
  }
  return arrangement_.resident(kind, chunk) ? host(resident_place(kind, chunk)) : stored(kind, chunk);
}

std::span<const TaskId> Ledger::dependencies_of(TaskId task) const {
  const std::size_t at = task - first_id_;
  return std::span(dependencies_)
      .subspan(dependencies_begin_[at], dependencies_begin_[at + 1] - dependencies_begin_[at]);
}

// Whether the task at hand waits for `earlier`, directly or through others. Most are found at once: directly, or
// because the chain has a task between the two, or because a search for another came by. Else the search goes to the
// oldest first, for what it looks for is older than all that it may pass.
bool Ledger::follows(TaskId earlier) const {
  const std::uint32_t before = before_[earlier - first_id_];
  if (before != 0 && before <= after_[id_ - first_id_]) return true;
  if (known_by_[earlier - first_id_] == id_) return true;
  ++search_;
  open_.assign(1, id_);
  while (!open_.empty()) {
    const auto before = dependencies_of(open_.back());
    open_.pop_back();
    const auto nearest = std::lower_bound(before.begin(), before.end(), earlier);
    if (nearest != before.end() && *nearest == earlier) return true;
    for (std::size_t i = before.size(); i-- > static_cast<std::size_t>(nearest - before.begin());) {
      std::uint32_t& seen = seen_[before[i] - first_id_];
      if (seen == search_) continue;
      seen = search_;
      known_by_[before[i] - first_id_] = id_;
      open_.push_back(before[i]);
    }
  }
  return false;
}

void Ledger::read(Held& held, const Content& expected, const char* where) {
  read(held, expected, where, 0, 1);
}

void Ledger::write(Held& held, const Content& content) {
  write(held, content, 0, 1);
}

void Ledger::read(Held& held, const Content& expected, const char* where, std::uint64_t begin, std::uint64_t end) {
  if (held.content != expected) wrong(std::string(where) + " does not hold what it needs");
  if (held.written && held.writer != id_ && !follows(held.writer))
    wrong("does not wait for task " + std::to_string(held.writer) + ", which writes what it reads");
  held.readers.push_back({id_, begin, end});
}

void Ledger::write(Held& held, const Content& content, std::uint64_t begin, std::uint64_t end) {
  if (held.written && held.writer != id_ && !follows(held.writer))
    wrong("does not wait for task " + std::to_string(held.writer) + ", which writes the same bytes");
  for (const Reader& reader : held.readers)
    if (reader.begin < end && begin < reader.end)
      if (const TaskId last = last_in_place_of(reader.task); last != id_ && !follows(last))
        wrong("overwrites what task " + std::to_string(last) + " may still be reading");
  held.content = content;
  held.written = true;
  held.writer = id_;
  held.readers.clear();
}

bool Ledger::in_arena(std::uint64_t begin, std::uint64_t bytes) {
  const bool inside = begin <= arrangement_.device_bytes() && bytes <= arrangement_.device_bytes() - begin;
  if (!inside) wrong("reaches beyond the device arena");
  return inside;
}

void Ledger::split(std::uint64_t at) {
  auto next = device_.upper_bound(at);
  if (next == device_.begin()) return;
  const auto found = std::prev(next);
  if (found->first == at || found->second.end <= at) return;
  Range tail = found->second;
  tail.content = {};  // part of something is nothing to rely on
  found->second.content = {};
  found->second.end = at;
  device_.emplace(at, std::move(tail));
}

void Ledger::read_device(std::uint64_t begin, std::uint64_t bytes, const Content& expected) {
  if (!in_arena(begin, bytes)) return;
  // A chunk's part of a gradient sum is read by itself.
  auto at = device_.upper_bound(begin);
  if (at != device_.begin() && std::prev(at)->second.end > begin) --at;
  std::uint64_t written = begin;  // all bytes before it
  for (; at != device_.end() && at->first <= written && written < begin + bytes; ++at) {
    read(at->second, expected, "the device", begin, begin + bytes);
    written = at->second.end;
  }
  if (written < begin + bytes) wrong("reads device memory that nothing has written");
}

bool Ledger::reads_again(std::uint64_t begin, std::uint64_t bytes) {
  for (ReadWhole& whole : read_wholes_)
    if (whole.begin == begin && whole.end == begin + bytes &&
        std::ranges::binary_search(dependencies_of(id_), whole.last)) {
      // Whoever waits for this task waits for the other one too.
      in_place_of_[whole.last - first_id_] = id_;
      whole.last = id_;
      return true;
    }
  return false;
}

void Ledger::has_read(std::uint64_t begin, std::uint64_t bytes) {
  constexpr std::size_t kRemembered = 4;  // the weights of one visit
  if (read_wholes_.size() == kRemembered) read_wholes_.erase(read_wholes_.begin());
  read_wholes_.push_back({begin, begin + bytes, id_});
}

TaskId Ledger::last_in_place_of(TaskId reader) const {
  TaskId last = reader;
  while (in_place_of_[last - first_id_] != last) last = in_place_of_[last - first_id_];
  in_place_of_[reader - first_id_] = last;  // shortens the way of the next one who asks
  return last;
}

void Ledger::write_device(std::uint64_t begin, std::uint64_t bytes, const Content& content) {
  if (!in_arena(begin, bytes) || bytes == 0) return;
  std::erase_if(read_wholes_, [&](const ReadWhole& whole) { return whole.begin < begin + bytes && begin < whole.end; });
  split(begin);
  split(begin + bytes);
  Range range;
  auto at = device_.lower_bound(begin);
  while (at != device_.end() && at->first < begin + bytes) {
    write(at->second, content, begin, begin + bytes);
    at = device_.erase(at);
  }
  range.content = content;
  range.written = true;
  range.writer = id_;
  range.end = begin + bytes;
  device_.emplace(begin, std::move(range));
}

Content Ledger::on_device(std::uint64_t begin) const {
  const auto found = device_.find(begin);
  return found == device_.end() ? Content{} : found->second.content;
}

}  // namespace tierflow::swap
