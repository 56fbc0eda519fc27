#pragma once
// When tasks ran. Times measured by the executor and times predicted by the simulator have one type, so that they can
// be compared and drawn in the same way.
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

// Times are in seconds from the start of the timeline.
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

// A time in which compute had to wait, and what it waited for: the lane and kind of the task that ended last before
// compute could continue.
struct Stall {
  double begin = 0, end = 0;
  Lane lane = Lane::compute;
  TaskKind cause = TaskKind::compute;
};

struct Summary {
  double begin = 0, end = 0;                  // of all tasks
  std::array<double, kLanes> busy_seconds{};  // time in which at least one task of the lane ran
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
