#pragma once
// When tasks ran: measured by the executor or predicted by the simulator, in one type, so that the two can be compared
// and drawn alike.
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "swap/plan.h"

namespace tierflow::swap {

// Times in seconds from one start common to a timeline.
struct TaskRecord {
  TaskId id = 0;
  TaskKind kind = TaskKind::compute;
  Lane lane = Lane::compute;
  Pass pass = Pass::forward;
  int stage = -1, micro_batch = -1, chunk = -1;
  std::uint64_t bytes = 0;
  std::vector<TaskId> dependencies;
  double begin = 0, end = 0;
};

// A time in which compute had to wait, and for what: the lane and kind of the task that ran last before it could go on.
struct Stall {
  double begin = 0, end = 0;
  Lane lane = Lane::compute;
  TaskKind cause = TaskKind::compute;
};

struct Summary {
  double begin = 0, end = 0;                  // of all tasks
  std::array<double, kLanes> busy_seconds{};  // in which at least one task of the lane ran
  std::array<std::uint64_t, kLanes> bytes{};
  std::vector<Stall> stalls;
  std::map<std::string, double> stalled_by_cause() const;
};

// Records in any order.
Summary summarise(std::span<const TaskRecord> records);

// Chrome's trace event format, which https://ui.perfetto.dev opens: a process for each timeline ("measured",
// "predicted"), a track for each lane, one for the stalls. Replaces the file.
struct NamedTimeline {
  std::string name;
  std::span<const TaskRecord> records;
};
io::Error write_trace(const std::filesystem::path& path, std::span<const NamedTimeline> timelines);

}  // namespace tierflow::swap
