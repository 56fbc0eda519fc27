#include "swap/hazards.h"

#include <algorithm>
#include <bit>

namespace tierflow::swap {

const std::vector<TaskId>& HazardTracker::add(TaskId id, Lane lane, const std::vector<Access>& accesses) {
  found_.clear();
  for (const Access& access : accesses) {
    if (access.space == Space::device) {
      touch_device(id, lane, access);
      continue;
    }
    std::vector<Cell>& cells = cells_[static_cast<int>(access.space)];
    if (cells.size() < access.end) cells.resize(access.end);
    for (std::uint64_t index = access.begin; index < access.end; ++index) touch(cells[index], id, lane, access.writes);
  }
  // What a task finds mostly comes in order.
  if (!std::is_sorted(found_.begin(), found_.end())) std::sort(found_.begin(), found_.end());
  found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
  if (!found_.empty() && found_.back() == id) found_.pop_back();  // a task that reads and writes the same bytes
  return found_;
}

void HazardTracker::touch(Cell& cell, TaskId id, Lane lane, bool writes) {
  static_assert(kLanes <= 8, "read_by has a bit for each");
  if (cell.written) found_.push_back(cell.writer);
  if (writes) {
    // Whoever must wait for what was here waits for this task, which waits for it.
    for (unsigned readers = cell.read_by; readers != 0; readers &= readers - 1)
      found_.push_back(cell.last_reader[std::countr_zero(readers)]);
    cell.read_by = 0;
    cell.written = true;
    cell.writer = id;
    return;
  }
  const int reader = static_cast<int>(lane);
  if (cell.read_by >> reader & 1) found_.push_back(cell.last_reader[reader]);
  cell.read_by |= static_cast<std::uint8_t>(1 << reader);
  cell.last_reader[reader] = id;
}

void HazardTracker::touch_device(TaskId id, Lane lane, const Access& access) {
  if (access.begin >= access.end) return;  // nothing, or a defect that the checker finds
  auto at = device_.upper_bound(access.begin);
  if (at != device_.begin()) at = cut(std::prev(at), access.begin);
  auto first = at;
  for (std::uint64_t begin = access.begin; begin < access.end; begin = at->second.end, ++at) {
    if (at == device_.end() || at->first != begin) {
      const std::uint64_t end = at == device_.end() ? access.end : std::min(at->first, access.end);
      at = device_.insert(at, {begin, {.end = end}});
    } else if (at->second.end > access.end) {
      cut(at, access.end);
    }
    if (begin == access.begin) first = at;
    touch(at->second.cell, id, lane, access.writes);
  }
  if (!access.writes) return;
  // One segment again: all of it is written by this task.
  first->second.end = access.end;
  device_.erase(std::next(first), at);
}

// Lets a segment that begins at or before `at` end there, if it goes beyond, and another begin. Returns the first one
// from there on.
HazardTracker::Segments::iterator HazardTracker::cut(Segments::iterator segment, std::uint64_t at) {
  if (segment->first == at) return segment;
  const auto after = std::next(segment);
  if (segment->second.end <= at) return after;
  const auto rest = device_.insert(after, {at, segment->second});
  segment->second.end = at;
  return rest;
}

std::size_t HazardTracker::records() const {
  std::size_t count = 0;
  const auto add = [&count](const Cell& cell) { count += std::popcount(cell.read_by) + (cell.written ? 1 : 0); };
  for (const auto& [begin, segment] : device_) add(segment.cell);
  for (const std::vector<Cell>& cells : cells_)
    for (const Cell& cell : cells) add(cell);
  return count;
}

}  // namespace tierflow::swap
