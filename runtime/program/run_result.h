#pragma once
// The model folder that a run writes at its end, and what happens to the state if it cannot be written.
#include <functional>
#include <optional>
#include <string>

#include "runtime/checkpoint/result_folder.h"
#include "runtime/program/export_beside.h"
#include "runtime/program/options.h"
#include "runtime/program/run_record.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

// The file that a run's result has when it is whole.
const char* last_file(const TrainOptions& options);
// What RunResult::write() was given by the run whose whole result --out holds; empty where it holds none.
std::string maker_of_result(const TrainOptions& options);

// RunRecord::model and chat_template of the command.
void tell_model(const TrainOptions& options, RunRecord& record);

// The end of an error message about a state that cannot be resumed: "; ..." with the newest model in --out. Empty if
// there is none.
std::string what_else_is_left(const TrainOptions& options);

class RunResult {
 public:
  // Claims --out, where there has to be room, and opens the files that go with the weights, before the work begins.
  // With --no-export there is no folder: the result is the store.
  // resumed: --out may hold checkpoints of the run that is resumed. beside: writes the models during training.
  RunResult(const TrainOptions& options, const ModelSpec& spec, bool resumed, TrainingLog& log, ExportBeside& beside);

  // Throws Exception (kind environment) if --out has no room for the model's weights and what goes with them.
  void check_space() const;
  // Weights, tokenizer files, tierflow_run.json (made_by: effective_configuration(), or stopped_at() of it) and, when
  // all else is durable, config.json; or the commit. If that fails the state stays in the storage folders, and the
  // Exception gives the command that exports it.
  void write(Session& session, const std::string& made_by, const Progress& progress);
  // Commits the state. If that fails, the Exception gives the command that says whether it can be opened.
  void commit(Session& session) const;
  // The next two functions write the model of this moment. Training goes on meanwhile if the session can keep the step.
  // If the writing fails, that is reported, and only that model is missing. They must not be called while a model is
  // being written.

  // As --out/checkpoint-N, N the step. When it is whole, older checkpoints are removed. The one of step `outdated` (0:
  // none) goes, unless --export-every made it too. The one of step `best` stays. Of the others the last --export-keep
  // stay. written: called then.
  void write_checkpoint(Session& session, std::int64_t best, std::int64_t outdated, std::function<void()> written);
  // In another folder, for somebody who asks for it and hears of what went wrong.
  void write_elsewhere(Session& session, const std::filesystem::path& out,
                       std::function<void(const io::Error& error)> ended);
  bool has_checkpoint(std::int64_t step) const;
  // Ends with the model that is under way.
  void finish_beside(Session& session) { beside_.finish(session); }
  // The model is no result: what was written of it is removed, and its state stays in the storage folders. Throws
  // Exception (kind numeric) that says why, and gives the command that exports the state.
  [[noreturn]] void refuse(Session& session, const std::string& why);

 private:
  // What the result consists of, from the session's present weights.
  ExportWeights weights_of(Session& session) const;
  // Returns what `weights` returns.
  std::string fill(const ResultFolder& folder, const std::string& made_by, const ExportWeights& weights,
                   const Progress& progress) const;
  void check_space(const ResultFolder& folder) const;
  // write: returns the folder. `how` is a part of what is said where that fails.
  void begin_beside(Session& session, const char* how,
                    std::function<std::filesystem::path(const ExportWeights&, const Progress&)> write,
                    std::function<void(const io::Error& error)> ended);
  void say_written(const std::filesystem::path& folder, std::int64_t step, const ExportBeside::Took& took) const;
  void say_not_written(std::int64_t step, const char* how, const io::Error& error) const;

  const TrainOptions& options_;
  std::uint64_t weight_bytes_ = 0;
  std::optional<ResultFolder> folder_;
  std::optional<CompanionFiles> companions_;
  TrainingLog& log_;
  ExportBeside& beside_;
};

}  // namespace tierflow
