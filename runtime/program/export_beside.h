#pragma once
// Writes a model during a run: on a thread while training goes on, if the session can keep the step; else at once,
// while training waits.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "runtime/base/progress.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

// Writes the weights into a folder: Session::export_hf() or another export.
using ExportWeights = std::function<std::string(const std::filesystem::path& folder, const Progress& progress)>;

// One model at a time. Call all functions between steps, on the session's thread.
class ExportBeside {
 public:
  struct Took {
    double seconds = 0, waited = 0;  // seconds that it took; seconds that training waited for it
    bool beside = false;             // whether training went on meanwhile
  };
  struct Job {
    ExportWeights at_once;  // the weights of the session as it is
    // Throws Exception. On another thread, where `weights` is not `at_once`.
    std::function<void(const ExportWeights& weights, const Progress& progress)> write;
    // error: why there is no model; of kind cancelled if the run ends first.
    std::function<void(const io::Error& error, const Took& took)> ended;
  };
  // bytes_per_second: at which a model is written, and read back, while training goes on; 0: as fast as it can.
  ExportBeside(TrainingLog& log, std::uint64_t bytes_per_second) : log_(log), bytes_per_second_(bytes_per_second) {}
  // A model that is being written is given up, and `ended` is not called.
  ~ExportBeside();

  bool busy() const { return job_.has_value(); }
  // Not while busy.
  void begin(Session& session, Job job);
  // Begins to write a model whose step is committed by now, and calls `ended` for a model that is written.
  void look();
  // Waits for what is under way, which from here on is as fast as it can be. Gives it up where the session failed, and
  // where a signal came and no step after that model: a run that goes on begins with that step. Calls `ended`.
  void finish(Session& session);

 private:
  void start();
  void run();
  void wait_until(std::chrono::steady_clock::time_point due) const;
  void write_at_once(const Session& session, Job job);
  void end_beside(const io::Error& why);
  static void end(Job job, const io::Error& error, const Took& took);
  void join();

  TrainingLog& log_;
  const std::uint64_t bytes_per_second_;
  std::optional<Job> job_;
  std::shared_ptr<CommittedStep> kept_;  // until it is written
  std::thread thread_;
  std::chrono::steady_clock::time_point begun_;
  double waited_ = 0;
  bool said_slow_ = false;
  std::atomic<bool> give_up_ = false, waited_for_ = false, done_ = false;
  std::atomic<std::uint64_t> written_ = 0, of_ = 0;  // bytes
  io::Error error_;                                  // of the thread, when it is done
};

}  // namespace tierflow
