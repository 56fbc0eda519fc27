// What the checker knows of every byte: who wrote it, who reads it, and whether whoever comes next waits for them.
#include <algorithm>

#include "swap/check.h"

namespace tierflow::swap {

PlanChecker::Held& PlanChecker::host(const HostRef& ref) {
  std::vector<Held>* list = nullptr;
  const std::vector<bool>* exists = nullptr;
  switch (ref.where) {
    case HostRef::Where::word_buffer:
      list = &words_;
      break;
    case HostRef::Where::state_buffer:
      list = &states_;
      break;
    case HostRef::Where::resident_hi:
      list = &resident_[0];
      exists = &arrangement_.hi_resident;
      break;
    case HostRef::Where::resident_state:
      list = &resident_[1];
      exists = &arrangement_.state_resident;
      break;
    case HostRef::Where::resident_gradient:
      list = &resident_[2];
      exists = &arrangement_.gradient_resident;
      break;
    case HostRef::Where::activation_buffer:
      list = &activation_buffers_;
      break;
    case HostRef::Where::activations:
      list = &saved_;
      break;
    case HostRef::Where::resident_gradient_low:  // the visit planner's alone
    case HostRef::Where::none:
      break;
  }
  if (list == nullptr || ref.index < 0 || ref.index >= static_cast<int>(list->size()) ||
      (exists != nullptr && !(*exists)[ref.index])) {
    wrong("names host memory that does not exist");
    return nowhere_;
  }
  return (*list)[ref.index];
}

std::span<const TaskId> PlanChecker::dependencies_of(TaskId task) const {
  const std::size_t at = task - first_id_;
  return std::span(dependencies_)
      .subspan(dependencies_begin_[at], dependencies_begin_[at + 1] - dependencies_begin_[at]);
}

// Whether the task at hand waits for `earlier`, directly or through others: the search goes to the oldest first, for
// what it looks for is older than all that it may pass.
bool PlanChecker::follows(TaskId earlier) const {
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
      open_.push_back(before[i]);
    }
  }
  return false;
}

void PlanChecker::read(Held& held, const Content& expected, const char* where, std::uint64_t begin, std::uint64_t end) {
  if (held.content != expected) wrong(std::string(where) + " does not hold what it needs");
  if (held.written && held.writer != id_ && !follows(held.writer))
    wrong("does not wait for task " + std::to_string(held.writer) + ", which writes what it reads");
  held.readers.push_back({id_, begin, end});
}

void PlanChecker::write(Held& held, const Content& content, std::uint64_t begin, std::uint64_t end) {
  if (held.written && held.writer != id_ && !follows(held.writer))
    wrong("does not wait for task " + std::to_string(held.writer) + ", which writes the same bytes");
  for (const Reader& reader : held.readers)
    if (reader.task != id_ && reader.begin < end && begin < reader.end && !follows(reader.task))
      wrong("overwrites what task " + std::to_string(reader.task) + " may still be reading");
  held.content = content;
  held.written = true;
  held.writer = id_;
  held.readers.clear();
}

bool PlanChecker::in_arena(std::uint64_t begin, std::uint64_t bytes) {
  const bool inside = begin <= arrangement_.device_bytes() && bytes <= arrangement_.device_bytes() - begin;
  if (!inside) wrong("reaches beyond the device arena");
  return inside;
}

void PlanChecker::split(std::uint64_t at) {
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

void PlanChecker::read_device(std::uint64_t begin, std::uint64_t bytes, const Content& expected) {
  if (!in_arena(begin, bytes)) return;
  // A chunk's part of a gradient sum is read by itself.
  auto at = device_.upper_bound(begin);
  if (at == device_.begin()) return wrong("reads device memory that nothing has written");
  for (at = std::prev(at); at != device_.end() && at->first < begin + bytes; ++at)
    read(at->second, expected, "the device", begin, begin + bytes);
  if (std::prev(at)->second.end < begin + bytes) wrong("reads device memory that nothing has written");
}

void PlanChecker::write_device(std::uint64_t begin, std::uint64_t bytes, const Content& content) {
  if (!in_arena(begin, bytes) || bytes == 0) return;
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

}  // namespace tierflow::swap
