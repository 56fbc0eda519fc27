#pragma once
// The output of a run: a live line on standard error, JSON lines in a file, the summary at the end.
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/device/gpu_monitor.h"
#include "runtime/session/session.h"

namespace tierflow {

// As people read it: with four decimals, or that it is not finite.
std::string loss_text(double loss);
std::string norm_text(double norm);

// Whether a prediction is of steps like this one: not of speculative ones.
bool as_predicted(const StepResult& result);

class TrainingLog {
 public:
  // log_json: empty for none. Throws Exception for a file that could not be written; changes nothing on the drive yet.
  TrainingLog(const std::filesystem::path& log_json, bool json_on_stdout);
  ~TrainingLog();

  // Call when nothing can keep the run from starting. Opens the file and writes the objects so far. The log of an
  // earlier run keeps its content under the first free name of FILE.1, FILE.2 and so on. From here on, if the log
  // cannot be written there is a warning, and the run goes on without it.
  void begin();

  // From now on, steps report what the card did; null: they do not.
  void watch(std::unique_ptr<GpuMonitor> gpu);
  // Prints a line that stays.
  void say(const std::string& line);
  // For the life of the log.
  Say teller() {
    return [this](const std::string& line) { say(line); };
  }
  // Phases that may take more than two seconds: shown from then on.
  void progress(const char* phase, std::uint64_t done, std::uint64_t total);
  // progress() for work that a signal ends: throws Stopped. For the life of the log.
  Progress stoppable_progress();
  void step(const StepResult& result, std::int64_t of_steps, double lr, const Session& session);
  void evaluation(std::int64_t step, const Evaluation& found, const Session& session);
  void evaluation(std::int64_t step, const PairTotals& found, const Session& session);
  // What was moved since the last step belongs to none.
  void no_step_moved_that(const Session& session);
  void object(const nlohmann::json& object);
  // The lane that was busy for the largest share of the run so far.
  std::string limiting_lane(const Session& session) const;
  double tokens_per_second() const { return training_seconds_ > 0 ? tokens_ / training_seconds_ : 0; }
  double training_seconds() const { return training_seconds_; }
  // The median of the steps like those that are predicted, without the first one if there are others.
  double typical_step_seconds() const;
  // Steps that were speculative and stood; that were undone.
  std::int64_t speculative_steps() const { return speculative_; }
  std::int64_t undone_steps() const { return undone_; }
  // Of a mixture: the share of a layer's experts that had tokens in a step, on average and at least; NaN before that.
  double experts_touched() const { return touched_ / static_cast<double>(layers_touched_); }
  double fewest_experts_touched() const { return fewest_touched_; }
  double gradient_bytes_left_out() const { return left_out_; }  // of all steps, StepResult's
  // Where steps use parts of the embedding, all steps together: rows, and bytes between storage and RAM, moved and as
  // if all of it were used (StepResult).
  struct EmbeddingUse {
    double rows = 0, bytes = 0, bytes_of_all = 0;
  };
  const EmbeddingUse& embedding() const { return embedding_; }
  std::int64_t steps() const { return steps_; }
  double terabytes_a_step() const { return steps_ > 0 ? terabytes_ / static_cast<double>(steps_) : 0; }

 private:
  void live(std::string line, bool last);
  void show(const std::string& text);
  void keep_earlier_log();
  void write(const std::string& lines);
  nlohmann::json gpu_since_last_step(std::int64_t tokens);

  std::ofstream file_;
  std::filesystem::path path_;
  std::string waiting_;  // lines from before begin()
  const bool json_on_stdout_, terminal_;
  bool begun_ = false, file_failed_ = false, stdout_failed_ = false, live_shown_ = false;
  std::chrono::steady_clock::time_point phase_started_, last_live_;
  std::string phase_;
  std::array<swap::LaneCounters, swap::kLanes> lanes_{};
  double tokens_ = 0, training_seconds_ = 0, terabytes_ = 0;  // of the steps alone
  std::int64_t steps_ = 0, speculative_ = 0, undone_ = 0;
  double touched_ = 0, fewest_touched_ = NAN;  // shares of experts, summed over layers and steps; the least of them
  std::int64_t layers_touched_ = 0;
  double left_out_ = 0;
  EmbeddingUse embedding_;
  std::unique_ptr<GpuMonitor> gpu_;
  std::optional<double> energy_;  // J, when it was last looked at
  std::vector<float> step_seconds_;
};

}  // namespace tierflow
