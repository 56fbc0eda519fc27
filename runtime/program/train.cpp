#include "runtime/program/train.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/seconds.h"
#include "runtime/base/signals.h"
#include "runtime/base/terminal.h"
#include "runtime/device/device_memory.h"
#include "runtime/planning/export_request.h"
#include "runtime/planning/moved_store.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/program/distillation_run.h"
#include "runtime/program/forecast.h"
#include "runtime/program/held_out.h"
#include "runtime/program/left_run.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/preference_run.h"
#include "runtime/program/run_common.h"
#include "runtime/program/run_identity.h"
#include "runtime/program/run_record.h"
#include "runtime/program/run_result.h"
#include "runtime/program/run_summary.h"
#include "runtime/program/samples.h"
#include "runtime/program/step_trace.h"
#include "runtime/program/training_spec.h"
#include "runtime/session/schedule.h"

namespace tierflow {
namespace {

// Whether it is the state of a run that computed its reference before its first step, as earlier versions always did.
bool brings_reference(const LeftStore& left) {
  const auto run = nlohmann::json::parse(left.run, nullptr, false);
  return left.resumable && run.is_object() && !run.contains("reference");
}

class Training {
 public:
  // elsewhere: the folders in which the state lies, if it has to be moved.
  Training(const TrainOptions& options, LeftStore left, Folders elsewhere, TrainingLog& log)
      : options_(options),
        left_(std::move(left)),
        elsewhere_(std::move(elsewhere)),
        log_(log),
        spec_(training_spec(left_.resumable ? with_base_of(elsewhere_.empty() ? options.storage : elsewhere_, options)
                                            : options)),
        forecast_(spec_, log),
        out_(options, spec_, left_.resumable, log, beside_),
        trace_(options.trace, log),
        data_(prepare_data(data_options(options, spec_, temporary_folder()), log)),
        base_is_reference_(base_is_reference(options, spec_) && !brings_reference(left_)),
        preference_(options, data_, base_is_reference_),
        teacher_(options, spec_.config.vocab_size, data_),
        sample_prompts_(options, spec_),
        samples_(sample_prompts_),
        held_out_(options, data_, preference_, out_, log, record_, result_) {
    if (!options.no_export) result_.out = options.out;
    per_step_ = options.micro_batch * options.micro_batches * sequences_in_one(options);
    steps_ = options.steps;
    if (steps_ == 0)
      steps_ = (std::max<std::int64_t>(1, options.epochs) * data_.training_sequences() + per_step_ - 1) / per_step_;
    schedule_ = {.lr = highest_lr(options), .kind = options.lr_schedule, .warmup = options.warmup, .steps = steps_};
  }

