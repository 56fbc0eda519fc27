// What a run's log tells of its steps and evaluations, and its summary of all of them.
#include "runtime/program/training_log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/device/device_memory.h"
#include "runtime/program/run_summary.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

using nlohmann::json;

// A log whose lines are read when it is closed. What it prints is swallowed.
class Logged {
 public:
  Logged() : path_(std::filesystem::current_path() / ("log-test-" + std::to_string(::getpid()))) {
    ::testing::internal::CaptureStderr();
    log_.emplace(path_, false);
    log_->begin();
  }
  ~Logged() { std::filesystem::remove(path_); }
  TrainingLog& operator*() { return *log_; }
  TrainingLog* operator->() { return &*log_; }

  // Objects that have this key.
  std::vector<json> lines(const char* key) {
    if (log_) ::testing::internal::GetCapturedStderr();
    log_.reset();
    std::ifstream file(path_);
    std::vector<json> found;
    for (std::string line; std::getline(file, line);)
      if (json object = json::parse(line); object.contains(key)) found.push_back(std::move(object));
    return found;
  }

 private:
  const std::filesystem::path path_;
  std::optional<TrainingLog> log_;
};

// Of lanes as the log has them: the one that was busy for the longest time.
std::string busiest_of(const json& lanes) {
  std::string busiest;
  for (const auto& [name, lane] : lanes.items())
    if (busiest.empty() || lane["busy_s"] > lanes[busiest]["busy_s"]) busiest = name;
  return busiest;
}

TEST(TrainingLogOfSteps, TellsWhatEachMovedAndWhichLaneWasBusyLongest) {
  DeviceMemory::install();
  Session session({make_model(parse_model_spec(cases().front().json, "llama")), initial(11)}, resident(2));
  Logged log;
  std::vector<std::array<swap::LaneCounters, swap::kLanes>> before, after;
  for (int step = 0; step < 3; ++step) {
    before.push_back(session.lanes());
    const StepResult result = session.step(batches(2, step), 1e-3);
    after.push_back(session.lanes());
    log->step(result, 3, 1e-3, session);
    // What evaluations move is no step's.
    log->evaluation(result.step, session.evaluate(batches(2, 77)), session);
    EXPECT_GT(session.lanes()[static_cast<std::size_t>(swap::Lane::upload)].bytes,
              after.back()[static_cast<std::size_t>(swap::Lane::upload)].bytes);
  }
  const std::string limit = log->limiting_lane(session);
  json all;
  for (int lane = 0; lane < swap::kLanes; ++lane)
    all[swap::lane_name(static_cast<swap::Lane>(lane))] = {{"busy_s", session.lanes()[lane].busy_seconds}};
  EXPECT_EQ(limit, busiest_of(all));
  const std::vector<json> steps = log.lines("loss");
  ASSERT_EQ(steps.size(), 3U);
  for (std::size_t step = 0; step < steps.size(); ++step) {
    EXPECT_EQ(steps[step]["step"], step + 1);
    EXPECT_EQ(steps[step]["limit"], busiest_of(steps[step]["lanes"]));
    for (const swap::Lane lane : {swap::Lane::upload, swap::Lane::download, swap::Lane::compute}) {
      const auto at = static_cast<std::size_t>(lane);
      EXPECT_EQ(steps[step]["lanes"][swap::lane_name(lane)]["bytes"], after[step][at].bytes - before[step][at].bytes);
    }
  }
}

// Updates that steps deferred are theirs, whoever waits for them.
TEST(TrainingLogOfSteps, CountsWhatTheyDeferredAsWrittenByThem) {
  DeviceMemory::install();
  const Folder folder;
  Session session({make_model(parse_model_spec(cases().front().json, "llama")), initial(11)},
                  streamed(resident(2), folder));
  Logged log;
  const auto written = [&] { return session.lanes()[static_cast<std::size_t>(swap::Lane::disk_write)].bytes; };
  for (int step = 0; step < 2; ++step) log->step(session.step(batches(2, step), 1e-3), 2, 1e-3, session);
  const std::uint64_t by_steps = written();
  log->evaluation(2, session.evaluate(batches(2, 77)), session);
  EXPECT_GT(written(), by_steps);
  EXPECT_NEAR(2e12 * log->terabytes_a_step(), static_cast<double>(written()), 1);
  // Where a step's updates alone were busy, they are the limit.
  log->step(session.step(batches(2, 2), 1e-3), 4, 1e-3, session);
  session.master(0, 0);
  log->step({.step = 4, .tokens = 32, .seconds = 1}, 4, 1e-3, session);
  const std::vector<json> steps = log.lines("loss");
  for (const json& step : steps) EXPECT_EQ(step["limit"], busiest_of(step["lanes"]));
  EXPECT_NE(steps.at(3)["limit"], "compute");
}

