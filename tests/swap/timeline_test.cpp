// What compute waited for, and the trace that shows it, of tasks whose times are written here.
#include "swap/timeline.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

namespace tierflow::swap {
namespace {

using nlohmann::json;

// Milliseconds from the tenth second on: a chunk is read and uploaded, a stage computed; a long read beside it keeps
// the next stage waiting.
std::vector<TaskRecord> records() {
  const auto at = [](double milliseconds) { return 10 + 1e-3 * milliseconds; };
  return {{.id = 5,
           .stage = 1,
           .micro_batch = 0,
           .dependencies = {3, 4, 77},  // 77 was long before
           .begin = at(3.2),
           .end = at(4)},
          {.id = 1,
           .kind = TaskKind::read_hi,
           .lane = Lane::disk_read,
           .chunk = 7,
           .bytes = 100,
           .begin = at(0),
           .end = at(1)},
          {.id = 2,
           .kind = TaskKind::upload_hi,
           .lane = Lane::upload,
           .chunk = 7,
           .bytes = 100,
           .dependencies = {1},
           .begin = at(1),
           .end = at(1.5)},
          {.id = 3, .stage = 0, .micro_batch = 2, .dependencies = {2}, .begin = at(1.5), .end = at(2.5)},
          {.id = 4,
           .kind = TaskKind::read_state,
           .lane = Lane::disk_read,
           .chunk = 8,
           .bytes = 50,
           .begin = at(0.5),
           .end = at(3)}};
}

double milliseconds(double time) {
  return 1e3 * (time - 10);
}

TEST(Timeline, AStallHasTheTaskThatRanLastBeforeComputeWentOn) {
  const std::vector<TaskRecord> all = records();
  const Summary summary = summarise(all);
  EXPECT_NEAR(milliseconds(summary.begin), 0, 1e-9);
  EXPECT_NEAR(milliseconds(summary.end), 4, 1e-9);
  const auto busy = [&](Lane lane) { return 1e3 * summary.busy_seconds[static_cast<int>(lane)]; };
  EXPECT_NEAR(busy(Lane::disk_read), 3, 1e-9);  // what overlaps counts once
  EXPECT_NEAR(busy(Lane::upload), 0.5, 1e-9);
  EXPECT_NEAR(busy(Lane::compute), 1.8, 1e-9);
  EXPECT_EQ(busy(Lane::download), 0);
  EXPECT_EQ(summary.bytes[static_cast<int>(Lane::disk_read)], 150U);
  EXPECT_EQ(summary.bytes[static_cast<int>(Lane::upload)], 100U);
  const std::tuple<double, double, Lane, TaskKind> stalls[] = {{0, 1, Lane::disk_read, TaskKind::read_hi},
                                                               {1, 1.5, Lane::upload, TaskKind::upload_hi},
                                                               {2.5, 3.2, Lane::disk_read, TaskKind::read_state}};
  ASSERT_EQ(summary.stalls.size(), std::size(stalls));
  for (std::size_t i = 0; i < std::size(stalls); ++i) {
    const auto& [begin, end, lane, cause] = stalls[i];
    EXPECT_NEAR(milliseconds(summary.stalls[i].begin), begin, 1e-9) << i;
    EXPECT_NEAR(milliseconds(summary.stalls[i].end), end, 1e-9) << i;
    EXPECT_EQ(summary.stalls[i].lane, lane);
    EXPECT_EQ(summary.stalls[i].cause, cause);
  }
  const auto causes = summary.stalled_by_cause();
  ASSERT_EQ(causes.size(), 3U);
  EXPECT_NEAR(causes.at("read_hi"), 1e-3, 1e-9);
  EXPECT_NEAR(causes.at("upload_hi"), 0.5e-3, 1e-9);
  EXPECT_NEAR(causes.at("read_state"), 0.7e-3, 1e-9);
  EXPECT_TRUE(summarise({}).stalls.empty());
}

// The names that traces and logs have.
TEST(Timeline, EachLaneKindAndPassHasItsName) {
  const char* const tasks[] = {"read_hi",           "read_state",
                               "read_gradient",     "write_hi",
                               "write_state",       "write_gradient",
                               "upload_hi",         "download_hi",
                               "download_gradient", "save_activations",
                               "load_activations",  "read_activations",
                               "write_activations", "compute",
                               "measure",           "update",
                               "read_gradient_low", "write_gradient_low",
                               "accumulate",        "upload_state",
                               "upload_gradient",   "update_on_device",
                               "download_state",    "commit",
                               "catch_up",          "keep_gradient"};
  ASSERT_EQ(std::size(tasks), static_cast<std::size_t>(TaskKind::keep_gradient) + 1);
  for (std::size_t kind = 0; kind < std::size(tasks); ++kind)
    EXPECT_STREQ(task_name(static_cast<TaskKind>(kind)), tasks[kind]);
  const char* const lanes[] = {"disk_read", "disk_write", "upload", "download", "compute", "update", "commit"};
  for (int lane = 0; lane < kLanes; ++lane) EXPECT_STREQ(lane_name(static_cast<Lane>(lane)), lanes[lane]);
  const char* const passes[] = {"forward", "head", "backward", "evaluate"};
  for (int pass = 0; pass < 4; ++pass) EXPECT_STREQ(pass_name(static_cast<Pass>(pass)), passes[pass]);
}

TEST(Timeline, ComputeThatWaitedForNothingOfTheRecordIsItsOwnCause) {
  const std::vector<TaskRecord> all = {{.id = 1, .begin = 0, .end = 1},
                                       {.id = 2, .dependencies = {1}, .begin = 2, .end = 3},
                                       {.id = 3, .dependencies = {2}, .begin = 3 + 19e-6, .end = 4},
                                       {.id = 4, .dependencies = {3}, .begin = 4 + 21e-6, .end = 5}};
  const Summary summary = summarise(all);
  ASSERT_EQ(summary.stalls.size(), 2U);  // a hand-over between threads is none
  EXPECT_EQ(summary.stalls[0].begin, 1);
  EXPECT_EQ(summary.stalls[0].end, 2);
  EXPECT_EQ(summary.stalls[0].cause, TaskKind::compute);
}

TEST(Timeline, WhatEndedBeforeComputeWaitedIsNoCause) {
  const std::vector<TaskRecord> all = {
      {.id = 1, .begin = 0, .end = 1},
      {.id = 2, .kind = TaskKind::upload_hi, .lane = Lane::upload, .begin = 0, .end = 0.5},
      {.id = 3, .dependencies = {2}, .begin = 2, .end = 3}};
  const Summary summary = summarise(all);
  ASSERT_EQ(summary.stalls.size(), 1U);
  EXPECT_EQ(summary.stalls[0].lane, Lane::compute);
  EXPECT_EQ(summary.stalls[0].begin, 1);
}

TEST(Timeline, OfTwoComputationsAtOnceTheLongerOneCounts) {
  const std::vector<TaskRecord> all = {
      {.id = 1, .begin = 0, .end = 5}, {.id = 2, .begin = 1, .end = 2}, {.id = 3, .begin = 5, .end = 6}};
  EXPECT_TRUE(summarise(all).stalls.empty());
}

TEST(Timeline, StallsOfOneCauseAddUp) {
  const auto upload = [](TaskId id, double begin, double end) {
    return TaskRecord{.id = id, .kind = TaskKind::upload_hi, .lane = Lane::upload, .begin = begin, .end = end};
  };
  const std::vector<TaskRecord> all = {upload(1, 0, 1),
                                       {.id = 2, .dependencies = {1}, .begin = 1, .end = 2},
                                       upload(3, 1, 5),
                                       {.id = 4, .dependencies = {3}, .begin = 5, .end = 6}};
  const auto causes = summarise(all).stalled_by_cause();
  ASSERT_EQ(causes.size(), 1U);
  EXPECT_NEAR(causes.at("upload_hi"), 1 + 3, 1e-9);
}

// One after the other they need one row; the first chunk has a number like any other.
TEST(Timeline, TheTraceTakesARowForWhatIsBesideAnother) {
  const auto read = [](TaskId id, double begin) {
    return TaskRecord{
        .id = id, .kind = TaskKind::read_hi, .lane = Lane::disk_read, .chunk = 0, .begin = begin, .end = begin + 1};
  };
  const std::vector<TaskRecord> all = {read(1, 0), read(2, 1), read(3, 1.5)};
  const auto path = std::filesystem::path(testing::TempDir()) / ("rows-" + std::to_string(getpid()) + ".json");
  const NamedTimeline timelines[] = {{"measured", all}};
  ASSERT_FALSE(write_trace(path, timelines));
  std::ifstream file(path);
  const json trace = json::parse(file);
  std::filesystem::remove(path);
  std::vector<int> rows;
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] != "read_hi") continue;
    rows.push_back(event["tid"]);
    EXPECT_EQ(event["args"].value("chunk", -1), 0);
  }
  EXPECT_EQ(rows, (std::vector<int>{0, 0, 1}));
}