  int run() {
    if (!spec_.wrapper.empty())
      log_.say(fmt::format("the text model of {} is trained: {}", printable(spec_.wrapper),
                           result_of_text_model(options_, spec_)));
    if (is_unconverted(spec_.base_format) && options_.base_precision == kOwnFormat)
      log_.say(fmt::format("the base stays in {}, as the folder has it; --base-precision bf16 makes bf16 of it",
                           weight_format_name(spec_.base_format)));
    if (left_.resumable && left_.step > steps_)
      fail(
          io::ErrorKind::usage, left_.state.string(),
          fmt::format("holds the state after step {0}, and this run would end after step {1}: --steps {0} writes it as "
                      "the result, more go on, --fresh begins anew",
                      left_.step, steps_));
    open_session();
    requests_.emplace(options_.storage, log_.teller());
    out_.check_space();  // once more: the store lies on the same drive, it may be
    log_.begin();
    try {
      preference_.set_reference(*session_, session_->options().run, log_);
    } catch (...) {
      discard_unless_resumed();  // without a step the state is worth nothing
      throw;
    }
    std::int64_t step = begun_ = session_->steps();
    if (session_->waits_for_gradient() && options_.method == "lora") {
      log_.say("first values of the adapters: from the gradient of the first step's batch");
      session_->begin_with_gradient(batches_of(0));
    }
    if (step == 0) evaluate_first();
    held_out_.recall(*session_);
    bool at_limit = false;
    bool out_of_memory = step > 0 && step < steps_ && !within_memory(step, [&] { between_steps(step); });
    while (!out_of_memory && step < steps_ && stop_signal() == 0 && !too_many_skipped() && !held_out_.stops_early() &&
           !(at_limit = next_step_passes_limit()))
      out_of_memory = !within_memory(step, [&] {
        if (!train_step(step)) return;
        ++step;
        held_out_.remember(*session_);
        trace_.end_step(step, *session_, result_.prediction);
        samples_.after_step(step, *session_, log_);
        if (step < steps_) between_steps(step);
      });
    beside_.finish(*session_);
    trace_.finish(step, result_.prediction);
    forecast_.finish(*session_);
    const int signal = stop_signal();
    if (at_limit)
      log_.say(fmt::format("stopped after step {} of {}: the next one would pass --max-tb-written {}", step, steps_,
                           options_.max_tb_written));
    if (step == 0 && stop_signal() != 0) {
      discard_unless_resumed();
      throw_if_stopped();
    }
    if (step < steps_ && session_->commit_every() != 0 && (signal != 0 || at_limit || out_of_memory)) {
      leave_state(step);
      return out_of_memory ? static_cast<int>(io::ErrorKind::memory) : signal != 0 ? 128 + signal : kStoppedAtLimit;
    }
    if (signal != 0)
      log_.say(fmt::format("stopped after step {} of {}; once more ends without writing the result", step, steps_));
    if (too_many_skipped())
      log_.say(fmt::format("stopped after step {} of {}: a loss or gradient was not finite in the last {} steps", step,
                           steps_, record_.skipped_in_a_row));
    if (held_out_.stops_early() && step < steps_)
      log_.say(
          fmt::format("stopped early after step {} of {}: the last {} evaluations did not improve on the lowest "
                      "held-out loss by more "
                      "than {}",
                      step, steps_, record_.best.since, options_.early_stopping_threshold));
    // A step whose loss is not finite changed nothing; whether the model is sound, an evaluation tells.
    const bool doubtful = step > 0 && !std::isfinite(result_.last_loss);
    if (doubtful && !out_of_memory) {
      if (!held_out_.evaluated(step))
        out_of_memory = !within_memory(step, [&] { held_out_.evaluate(*session_, step, result_.held_out_after); });
      if (!out_of_memory) refuse_unless_finite(step);
    }
    const bool stopped = step < steps_ && !held_out_.stops_early();
    out_.write(
        *session_, stopped ? stopped_at(made_by_, step, steps_) : made_by_,
        [this](const char* phase, std::uint64_t done, std::uint64_t total) { log_.progress(phase, done, total); });
    if (!options_.no_export) session_->discard();
    if (!doubtful && !out_of_memory && step > 0 && ((signal == 0 && !at_limit) || options_.eval_every > 0)) {
      if (!held_out_.evaluated(step)) out_of_memory = !evaluate_result(step);
      if (!out_of_memory) refuse_unless_finite(step);
    }
    result_.steps = step;
    held_out_.say_best(step, true);
    report(result_, *session_, log_);
    if (out_of_memory) return static_cast<int>(io::ErrorKind::memory);
    if (signal != 0) return 128 + signal;
    if (too_many_skipped()) return static_cast<int>(io::ErrorKind::numeric);
    return at_limit ? kStoppedAtLimit : 0;
  }

 private:
  void open_session() {
    const Say say = log_.teller();
    const std::uint64_t device_fixed = prepare_torch(device_of(options_), options_.threads);
    std::string run = run_identity(options_, data_.fingerprint(), hash_of_weights(options_, spec_, left_.resumable),
                                   teacher_.hash(), base_is_reference_);
    if (left_.resumable) {
      expect_same_run(left_.run, run, elsewhere_.empty() ? options_.storage : elsewhere_);
      run = with_weights_of(left_.run, run);
    }
    if (!elsewhere_.empty())
      move_store(volume_in(options_, engine_kind(options_.engine)), elsewhere_, say, log_.stoppable_progress());
    SessionOptions session = train_settings(options_, device_fixed, say);
    session.loss.base_is_reference = base_is_reference_;
    session.record = trace_.wanted();
    session.run = run;
    record_.configuration = configuration_hash(made_by_);
    tell_model(options_, record_);
    session.remembered = record_.json();
    teacher_.tell(session);
    preference_.set_aside(session, say);
    sample_prompts_.set_aside(session, spec_, say);
    if (left_.resumable) {
      session.resume = true;
      session.chunk_elements = left_.chunk_elements;
      session.embedding_part = left_.embedding_part;
    }
    write_limit_ = session.write_limit;
    if (!left_.resumable) say_what_differs(options_.adapter, options_, log_);
    announce_device(options_, session, log_);
    forecast_.choose(session, steps_);
    const AdamW adamw{.lr = highest_lr(options_),
                      .beta1 = options_.beta1,
                      .beta2 = options_.beta2,
                      .eps = options_.eps,
                      .weight_decay = options_.weight_decay};
    session_ =
        std::make_unique<Session>(training_model(options_, spec_), session, adamw, log_.stoppable_progress(), say);
    log_.say(wrapped(session_->describe(), columns_of(STDERR_FILENO)));
    forecast_.predict_steps(*session_, session, result_);
    if (const auto mode = session_->storage_mode())
      for (const std::string& warning : mode->warnings) log_.say("warning: " + warning);
    const std::int64_t each = sequences_in_one(options_);
    log_.say(fmt::format("{} training {} of {} tokens, {} held out; {} steps of {} tokens",
                         data_.training_sequences() / each, each == 2 ? "pairs" : "sequences",
                         each * options_.sequence_length, data_.held_out_sequences() / each, steps_,
                         per_step_ * options_.sequence_length));
    if (per_step_ > data_.training_sequences())
      log_.say(
          "warning: a step takes more sequences than there are, so some come several times in each: a smaller "
          "--micro-batches or --micro-batch takes each once");
    say_what_is_durable(options_, *session_, steps_, left_.resumable, log_);
  }

