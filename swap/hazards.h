#pragma once
// Finds dependencies from hazards, in the order of a sequential program. A read follows the last write of its bytes,
// and the earlier read of them by its own lane. A write follows the last write and every read since. The memory for
// this depends on how many different ranges were named, not on how often: bytes that are only read take one record for
// each lane, however many tasks read them.
#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "swap/plan.h"

namespace tierflow::swap {

class HazardTracker {
 public:
  // The tasks that task `id` of `lane` must wait for because of its accesses: sorted, each once. Valid until the next
  // call. Ids must grow from call to call.
  const std::vector<TaskId>& add(TaskId id, Lane lane, const std::vector<Access>& accesses);
  // How many accesses are kept.
  std::size_t records() const;

 private:
  // Bytes that every access so far touched together.
  struct Cell {
    TaskId writer = 0;                         // where it was written
    std::array<TaskId, kLanes> last_reader{};  // by lane, of those in read_by
    bool written = false;
    std::uint8_t read_by = 0;  // since the last write: a bit for each lane
  };
  struct Segment {
    std::uint64_t end = 0;
    Cell cell;
  };
  using Segments = std::map<std::uint64_t, Segment>;  // by first byte; without what nothing has touched

  void touch(Cell& cell, TaskId id, Lane lane, bool writes);
  void touch_device(TaskId id, Lane lane, const Access& access);
  Segments::iterator cut(Segments::iterator segment, std::uint64_t at);

  // Buffers, extents and carries are single numbers: a table each. The device arena is cut where accesses begin and
  // end.
  Segments device_;
  std::vector<Cell> cells_[kSpaces];
  std::vector<TaskId> found_;  // that the task at hand must wait for
};

}  // namespace tierflow::swap
