#include "runtime/program/run_result.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/base/strict_json.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/planning/export_request.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/stored_model.h"
#include "runtime/program/run_common.h"
#include "runtime/program/run_identity.h"
#include "runtime/program/train.h"
#include "runtime/program/training_log.h"
#include "runtime/state/script_model.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Headers of the weights, and the run's options.
constexpr std::uint64_t kBesideWeights = std::uint64_t{1} << 20;
// The last file of a result.
constexpr const char* kModelLast = "config.json";
constexpr const char* kAdapterLast = "adapter_config.json";

// The model that the adapters in a folder are for, as they say.
fs::path named_base(const fs::path& adapter) {
  const fs::path path = adapter / kAdapterLast;
  const Json config = parse_json(read_text(open_beneath(adapter, kAdapterLast), path, 1 << 20), path.string());
  fs::path base = config.is_object() ? JsonFields(config, path.string()).text_or("base_model_name_or_path", "") : "";
  std::error_code ignored;
  if (!fs::is_directory(base, ignored))
    fail(io::ErrorKind::usage, path.string(),
         base.empty()
             ? "does not say which model it is for: give its folder as --model"
             : fmt::format("is for the model \"{}\", which is no folder here: give --model", printable(base.string())));
  return base;
}

void refuse_not_finite(const std::string& tensor) {
  if (!tensor.empty())
    throw Exception(io::ErrorKind::numeric, fmt::format("the values of {} are not all finite", tensor));
}

void warn_of_not_finite(const std::string& tensor, TrainingLog& log) {
  if (!tensor.empty()) log.say(fmt::format("warning: the values of {} are not all finite", tensor));
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
  fail_with_more(failed.error(), state);
}

// Where a run holds the state, its model is asked for. Nothing where the state is free, or becomes so meanwhile.
std::optional<std::int64_t> exported_by_the_run(const ExportOptions& options, TrainingLog& log) {
  bool ended = false;  // the run that was asked; the kernel may hold its files for a while
  for (auto last = Clock::now();; std::this_thread::sleep_for(std::chrono::milliseconds(200))) {
    throw_if_stopped();
    try {
      if (!find_left_store(options.storage).there && ended)
        fail(io::ErrorKind::input, options.storage.front().string(),
             "the run ended before it wrote a model here; its own result is in the folder of its --out");
      return std::nullopt;
    } catch (const Exception& held) {
      if (held.error().kind != io::ErrorKind::locked || (ended && Clock::now() - last > std::chrono::minutes(1))) throw;
      if (ended) continue;
      const auto step =
          ask_for_export(options.storage, fs::absolute(options.out).lexically_normal(), held.error(), log.teller());
      if (step) return step;
      ended = true;
      last = Clock::now();
    }
  }
}

bool lies_in(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

}  // namespace

const char* last_file(const TrainOptions& options) {
  return options.method == "lora" && !options.merge ? kAdapterLast : kModelLast;
}

std::string maker_of_result(const TrainOptions& options) {
  std::error_code ignored;
  const fs::path made_by = options.out / "tierflow_run.json";
  const bool whole = fs::exists(options.out / kModelLast, ignored) || fs::exists(options.out / kAdapterLast, ignored);
  if (options.no_export || !whole || !fs::exists(made_by, ignored)) return "";
  const std::string effective = read_text(made_by, 1 << 20);
  return nlohmann::json::parse(effective, nullptr, false).is_object() ? effective : "";
}

void tell_model(const TrainOptions& options, RunRecord& record) {
  const auto absolute = [](const fs::path& path) {
    return path.empty() ? "" : fs::absolute(path).lexically_normal().string();
  };
  record.model = absolute(options.config.empty() ? options.model : fs::absolute(options.config).parent_path());
  record.chat_template = absolute(options.chat_template);
}

RunResult::RunResult(const TrainOptions& options, const ModelSpec& spec, bool resumed, TrainingLog& log,
                     ExportBeside& beside)
    : options_(options), log_(log), beside_(beside) {
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const bool beside = options.method == "lora" && !options.merge;
      const bool written = beside ? !name_beside_base(tensor).empty() : !is_adapter(tensor);
      if (written) weight_bytes_ += (beside ? 4 : 2) * static_cast<std::uint64_t>(tensor.elements());
    }
  if (options.method == "lora" && !options.merge && !tied_name_beside_base(spec).empty())  // the table's second name
    weight_bytes_ += 4 * static_cast<std::uint64_t>(spec.config.vocab_size * spec.config.hidden_size);
  if (options.config.empty() && last_file(options) == std::string(kModelLast))
    weight_bytes_ += SourceFolder(read_folder_spec(options.model, Tiling::none(), spec.read_as),
                                  std::make_shared<const Checkpoint>(Checkpoint::open(options.model)))
                         .bytes();
  companions_.emplace(options.config.empty() ? options.model : options.config.parent_path(), options.chat_template);
  if (options.no_export) return;
  folder_.emplace(options.out, resumed, std::vector<fs::path>{options.log_json, options.trace});
  check_space();
}