  // An unfinished run ends with its state committed, and without a result.
  void leave_state(std::int64_t step) {
    out_.commit(*session_);
    log_.say(
        fmt::format("the state after step {} of {} is committed in {}: the same command goes on from there, {} "
                    "writes it as a model folder",
                    step, steps_, options_.storage.front().string(), export_command(options_.storage)));
    log_.object({{"stopped", {{"step", step}, {"of", steps_}, {"committed", true}}}});
  }

  bool too_many_skipped() const { return options_.max_skipped > 0 && record_.skipped_in_a_row >= options_.max_skipped; }

  // What is due after a step that is not the last, unless the process before this one did it; and what is asked for.
  void between_steps(std::int64_t step) {
    beside_.look();
    if (held_out_.may_write(step)) beside_.finish(*session_);  // and who asks meanwhile has a turn
    requests_->answer(
        step, [&] { return stop_signal() == 0 && !beside_.busy(); },
        [&](const std::filesystem::path& out, const ExportRequests::Answer& answer) {
          out_.write_elsewhere(*session_, out, answer);
        });
    held_out_.between_steps(*session_, step, begun_);
  }

  // A model that gives no finite loss, when last looked at, is no result.
  void refuse_unless_finite(std::int64_t step) {
    if (std::isfinite(result_.evaluated ? result_.held_out_after : result_.last_loss)) return;
    result_.steps = step;
    result_.usable = false;
    held_out_.say_best(step, false);
    report(result_, *session_, log_);
    out_.refuse(*session_, fmt::format("there is no result: the loss is not finite after step {} of {}; the weights or "
                                       "the data are broken, or --lr is too high",
                                       step, steps_));
  }

  bool next_step_passes_limit() const {
    return options_.max_tb_written > 0 && session_->bytes_written_after_next_step() > write_limit_;
  }

  // False where device memory ran out and the session stands after `step` steps: the run ends there, with what was
  // trained so far as its result.
  template <class Work>
  bool within_memory(const std::int64_t& step, Work work) {
    const auto stop = [&](const char* why) {
      log_.say(fmt::format("stopped after step {} of {}: {}", step, steps_, why));
      return false;
    };
    try {
      work();
      return true;
    } catch (const Exception& error) {
      if (error.error().kind != io::ErrorKind::memory || !session_->intact() || step == 0) throw;
      return stop(error.what());
    } catch (const c10::Error& error) {  // for a batch, between steps
      if (!is_out_of_memory(error)) throw;
      if (step == 0) throw Exception(io::ErrorKind::memory, error.what_without_backtrace());
      return stop(error.what_without_backtrace());
    }
  }

  // Stopped before its first step, a run that began leaves nothing; one that goes on leaves what was there.
  void evaluate_first() {
    try {
      held_out_.evaluate(*session_, 0, result_.held_out_before);
    } catch (const Stopped&) {
      discard_unless_resumed();
      throw;
    }
  }

  void discard_unless_resumed() {
    if (!left_.resumable) session_->discard();
  }

  // The result is written by now: an evaluation that fails costs no training.
  bool evaluate_result(const std::int64_t& step) {
    try {
      return within_memory(step, [&] { held_out_.evaluate(*session_, step, result_.held_out_after); });
    } catch (const Exception& failed) {
      fail_with_more(failed.error(),
                     "the last evaluation failed; the " +
                         (options_.no_export ? fmt::format("state is whole: {} writes it as a model folder",
                                                           export_command(options_.storage))
                                             : "result is whole"));
    }
  }

