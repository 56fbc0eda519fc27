#include "swap/timeline.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tierflow::swap {
namespace {

constexpr double kShortestStall = 20e-6;  // less is the hand-over between threads

// Tasks of a timeline are numbered one after the other: a table finds each.
class RecordsById {
 public:
  explicit RecordsById(std::span<const TaskRecord> records) {
    const auto [first, last] = std::ranges::minmax(records, {}, &TaskRecord::id);
    first_ = first.id;
    by_id_.resize(last.id - first_ + 1);
    for (const TaskRecord& record : records) by_id_[record.id - first_] = &record;
  }
  const TaskRecord* find(TaskId id) const {
    return id < first_ || id - first_ >= by_id_.size() ? nullptr : by_id_[id - first_];
  }

 private:
  TaskId first_ = 0;
  std::vector<const TaskRecord*> by_id_;  // null where there is none
};

// What compute waited for in [begin, end): walks back from the task that it followed last, along whatever that one
// followed last, and names for each stretch the task that ran in it. Stretches in which none ran (a lane was busy with
// something else) go to the task that was about to run.
void explain(const TaskRecord& waited, double begin, double end, const RecordsById& records,
             std::vector<Stall>& stalls) {
  const TaskRecord* at = &waited;
  while (end - begin > kShortestStall) {
    const TaskRecord* last = nullptr;
    for (TaskId id : at->dependencies)
      if (const TaskRecord* before = records.find(id); before != nullptr)
        if (before->end > begin && (last == nullptr || before->end > last->end)) last = before;
    if (last == nullptr) break;
    const double from = std::max(begin, std::min(end, last->begin));
    if (end > from) stalls.push_back({from, end, last->lane, last->kind});
    end = from;
    at = last;
  }
  if (end - begin > kShortestStall) stalls.push_back({begin, end, at->lane, at->kind});
}

std::string what(const TaskRecord& record) {
  std::string text = record.lane == Lane::compute ? pass_name(record.pass) : task_name(record.kind);
  if (record.stage >= 0) text.append(" ").append(std::to_string(record.stage));
  if (record.micro_batch >= 0) text.append(" mb ").append(std::to_string(record.micro_batch));
  return text;
}

using nlohmann::json;

json slice(const std::string& name, int process, int track, double begin, double end) {
  return {{"name", name}, {"ph", "X"},         {"pid", process},
          {"tid", track}, {"ts", begin * 1e6}, {"dur", (end - begin) * 1e6}};
}

json label(const char* kind, int process, int track, const std::string& name) {
  return {{"name", kind}, {"ph", "M"}, {"pid", process}, {"tid", track}, {"args", {{"name", name}}}};
}

constexpr int kTracksALane = 100;  // requests in flight at once on a disk lane get a row each

}  // namespace

std::map<std::string, double> Summary::stalled_by_cause() const {
  std::map<std::string, double> causes;
  for (const Stall& stall : stalls) causes[task_name(stall.cause)] += stall.end - stall.begin;
  return causes;
}

Summary summarise(std::span<const TaskRecord> records) {
  Summary summary;
  if (records.empty()) return summary;
  std::vector<const TaskRecord*> lanes[kLanes];
  const RecordsById by_id(records);
  summary.begin = records.front().begin;
  for (const TaskRecord& record : records) {
    summary.begin = std::min(summary.begin, record.begin);
    summary.end = std::max(summary.end, record.end);
    lanes[static_cast<int>(record.lane)].push_back(&record);
    summary.bytes[static_cast<int>(record.lane)] += record.bytes;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    auto& list = lanes[lane];
    const auto earlier = [](const TaskRecord* a, const TaskRecord* b) { return a->begin < b->begin; };
    if (!std::ranges::is_sorted(list, earlier)) std::ranges::sort(list, earlier);  // lanes mostly work in order
    double reached = summary.begin;
    for (const TaskRecord* record : list) {
      summary.busy_seconds[lane] += std::max(0.0, record->end - std::max(reached, record->begin));
      reached = std::max(reached, record->end);
    }
  }
  double reached = summary.begin;
  for (const TaskRecord* record : lanes[static_cast<int>(Lane::compute)]) {
    if (record->begin - reached > kShortestStall) explain(*record, reached, record->begin, by_id, summary.stalls);
    reached = std::max(reached, record->end);
  }
  std::sort(summary.stalls.begin(), summary.stalls.end(),
            [](const Stall& a, const Stall& b) { return a.begin < b.begin; });
  return summary;
}

io::Error write_trace(const std::filesystem::path& path, std::span<const NamedTimeline> timelines) {
  std::ofstream file(path, std::ios::trunc);
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  const char* separator = "";
  const auto put = [&](const json& event) {
    file << separator << event.dump();
    separator = ",\n";
  };
  for (int process = 0; process < static_cast<int>(timelines.size()); ++process) {
    const auto& records = timelines[process].records;
    const Summary summary = summarise(records);
    put(label("process_name", process, 0, timelines[process].name));
    std::vector<const TaskRecord*> ordered;
    for (const TaskRecord& record : records) ordered.push_back(&record);
    std::sort(ordered.begin(), ordered.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
    std::vector<double> rows[kLanes];  // when each row of a lane is free again
    for (const TaskRecord* record : ordered) {
      const int lane = static_cast<int>(record->lane);
      auto row = std::find_if(rows[lane].begin(), rows[lane].end(), [&](double end) { return end <= record->begin; });
      if (row == rows[lane].end()) row = rows[lane].insert(row, 0.0);
      *row = record->end;
      const int track = lane * kTracksALane + static_cast<int>(row - rows[lane].begin());
      json event = slice(what(*record), process, track, record->begin - summary.begin, record->end - summary.begin);
      event["args"] = {{"id", record->id}, {"bytes", record->bytes}};
      if (record->chunk >= 0) event["args"]["chunk"] = record->chunk;
      put(event);
    }
    for (int lane = 0; lane < kLanes; ++lane)
      for (std::size_t row = 0; row < rows[lane].size(); ++row) {
        const int track = lane * kTracksALane + static_cast<int>(row);
        put(label("thread_name", process, track, lane_name(static_cast<Lane>(lane))));
        put({{"name", "thread_sort_index"},
             {"ph", "M"},
             {"pid", process},
             {"tid", track},
             {"args", {{"sort_index", track}}}});
      }
    const int stalls = kLanes * kTracksALane;
    put(label("thread_name", process, stalls, "compute waits for"));
    for (const Stall& stall : summary.stalls)
      put(slice(task_name(stall.cause), process, stalls, stall.begin - summary.begin, stall.end - summary.begin));
  }
  file << "\n]}\n";
  file.flush();
  if (!file)
    return {.kind = io::ErrorKind::environment,
            .operation = "write",
            .path = path.string(),
            .error_number = errno,
            .detail = "the trace could not be written"};
  return {};
}

}  // namespace tierflow::swap
