#include "swap/hazards.h"

#include <algorithm>

namespace tierflow::swap {

std::vector<TaskId> HazardTracker::add(TaskId id, Lane lane, const std::vector<Access>& accesses) {
  std::vector<TaskId> found;
  for (const Access& access : accesses) {
    if (access.space == Space::device)
      add_range(id, lane, access, found);
    else
      add_cell(id, lane, access, found);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (!found.empty() && found.back() == id) found.pop_back();  // a task that reads and writes the same bytes
  return found;
}

void HazardTracker::add_range(TaskId id, Lane lane, const Access& access, std::vector<TaskId>& found) {
  left_over_.clear();
  std::size_t kept = 0;
  for (const Record& record : device_) {
    const bool overlaps = record.begin < access.end && access.begin < record.end;
    const bool replaced = access.writes || (!record.writes && record.lane == lane);
    if (overlaps && (record.writes || replaced)) found.push_back(record.task);
    if (!overlaps || !replaced) {
      device_[kept++] = record;
      continue;
    }
    // Whoever must wait for the record waits for this task, which waits for the record: only what is left over stays.
    Record before = record, after = record;
    before.end = access.begin;
    after.begin = access.end;
    if (before.begin < before.end) left_over_.push_back(before);
    if (after.begin < after.end) left_over_.push_back(after);
  }
  device_.resize(kept);
  device_.insert(device_.end(), left_over_.begin(), left_over_.end());
  device_.push_back({access.begin, access.end, id, lane, access.writes});
}

void HazardTracker::add_cell(TaskId id, Lane lane, const Access& access, std::vector<TaskId>& found) {
  std::vector<Cell>& cells = cells_[static_cast<int>(access.space)];
  if (cells.size() < access.end) cells.resize(access.end);
  for (std::uint64_t index = access.begin; index < access.end; ++index) {
    Cell& cell = cells[index];
    if (cell.written) found.push_back(cell.writer);
    if (access.writes) {
      for (const Reader& reader : cell.readers) found.push_back(reader.task);
      cell.readers.clear();
      cell.written = true;
      cell.writer = id;
      continue;
    }
    const auto before = std::find_if(cell.readers.begin(), cell.readers.end(),
                                     [lane](const Reader& reader) { return reader.lane == lane; });
    if (before == cell.readers.end()) {
      cell.readers.push_back({id, lane});
      continue;
    }
    found.push_back(before->task);
    before->task = id;
  }
}

std::size_t HazardTracker::records() const {
  std::size_t count = device_.size();
  for (const std::vector<Cell>& cells : cells_)
    for (const Cell& cell : cells) count += cell.readers.size() + (cell.written ? 1 : 0);
  return count;
}

}  // namespace tierflow::swap