void RunResult::check_space() const {
  if (folder_) check_space(*folder_);
}

void RunResult::check_space(const ResultFolder& folder) const {
  folder.check_space(weight_bytes_ + companions_->bytes() + kBesideWeights);
}

void RunResult::write(Session& session, const std::string& made_by, const Progress& progress) {
  if (!folder_) return commit(session);
  try {
    const std::string broken = fill(*folder_, made_by, weights_of(session), progress);
    if (session.storage_mode() && !broken.empty()) {
      // Before anything that takes time: without its last file it is no result, whatever happens.
      unlink((folder_->path() / last_file(options_)).c_str());
      sync_folder(folder_->path());
      refuse_not_finite(broken);
    }
    warn_of_not_finite(broken, log_);
    folder_->finish();
  } catch (const Exception& error) {
    fail_with_state_kept(error, session, options_);
  }
}

void RunResult::commit(Session& session) const {
  try {
    session.commit();
  } catch (const Exception& error) {
    fail_with_more(error.error(), fmt::format("what was written stays: {} says whether it can be opened",
                                              export_command(options_.storage)));
  }
}

void RunResult::refuse(Session& session, const std::string& why) {
  if (folder_) folder_->withdraw();
  fail_with_state_kept(Exception(io::ErrorKind::numeric, why), session, options_);
}

void RunResult::write_checkpoint(Session& session, std::int64_t best, std::int64_t outdated,
                                 std::function<void()> written) {
  const auto write = [this, step = session.steps(), best, outdated](const ExportWeights& weights,
                                                                    const Progress& progress) {
    const Checkpoints checkpoints(folder_->path());
    // The next one is whole before an older one goes.
    check_space();
    fs::path made = checkpoints.write(step, [&](const ResultFolder& folder) {
      refuse_not_finite(fill(folder, effective_configuration(options_), weights, progress));
    });
    if (outdated != 0 && (options_.export_every == 0 || outdated % options_.export_every != 0))
      checkpoints.remove(outdated);
    if (options_.export_keep > 0) checkpoints.keep_last(options_.export_keep, best);
    return made;
  };
  begin_beside(session, "", write, [written = std::move(written)](const io::Error& error) {
    if (!error) written();
  });
}

void RunResult::write_elsewhere(Session& session, const fs::path& out,
                                std::function<void(const io::Error& error)> ended) {
  std::shared_ptr<ResultFolder> folder;
  try {
    std::error_code unknown;
    if (folder_ && lies_in(fs::weakly_canonical(out, unknown), fs::weakly_canonical(folder_->path(), unknown)))
      fail(io::ErrorKind::usage, out.string(),
           "is in the folder that the run writes its own result to: name another one");
    folder = std::make_shared<ResultFolder>(out);
    check_space(*folder);
  } catch (const Exception& error) {
    say_not_written(session.steps(), "asked for and ", error.error());
    return ended(error.error());
  }
  const auto write = [this, folder](const ExportWeights& weights, const Progress& progress) {
    refuse_not_finite(fill(*folder, effective_configuration(options_), weights, progress));
    folder->finish();
    return folder->path();
  };
  begin_beside(session, "asked for and ", write, std::move(ended));
}

void RunResult::begin_beside(Session& session, const char* how,
                             std::function<fs::path(const ExportWeights&, const Progress&)> write,
                             std::function<void(const io::Error& error)> ended) {
  const auto made = std::make_shared<fs::path>();
  beside_.begin(session, {.at_once = weights_of(session),
                          .write = [write = std::move(write), made](
                                       const ExportWeights& weights,
                                       const Progress& progress) { *made = write(weights, progress); },
                          .ended =
                              [this, how, made, step = session.steps(), ended = std::move(ended)](
                                  const io::Error& error, const ExportBeside::Took& took) {
                                if (error)
                                  say_not_written(step, how, error);
                                else
                                  say_written(*made, step, took);
                                ended(error);
                              }});
}

void RunResult::say_written(const fs::path& folder, std::int64_t step, const ExportBeside::Took& took) const {
  log_.say(fmt::format("model after step {} written to {}, {:.1f} s{}", step, folder.string(), took.seconds,
                       took.beside ? " beside training" : ""));
  log_.object({{"exported",
                {{"step", step},
                 {"folder", folder.string()},
                 {"seconds", took.seconds},
                 {"waited", took.waited},
                 {"beside", took.beside}}}});
}

void RunResult::say_not_written(std::int64_t step, const char* how, const io::Error& error) const {
  if (error.kind == io::ErrorKind::cancelled)
    log_.say(fmt::format("the model after step {} was {}not written: the run ends", step, how));
  else
    log_.say(fmt::format("warning: the model after step {} was {}not written, the run goes on: {}", step, how,
                         error.message()));
}

