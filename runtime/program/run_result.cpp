#include "runtime/program/run_result.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/planning/left_store.h"
#include "runtime/program/train.h"
#include "runtime/program/training_log.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

// Headers of the weights, and the run's options.
constexpr std::uint64_t kBesideWeights = std::uint64_t{1} << 20;

[[noreturn]] void fail_with(const Exception& failed, const std::string& state) {
  io::Error error = failed.error();
  error.detail += (error.detail.empty() ? "" : "; ") + state;
  throw Exception(std::move(error));
}

// The error that ended the export, and where the state is now.
[[noreturn]] void fail_with_state_kept(const Exception& failed, Session& session, const TrainOptions& options) {
  std::string state = "the state was in memory alone and is lost";
  if (session.storage_mode()) {
    try {
      session.commit();
      state = fmt::format("the state stays: {} writes it as a model folder", export_command(options.storage));
    } catch (const Exception& also) {
      state = fmt::format("the state could not be kept either: {}", also.what());
    }
  }
  fail_with(failed, state);
}

}  // namespace

RunResult::RunResult(const TrainOptions& options, const ModelSpec& spec) : options_(options) {
  if (options.no_export) return;
  companions_.emplace(options.config.empty() ? options.model : options.config.parent_path());
  folder_.emplace(options.out);
  check_space(spec);
}

void RunResult::check_space(const ModelSpec& spec) const {
  if (!folder_) return;
  std::uint64_t elements = 0;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) elements += static_cast<std::uint64_t>(tensor.elements());
  folder_->check_space(2 * elements + companions_->bytes() + kBesideWeights);
}

void RunResult::write(Session& session, const Progress& progress) {
  try {
    if (folder_)
      write_folder(session, progress);
    else
      session.commit();
  } catch (const Exception& error) {
    if (folder_) fail_with_state_kept(error, session, options_);
    fail_with(error, fmt::format("what was written stays: {} says whether it can be opened",
                                 export_command(options_.storage)));
  }
}

void RunResult::refuse(Session& session, const std::string& why) {
  if (folder_) folder_->withdraw();
  fail_with_state_kept(Exception(io::ErrorKind::numeric, why), session, options_);
}

void RunResult::write_folder(Session& session, const Progress& progress) {
  folder_->begin();
  companions_->copy_to(folder_->path());
  write_text(folder_->path() / "tierflow_run.json", effective_configuration(options_) + "\n");
  session.export_hf(folder_->path(), progress);
  folder_->finish();
}

int run_export(const ExportOptions& options) {
  watch_signals();
  ResultFolder out(options.out);
  TrainingLog log({}, false);
  out.begin();
  export_store(options.storage, options.out, [&](const char* phase, std::uint64_t done, std::uint64_t total) {
    throw_if_stopped();
    log.progress(phase, done, total);
  });
  out.finish();
  log.say("result: " + fs::absolute(options.out).string());
  return 0;
}

}  // namespace tierflow