  std::vector<MicroBatch> batches_of(std::int64_t step) const {
    std::vector<MicroBatch> batches;
    const std::int64_t rows = per_step_ / options_.micro_batches;
    for (std::int64_t i = 0; i < options_.micro_batches; ++i) {
      const std::int64_t first = step * per_step_ + i * rows;
      batches.push_back(preference_.batch(Sequences::training, first, rows));
      teacher_.add_to(batches.back(), first);
    }
    return batches;
  }

  // False: a signal came before the projections were made, and nothing has changed.
  bool begin_window(std::int64_t step, const std::vector<MicroBatch>& batches) {
    const auto begun = std::chrono::steady_clock::now();
    const std::uint64_t before = session_->bytes_written();
    session_->begin_with_gradient(batches);
    log_.no_step_moved_that(*session_);
    if (session_->waits_for_gradient()) {
      if (stop_signal() != 0) return false;
      log_.say(fmt::format("the gradient of step {} is not finite: no projections are made of it", step + 1));
      return true;
    }
    const double seconds = seconds_since(begun);
    log_.say(fmt::format("projections for steps {} to {}: of the gradient of step {}, {:.1f} s", step + 1,
                         std::min(step + options_.galore.windows.steps, steps_), step + 1, seconds));
    log_.object({{"window",
                  {{"step", step + 1},
                   {"seconds", seconds},
                   {"tb_written", 1e-12 * static_cast<double>(session_->bytes_written() - before)}}}});
    return true;
  }

  // False: as begin_window().
  bool train_step(std::int64_t step) {
    const std::vector<MicroBatch> batches = batches_of(step);
    if (session_->waits_for_gradient() && !begin_window(step, batches)) return false;
    trace_.begin_step(*session_);
    const double lr = schedule_.after(step);
    forecast_.begin_step(*session_);
    const StepResult result = session_->step(batches, lr);
    if (!beside_.busy()) forecast_.end_step(*session_, result);
    result_.last_loss = result.loss;
    record_.skipped_in_a_row = result.skipped ? record_.skipped_in_a_row + 1 : 0;
    if (result.computed_again > 0)
      log_.say(
          fmt::format("warning: device memory ran out in step {}; computed again after caches were freed: {} stages",
                      result.step, result.computed_again));
    log_.step(result, steps_, lr, *session_);
    return true;
  }

  const TrainOptions& options_;
  const std::string made_by_ = effective_configuration(options_);
  const LeftStore left_;
  const Folders elsewhere_;
  TrainingLog& log_;
  const ModelSpec spec_;
  Forecast forecast_;
  RunResult out_;
  StepTrace trace_;
  Dataset data_;
  const bool base_is_reference_;
  PreferenceRun preference_;
  const DistillationRun teacher_;
  const SamplePrompts sample_prompts_;
  const Samples samples_;
  RunRecord record_;
  RunSummary result_;
  HeldOut held_out_;
  std::optional<ExportRequests> requests_;  // ahead of the session: it goes when the state is free
  std::unique_ptr<Session> session_;
  ExportBeside beside_{log_, options_.export_bandwidth};  // goes first: it may be writing what the session keeps
  std::int64_t per_step_ = 1, steps_ = 0;
  Schedule schedule_;
  std::int64_t begun_ = 0;  // step of the state with which this process began
  std::uint64_t write_limit_ = 0;
};

int train(const TrainOptions& options) {
  TrainingLog log(options.log_json, options.json);
  LeftRun left = find_left_run(options, log);
  if (left.finished) return 0;
  log.say(wrapped(describe(options), columns_of(STDERR_FILENO)));
  log.object({{"config", nlohmann::json::parse(effective_configuration(options))}});
  const bool goes_on = left.store.resumable;
  try {
    return Training(options, std::move(left.store), std::move(left.elsewhere), log).run();
  } catch (const Stopped&) {
    if (goes_on) throw_if_stopped("the state stays as it was, and the same command goes on from there");
    throw;
  }
}

}  // namespace

int run_train(const TrainOptions& options) {
  watch_signals();
  try {
    return train(options);
  } catch (const Exception& failed) {
    io::Error error = failed.error();
    const bool of_state = std::ranges::any_of(options.storage, [&](const std::filesystem::path& folder) {
      std::error_code unknown;
      return std::filesystem::equivalent(std::filesystem::path(error.path).parent_path(), folder, unknown);
    });
    if (error.kind == io::ErrorKind::locked && of_state)
      fail_with_more(error, "`tierflow status` shows how far it is; another run needs another folder as --storage");
    if (error.kind != io::ErrorKind::corruption || !(of_state || error.path.empty())) throw;
    error.detail += what_else_is_left(options);
    throw Exception(std::move(error));
  }
}

}  // namespace tierflow
