#include "swap/hazards.h"

#include <algorithm>

namespace tierflow::swap {

std::vector<TaskId> HazardTracker::add(TaskId id, const std::vector<Access>& accesses) {
  std::vector<TaskId> found;
  for (const Access& access : accesses) {
    if (access.space == Space::device)
      add_range(id, access, found);
    else
      add_cell(id, access, found);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (!found.empty() && found.back() == id) found.pop_back();  // a task that reads and writes the same bytes
  return found;
}

void HazardTracker::add_range(TaskId id, const Access& access, std::vector<TaskId>& found) {
  left_over_.clear();
  std::size_t kept = 0;
  for (const Record& record : device_) {
    const bool overlaps = record.begin < access.end && access.begin < record.end;
    if (overlaps && (record.writes || access.writes)) found.push_back(record.task);
    if (!overlaps || !access.writes) {
      device_[kept++] = record;
      continue;
    }
    // A later access of the overwritten part depends on this task, which depends on the record: only what is left over
    // stays.
    if (record.begin < access.begin) left_over_.push_back({record.begin, access.begin, record.task, record.writes});
    if (access.end < record.end) left_over_.push_back({access.end, record.end, record.task, record.writes});
  }
  device_.resize(kept);
  device_.insert(device_.end(), left_over_.begin(), left_over_.end());
  device_.push_back({access.begin, access.end, id, access.writes});
}

void HazardTracker::add_cell(TaskId id, const Access& access, std::vector<TaskId>& found) {
  std::vector<Cell>& cells = cells_[static_cast<int>(access.space)];
  if (cells.size() < access.end) cells.resize(access.end);
  for (std::uint64_t index = access.begin; index < access.end; ++index) {
    Cell& cell = cells[index];
    if (cell.written) found.push_back(cell.writer);
    if (access.writes) {
      found.insert(found.end(), cell.readers.begin(), cell.readers.end());
      cell.readers.clear();
      cell.written = true;
      cell.writer = id;
    } else {
      cell.readers.push_back(id);
    }
  }
}

}  // namespace tierflow::swap