TEST(TrainingLogOfEvaluations, HasTheNamesOfBothKinds) {
  DeviceMemory::install();
  Session session({make_model(parse_model_spec(cases().front().json, "llama")), initial(11)}, resident(1));
  Logged log;
  log->evaluation(4, Evaluation{.loss = 1.5, .accuracy = 0.25, .tokens = 70}, session);
  PairTotals pairs{.pairs = 4, .right = 3, .loss = 2, .reward_chosen = 6, .reward_rejected = -2};
  log->evaluation(8, pairs, session);
  const std::vector<json> found = log.lines("held_out_loss");
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0], json({{"step", 4},
                            {"held_out_loss", 1.5},
                            {"held_out_perplexity", std::exp(1.5)},
                            {"held_out_accuracy", 0.25},
                            {"held_out_tokens", 70}}));
  EXPECT_EQ(found[1], json({{"step", 8},
                            {"held_out_loss", 0.5},
                            {"held_out_pairs", 4},
                            {"held_out_rewards/chosen", 1.5},
                            {"held_out_rewards/rejected", -0.5},
                            {"held_out_rewards/accuracies", 0.75},
                            {"held_out_rewards/margins", 2.0}}));
}

// Of weights that are no numbers, so that the session's own steps are skipped.
TEST(SummaryOfARun, CountsItsSteps) {
  DeviceMemory::install();
  const WeightSource none = [](const TensorSpec&, std::uint64_t, std::span<float> out) { std::ranges::fill(out, NAN); };
  Session session({make_model(parse_model_spec(cases().front().json, "llama")), none}, resident(1));
  Logged log;
  const StepResult skipped = session.step(batches(1, 0), 1e-3);
  log->step(skipped, 5, 1e-3, session);
  for (const Clipping clipping : {Clipping::speculative, Clipping::undone, Clipping::speculative, Clipping::staged})
    log->step({.step = 2,
               .loss = 3.5,
               .clipping = clipping,
               .tokens = 32,
               .computed_again = 3,
               .allocator_retries = 4,
               .seconds = 0.5},
              5, 1e-3, session);
  RunSummary run{.steps = 7, .last_loss = 3.5, .held_out_before = 4, .evaluated = true};
  report(run, session, *log);
  const std::vector<json> steps = log.lines("grad_norm");
  ASSERT_EQ(steps.size(), 5U);
  const std::vector<std::string> clippings = {"staged", "speculative", "undone", "speculative", "staged"};
  for (std::size_t step = 0; step < steps.size(); ++step) {
    EXPECT_EQ(steps[step]["skipped"], step == 0);
    EXPECT_EQ(steps[step]["clipping"], clippings[step]);
    if (step == 0) continue;
    EXPECT_EQ(steps[step]["tokens_per_s"], 64.0);
    EXPECT_EQ(steps[step]["computed_again"], 3);
    EXPECT_EQ(steps[step]["allocator_retries"], 4);
  }
  const json summary = log.lines("summary").at(0)["summary"];
  double seconds = skipped.seconds;  // added up in the log's order: another one may differ in the last bit
  for (int step = 0; step < 4; ++step) seconds += 0.5;
  const std::map<std::string, json> expected{
      {"steps", 7},         {"steps_of_this_process", 5},     {"loss", 3.5},         {"held_out_loss_before", 4.0},
      {"skipped_steps", 1}, {"held_out_loss_after", nullptr}, {"undone_steps", 1},   {"speculative_steps", 2},
      {"out", nullptr},     {"training_s", seconds},          {"predicted", nullptr}};
  for (const auto& [key, value] : expected) EXPECT_EQ(summary[key], value) << key;
  EXPECT_NEAR(summary["tokens_per_s"].get<double>(), (4 * 32.0 + 32) / seconds, 1e-6);
}

}  // namespace
}  // namespace tierflow::testing
