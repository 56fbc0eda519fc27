#include "swap/hazards.h"

#include <algorithm>

namespace tierflow::swap {

std::vector<TaskId> HazardTracker::add(TaskId id, Lane lane, const std::vector<Access>& accesses) {
  std::vector<TaskId> found;
  for (const Access& access : accesses) {
    if (access.space == Space::device) {
      touch_device(id, lane, access, found);
      continue;
    }
    std::vector<Cell>& cells = cells_[static_cast<int>(access.space)];
    if (cells.size() < access.end) cells.resize(access.end);
    for (std::uint64_t index = access.begin; index < access.end; ++index)
      touch(cells[index], id, lane, access.writes, found);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (!found.empty() && found.back() == id) found.pop_back();  // a task that reads and writes the same bytes
  return found;
}

void HazardTracker::touch(Cell& cell, TaskId id, Lane lane, bool writes, std::vector<TaskId>& found) {
  if (cell.written) found.push_back(cell.writer);
  if (writes) {
    // Whoever must wait for what was here waits for this task, which waits for it.
    for (const Reader& reader : cell.readers) found.push_back(reader.task);
    cell.readers.clear();
    cell.written = true;
    cell.writer = id;
    return;
  }
  const auto before = std::ranges::find(cell.readers, lane, &Reader::lane);
  if (before == cell.readers.end()) {
    cell.readers.push_back({id, lane});
    return;
  }
  found.push_back(before->task);
  before->task = id;
}

void HazardTracker::touch_device(TaskId id, Lane lane, const Access& access, std::vector<TaskId>& found) {
  if (access.begin >= access.end) return;  // nothing, or a defect that the checker finds
  cut(access.begin);
  cut(access.end);
  auto at = device_.lower_bound(access.begin);
  for (std::uint64_t begin = access.begin; begin < access.end; begin = at->second.end, ++at) {
    if (at == device_.end() || at->first != begin) {
      const std::uint64_t end = at == device_.end() ? access.end : std::min(at->first, access.end);
      at = device_.insert(at, {begin, {.end = end}});
    }
    touch(at->second.cell, id, lane, access.writes, found);
  }
  if (!access.writes) return;
  // One segment again: all of it is written by this task.
  const auto first = device_.find(access.begin);
  first->second.end = access.end;
  device_.erase(std::next(first), at);
}

// Lets a segment end, and another begin, where one goes beyond.
void HazardTracker::cut(std::uint64_t at) {
  auto after = device_.lower_bound(at);
  if (after == device_.begin()) return;
  Segment& segment = std::prev(after)->second;
  if (segment.end <= at) return;
  device_.insert(after, {at, segment});
  segment.end = at;
}

std::size_t HazardTracker::records() const {
  std::size_t count = 0;
  const auto add = [&count](const Cell& cell) { count += cell.readers.size() + (cell.written ? 1 : 0); };
  for (const auto& [begin, segment] : device_) add(segment.cell);
  for (const std::vector<Cell>& cells : cells_)
    for (const Cell& cell : cells) add(cell);
  return count;
}

}  // namespace tierflow::swap
