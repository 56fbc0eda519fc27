#pragma once
// Dependencies from hazards, in the order of a sequential program: a read follows the last write of its bytes, a write
// follows the last write and every read since.
#include <cstdint>
#include <vector>

#include "swap/plan.h"

namespace tierflow::swap {

class HazardTracker {
 public:
  // The tasks that `accesses`, made by task `id`, must wait for: sorted, each once. Ids must grow from call to call.
  std::vector<TaskId> add(TaskId id, const std::vector<Access>& accesses);

 private:
  struct Record {
    std::uint64_t begin, end;
    TaskId task;
    bool writes;
  };
  // Buffers, extents and carries are single numbers: a table each. The device arena is cut into ranges: a list.
  struct Cell {
    bool written = false;
    TaskId writer = 0;
    std::vector<TaskId> readers;
  };
  void add_range(TaskId id, const Access& access, std::vector<TaskId>& found);
  void add_cell(TaskId id, const Access& access, std::vector<TaskId>& found);

  std::vector<Record> device_;
  std::vector<Record> left_over_;  // of an access at work
  std::vector<Cell> cells_[kSpaces];
};

}  // namespace tierflow::swap