std::string what_else_is_left(const TrainOptions& options) {
  if (std::error_code absent; !fs::is_directory(options.out, absent)) return "";
  try {
    const auto newest = Checkpoints(options.out).newest(last_file(options));
    return newest ? "; the newest model that was exported is " + fs::absolute(*newest).string() : "";
  } catch (const Exception&) {
    return "";  // it cannot be read: what went wrong before is to be said
  }
}

bool RunResult::has_checkpoint(std::int64_t step) const {
  return folder_ && Checkpoints(folder_->path()).has(step);
}

ExportWeights RunResult::weights_of(Session& session) const {
  return [this, &session](const fs::path& folder, const Progress& progress) {
    if (options_.method != "lora") return session.export_hf(folder, progress);
    if (options_.merge) return session.export_merged(options_.model, folder, progress);
    return session.export_adapter(folder, fs::absolute(options_.model).lexically_normal());
  };
}

std::string RunResult::fill(const ResultFolder& folder, const std::string& made_by, const ExportWeights& weights,
                            const Progress& progress) const {
  folder.begin(last_file(options_));
  companions_->copy_to(folder.path());
  write_text(folder.path() / "tierflow_run.json", made_by + "\n");
  return weights(folder.path(), progress);
}

namespace {

// What a result has besides weights, as far as it is still there. Without it the model is written all the same.
void copy_companions(const RunRecord& run, const ResultFolder& out, TrainingLog& log) {
  std::string why = run.model.empty() ? "the state does not say of which model they are" : run.model + " is gone";
  std::error_code ignored;
  try {
    if (fs::is_directory(run.model, ignored)) {
      const bool own = fs::is_regular_file(run.chat_template, ignored);
      return CompanionFiles(run.model, own ? fs::path(run.chat_template) : fs::path()).copy_to(out.path());
    }
  } catch (const Exception& error) {
    why = error.what();
  }
  log.say("warning: the tokenizer's files are not in the result: " + why);
}

// Of the store's newest generation.
void write_left(const ExportOptions& options, const LeftStore& left, TrainingLog& log) {
  ResultFolder out(options.out);
  std::string whole;  // the file that says so
  {
    const StoredModel model = open_stored_model(options.storage);
    const auto script = script_in(model, options.storage);
    whole = script ? script->last_file() : is_written_beside_base(model.spec) ? kAdapterLast : kModelLast;
    if (script && !script->remark().empty()) log.say("warning: " + script->remark());
    out.begin(whole.empty() ? kModelLast : whole);
    if (!script) copy_companions(RunRecord::parse(left.client), out, log);
  }
  const std::string broken = export_store(options.storage, options.out, log.stoppable_progress(),
                                          RunRecord::parse(left.client).model, weights_of_run(left.run));
  warn_of_not_finite(broken, log);
  if (whole.empty()) {  // then the mark of begin() stays until here
    fs::remove(out.path() / (std::string(kModelLast) + ".partial"));
    sync_folder(out.path());
  }
  out.finish();
}

}  // namespace

int run_export(const ExportOptions& options) {
  watch_signals();
  TrainingLog log({}, false);
  const auto said = [&](const std::string& more) {
    log.say("result: " + fs::absolute(options.out).string() + more);
    return 0;
  };
  if (const auto step = exported_by_the_run(options, log)) {
    std::error_code absent;
    if (!fs::is_directory(options.out, absent) || fs::is_empty(options.out, absent))
      fail(
          io::ErrorKind::environment, options.out.string(),
          "the run wrote its model there, and it is not there: the run sees other folders, as one in a container does");
    return said(fmt::format(", the model after step {}", *step));
  }
  const LeftStore left = expect_left_store(options.storage);
  if (!left.passed_over.empty())
    log.say(
        fmt::format("warning: the model after step {} is written, which may not be the newest that was committed: {}",
                    left.step, left.passed_over));
  try {
    write_left(options, left, log);
  } catch (const Exception& damaged) {
    if (damaged.error().kind != io::ErrorKind::corruption || left.generations != 2) throw;
    fail_with_more(damaged.error(),
                   "`tierflow verify` says whether the generation before it is whole, from which the run goes on");
  }
  return said("");
}

int run_merge(const MergeOptions& options) {
  watch_signals();
  const fs::path model = options.model.empty() ? named_base(options.adapter) : options.model;
  TrainingLog log({}, false);
  say_if_for_other_weights(options.adapter, model, options.read_as, log);
  warn_of_not_finite(merge_model(model, options.adapter, options.out, log.stoppable_progress(), options.read_as), log);
  log.say("result: " + fs::absolute(options.out).string());
  return 0;
}

}  // namespace tierflow
