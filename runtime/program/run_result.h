#pragma once
// The model folder that a run writes at its end, and what happens to the state if it cannot be written.
#include <optional>

#include "runtime/checkpoint/result_folder.h"
#include "runtime/program/options.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

// The file that a run's result has when it is whole.
const char* last_file(const TrainOptions& options);
// Whether --out holds the whole result of this very command.
bool has_result(const TrainOptions& options);

// "; ..." for an error of a state that cannot be gone on with: the newest model in --out; empty where there is none.
std::string what_else_is_left(const TrainOptions& options);

class RunResult {
 public:
  // Claims --out, where there has to be room, and opens the files that go with the weights, before the work begins.
  // With --no-export there is no folder: the result is the store.
  // resumed: --out may hold checkpoints of the run that is gone on with.
  RunResult(const TrainOptions& options, const ModelSpec& spec, bool resumed);

  // Throws Exception (kind environment) where --out has no room for the model's weights and what goes with them.
  void check_space() const;
  // Weights, tokenizer files, tierflow_run.json and, when all else is durable, config.json; or the commit. If that
  // fails the state stays in the storage folders, and the Exception gives the command that exports it.
  void write(Session& session, const Progress& progress, TrainingLog& log);
  // Commits the state. If that fails, the Exception gives the command that says whether it can be opened.
  void commit(Session& session) const;
  // After step `step`: writes the model as --out/checkpoint-N. When it is whole, older checkpoints are removed. The one
  // of step `outdated` (0: none) goes, unless --export-every made it too. The one of step `best` stays. Of the others
  // the last --export-keep stay. Returns whether it is there: what goes wrong is said, and costs the checkpoint alone.
  bool write_checkpoint(Session& session, std::int64_t step, std::int64_t best, std::int64_t outdated,
                        const Progress& progress, TrainingLog& log);
  bool has_checkpoint(std::int64_t step) const;
  // After step `step`: the model in another folder, for somebody who asks for it. Returns what went wrong: it is said,
  // and costs that model alone.
  io::Error write_elsewhere(const std::filesystem::path& out, Session& session, std::int64_t step,
                            const Progress& progress, TrainingLog& log) const;
  // The model is no result: what was written of it is removed, and its state stays in the storage folders. Throws
  // Exception (kind numeric) that says why, and gives the command that exports the state.
  [[noreturn]] void refuse(Session& session, const std::string& why);

 private:
  // Returns what Session::export_hf() returns.
  std::string fill(const ResultFolder& folder, Session& session, const Progress& progress) const;
  void check_space(const ResultFolder& folder) const;
  void say_written(const std::filesystem::path& folder, std::int64_t step, double seconds, TrainingLog& log) const;

  const TrainOptions& options_;
  std::uint64_t weight_bytes_ = 0;
  std::optional<ResultFolder> folder_;
  std::optional<CompanionFiles> companions_;
};

}  // namespace tierflow