TEST(Timeline, TheTraceHasEveryTaskInItsTrack) {
  const std::vector<TaskRecord> all = records();
  const auto path = std::filesystem::path(testing::TempDir()) / ("timeline-" + std::to_string(getpid()) + ".json");
  const NamedTimeline timelines[] = {{"measured", {}}, {"predicted", all}};
  std::ofstream(path) << "what was there";
  ASSERT_FALSE(write_trace(path, timelines));
  std::ifstream file(path);
  const json trace = json::parse(file);
  std::filesystem::remove(path);
  const auto event = [&](const json& wanted) {
    for (const json& one : trace["traceEvents"]) {
      bool same = true;
      for (const auto& [key, value] : wanted.items()) same = same && one.contains(key) && one[key] == value;
      if (same) return one;
    }
    return json{};
  };
  const std::tuple<const char*, int, double, double> slices[] = {{"read_hi", 0, 0, 1000},
                                                                 {"read_state", 1, 500, 2500},
                                                                 {"upload_hi", 200, 1000, 500},
                                                                 {"forward 0 mb 2", 400, 1500, 1000},
                                                                 {"forward 1 mb 0", 400, 3200, 800},
                                                                 {"read_state", 700, 2500, 700},
                                                                 {"read_hi", 700, 0, 1000},
                                                                 {"upload_hi", 700, 1000, 500}};
  for (const auto& [name, track, begin, length] : slices) {
    const json found = event({{"name", name}, {"tid", track}});
    ASSERT_FALSE(found.is_null()) << name;
    EXPECT_EQ(found["ph"], "X");
    EXPECT_EQ(found["pid"], 1);
    EXPECT_NEAR(found["ts"].get<double>(), begin, 1e-3) << name;
    EXPECT_NEAR(found["dur"].get<double>(), length, 1e-3) << name;
  }
  EXPECT_EQ(event({{"name", "read_state"}, {"tid", 1}})["args"], (json{{"id", 4}, {"bytes", 50}, {"chunk", 8}}));
  EXPECT_EQ(event({{"name", "forward 1 mb 0"}})["args"], (json{{"id", 5}, {"bytes", 0}}));
  for (const auto& [track, name] :
       {std::pair{0, "disk_read"}, {1, "disk_read"}, {200, "upload"}, {400, "compute"}, {700, "compute waits for"}})
    EXPECT_EQ(event({{"name", "thread_name"}, {"pid", 1}, {"tid", track}})["args"]["name"], name);
  for (const int track : {0, 1, 200, 400})
    EXPECT_EQ(event({{"name", "thread_sort_index"}, {"ph", "M"}, {"pid", 1}, {"tid", track}})["args"]["sort_index"],
              track);
  for (const auto& [process, name] : {std::pair{0, "measured"}, {1, "predicted"}})
    EXPECT_EQ(event({{"name", "process_name"}, {"ph", "M"}, {"pid", process}})["args"]["name"], name);
}

TEST(Timeline, ATraceThatCannotBeWrittenIsAnErrorOfTheMachine) {
  const io::Error error = write_trace("/nowhere/trace.json", {});
  EXPECT_EQ(error.kind, io::ErrorKind::environment);
  EXPECT_EQ(error.path, "/nowhere/trace.json");
  EXPECT_EQ(error.error_number, ENOENT);
  EXPECT_THAT(error.message(), ::testing::HasSubstr("the trace could not be written"));
}

}  // namespace
}  // namespace tierflow::swap
