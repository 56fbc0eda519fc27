#include "runtime/train.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "runtime/exception.h"
#include "runtime/layers.h"
#include "runtime/machine.h"
#include "runtime/plan_report.h"
#include "runtime/profiler.h"
#include "runtime/run_common.h"

namespace tierflow {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// The schedules of transformers.get_scheduler: linear warm-up from 0, then the named decay to 0 at the last step.
double learning_rate(const TrainOptions& options, std::int64_t step, std::int64_t steps) {
  const auto done = static_cast<double>(step), warmup = static_cast<double>(options.warmup);
  if (done < warmup) return options.lr * done / warmup;
  if (options.lr_schedule == "constant") return options.lr;
  const double share = (done - warmup) / std::max(1.0, static_cast<double>(steps) - warmup);
  if (options.lr_schedule == "linear") return options.lr * std::max(0.0, 1.0 - share);
  return options.lr * 0.5 * (1.0 + std::cos(M_PI * std::min(1.0, share)));
}

constexpr std::int64_t kTracedSteps = 4;

class Training {
 public:
  Training(const TrainOptions& options, TrainingLog& log)
      : options_(options),
        log_(log),
        spec_(training_spec(options)),
        data_(Dataset::prepare(data_options(options, spec_, fs::temp_directory_path()))) {
    per_step_ = options.micro_batch * options.micro_batches;
    steps_ = options.steps;
    if (steps_ == 0)
      steps_ =
          std::max<std::int64_t>(1, std::max<std::int64_t>(1, options.epochs) * data_.training_sequences() / per_step_);
  }

  int run() {
    open_session();
    evaluate(0, first_held_out_);
    last_held_out_ = first_held_out_;
    std::int64_t step = 0;
    bool at_limit = false, out_of_memory = false;
    while (!out_of_memory && step < steps_ && signals_seen() == 0 && !(at_limit = next_step_passes_limit()))
      out_of_memory = !within_memory(step, [&] {
        train_step(step);
        ++step;
        trace(step);
        if (options_.eval_every > 0 && step % options_.eval_every == 0 && step < steps_) evaluate(step, last_held_out_);
      });
    if (!options_.trace.empty() && step < kTracedSteps) write_trace(step);
    const int signal = signals_seen();
    if (at_limit)
      log_.say(fmt::format("stopped after step {} of {}: the next one would pass --max-tb-written {}", step, steps_,
                           options_.max_tb_written));
    if (signal != 0)
      log_.say(fmt::format("stopped after step {} of {}; once more ends without writing the result", step, steps_));
    if (!out_of_memory && step > 0 && ((signal == 0 && !at_limit) || options_.eval_every > 0))
      out_of_memory = !within_memory(step, [&] { evaluate(step, last_held_out_); });
    write_result();
    summarise(step);
    if (out_of_memory) return static_cast<int>(io::ErrorKind::memory);
    if (signal != 0) return 128 + signal;
    return at_limit ? kStoppedAtLimit : 0;
  }

 private:
  void open_session() {
    const std::uint64_t device_fixed = prepare_torch(device_of(options_), options_.threads);
    SessionOptions session =
        train_settings(options_, device_fixed, [this](const std::string& line) { log_.say(line); });
    session.record = !options_.trace.empty();
    write_limit_ = session.write_limit;
    announce_device(options_, session, log_);
    read_profile(session);
    const AdamW adamw{.lr = options_.lr,
                      .beta1 = options_.beta1,
                      .beta2 = options_.beta2,
                      .eps = options_.eps,
                      .weight_decay = options_.weight_decay};
    session_ = std::make_unique<Session>(
        options_.config.empty() ? load(options_.model) : Model{make_model(spec_), random_weights(options_.seed)},
        session, adamw,
        [this](const char* phase, std::uint64_t done, std::uint64_t total) { log_.progress(phase, done, total); });
    log_.say(session_->describe());
    predict_steps(session);
    if (const auto mode = session_->storage_mode())
      for (const std::string& warning : mode->warnings) log_.say("warning: " + warning);
    log_.say(fmt::format("{} training sequences of {} tokens, {} held out; {} steps of {} tokens",
                         data_.training_sequences(), options_.sequence_length, data_.held_out_sequences(), steps_,
                         per_step_ * options_.sequence_length));
  }

  // What a plan measured, and what follows from it. Nothing is measured here: that would write to the drives.
  void read_profile(SessionOptions& session) {
    const ProfileCache cache(spec_, session, train_build(), [this](const std::string& line) { log_.say(line); });
    auto machine = cache.machine();
    auto model = cache.model();
    if (!machine || !model || !model->covers(spec_)) return;
    profile_ = Profile{*std::move(machine), *std::move(model)};
    choose_placement(spec_, session, *profile_);
  }

  void predict_steps(const SessionOptions& session) {
    if (!profile_) return log_.say("no prediction: `tierflow plan` with these options measures this machine, once");
    prediction_ = predict(session_->plan(), rates_of(spec_, *profile_), kTracedSteps);
    predicted_memory_ = predicted_memory(session_->plan(), session, spec_, profile_->model);
    log_.say(fmt::format("predicted: {:.3g} s a step, {:.0f} tokens/s; the process {} at most",
                         prediction_->step_seconds, per_step_ * options_.sequence_length / prediction_->step_seconds,
                         human_bytes(predicted_memory_.process)));
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
    } catch (const c10::OutOfMemoryError& error) {  // for a batch, between steps
      if (step == 0) throw Exception(io::ErrorKind::memory, error.what_without_backtrace());
      return stop(error.what_without_backtrace());
    }
  }

  void train_step(std::int64_t step) {
    const auto read = [this](std::int64_t index, std::span<std::int64_t> out) { data_.training_sequence(index, out); };
    std::vector<MicroBatch> batches;
    for (std::int64_t i = 0; i < options_.micro_batches; ++i)
      batches.push_back(micro_batch(read, step * per_step_ + i * options_.micro_batch, options_.micro_batch,
                                    options_.sequence_length));
    if (!options_.trace.empty()) session_->take_timeline();  // of loading and evaluation
    const double lr = learning_rate(options_, step, steps_);
    const StepResult result = session_->step(batches, lr);
    last_loss_ = result.loss;
    if (result.computed_again > 0)
      log_.say(
          fmt::format("warning: device memory ran out in step {}; computed again after caches were freed: {} stages",
                      result.step, result.computed_again));
    log_.step(result, steps_, lr, *session_);
  }

  // Keeps the timeline of the first steps and drops what ran between them.
  void trace(std::int64_t step) {
    if (options_.trace.empty()) return;
    std::vector<swap::TaskRecord> records = session_->take_timeline();
    if (step > kTracedSteps) return;
    const swap::Summary summary = swap::summarise(records);
    traced_seconds_ += summary.end - summary.begin;
    for (const auto& [cause, seconds] : summary.stalled_by_cause()) stalled_[cause] += seconds;
    timeline_.insert(timeline_.end(), std::make_move_iterator(records.begin()), std::make_move_iterator(records.end()));
    if (step == kTracedSteps) write_trace(step);
  }

  void write_trace(std::int64_t steps) {
    std::vector<swap::NamedTimeline> timelines{{"measured", timeline_}};
    if (prediction_) timelines.push_back({"predicted", prediction_->records});
    if (const io::Error error = swap::write_trace(options_.trace, timelines))
      return log_.say("warning: " + error.message());
    std::string causes;
    double stalled = 0;
    for (const auto& [cause, seconds] : stalled_) {
      causes += fmt::format("{}{:.2f} s for {}", causes.empty() ? ": " : ", ", seconds, cause);
      stalled += seconds;
    }
    log_.say(fmt::format("trace of {} steps: {}; compute waited {:.2f} of {:.2f} s{}", steps, options_.trace.string(),
                         stalled, traced_seconds_, causes));
    timeline_ = {};
  }

  void evaluate(std::int64_t step, double& loss) {
    std::int64_t count = data_.held_out_sequences();
    if (options_.eval_sequences > 0) count = std::min(count, options_.eval_sequences);
    if (count == 0) return;
    const auto read = [this](std::int64_t index, std::span<std::int64_t> out) { data_.held_out_sequence(index, out); };
    std::vector<MicroBatch> batches;
    for (std::int64_t first = 0; first < count; first += options_.micro_batch)
      batches.push_back(
          micro_batch(read, first, std::min(options_.micro_batch, count - first), options_.sequence_length));
    loss = session_->evaluate(batches);
    log_.evaluation(step, loss, *session_);
  }

  void write_result() {
    if (options_.no_export) return session_->commit();
    session_->export_hf(options_.out, [this](const char* phase, std::uint64_t done, std::uint64_t total) {
      log_.progress(phase, done, total);
    });
    const fs::path from = options_.config.empty() ? options_.model : options_.config.parent_path();
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                             "merges.txt", "tokenizer.model", "generation_config.json"}) {
      std::error_code ignored;
      if (fs::exists(from / name, ignored))
        fs::copy_file(from / name, options_.out / name, fs::copy_options::overwrite_existing, ignored);
    }
    std::ofstream(options_.out / "tierflow_run.json") << effective_configuration(options_) << '\n';
  }

  void summarise(std::int64_t steps) {
    const MemoryUse memory = session_->memory();
    json lanes;
    for (int i = 0; i < swap::kLanes; ++i) {
      const auto counters = session_->lanes()[i];
      lanes[swap::lane_name(static_cast<swap::Lane>(i))] = {{"bytes", counters.bytes},
                                                            {"busy_s", counters.busy_seconds}};
    }
    json storage;
    if (const auto mode = session_->storage_mode())
      storage = {{"engine", io::engine_name(mode->engine)},
                 {"direct", mode->direct},
                 {"registered_buffers", mode->registered_buffers},
                 {"alignment", mode->alignment}};
    const auto or_null = [](double loss) { return std::isnan(loss) ? json() : json(loss); };
    const json summary{{"steps", steps},
                       {"tokens_per_s", log_.tokens_per_second()},
                       {"training_s", log_.training_seconds()},
                       {"loss", or_null(last_loss_)},
                       {"held_out_loss_before", or_null(first_held_out_)},
                       {"held_out_loss_after", or_null(last_held_out_)},
                       {"skipped_steps", session_->skipped_steps()},
                       {"parameters", session_->parameters()},
                       {"limit", log_.limiting_lane(*session_)},
                       {"device_memory_peak", memory.device_peak},
                       {"device_memory_budget", memory.device_budget},
                       {"host_memory", memory.host_used},
                       {"host_memory_budget", memory.host_budget},
                       {"storage_bytes", memory.storage_bytes},
                       {"tb_written", 1e-12 * static_cast<double>(session_->bytes_written())},
                       {"tb_written_per_step", log_.terabytes_a_step()},
                       {"storage_mode", storage},
                       {"peak_rss", resident_set_peak()},
                       {"lanes", lanes},
                       {"predicted", predicted_json()},
                       {"out", options_.no_export ? json() : json(fs::absolute(options_.out).string())}};
    log_.object({{"summary", summary}});
    const auto moved = [&](const char* lane) { return human_bytes(lanes[lane]["bytes"].get<std::uint64_t>()); };
    log_.say(fmt::format("\n{} steps in {:.1f} s: {:.0f} tokens/s, limited by {}", steps, log_.training_seconds(),
                         log_.tokens_per_second(), log_.limiting_lane(*session_)));
    if (prediction_ && steps > 1)
      log_.say(fmt::format("predicted {:.3g} s a step, measured {:.3g}: {:+.1f}%", prediction_->step_seconds,
                           log_.typical_step_seconds(),
                           100 * (prediction_->step_seconds / log_.typical_step_seconds() - 1)));
    log_.say(fmt::format("held-out loss {:.4f} before, {:.4f} after", first_held_out_, last_held_out_));
    log_.say(fmt::format("device memory {} at most, budget {}; host memory {}, budget {}; process {} at most",
                         human_bytes(memory.device_peak), human_bytes(memory.device_budget),
                         human_bytes(memory.host_used), human_bytes(memory.host_budget),
                         human_bytes(resident_set_peak())));
    log_.say(fmt::format("moved: storage {} read, {} written; {} to the device, {} from it; {} updated",
                         moved("disk_read"), moved("disk_write"), moved("upload"), moved("download"), moved("update")));
    if (storage.is_object())
      log_.say(fmt::format("storage wrote {:.3g} TB in this run, {:.3g} TB a step",
                           1e-12 * static_cast<double>(session_->bytes_written()), log_.terabytes_a_step()));
    if (session_->skipped_steps() > 0)
      log_.say(fmt::format("{} steps were skipped: a loss or gradient was not finite", session_->skipped_steps()));
    if (options_.no_export)
      log_.say("result: in the store; `tierflow export --storage ... --out ...` writes it as a model folder");
    else
      log_.say("result: " + fs::absolute(options_.out).string());
  }

  json predicted_json() const {
    if (!prediction_) return {};
    json lanes;
    for (int lane = 0; lane < swap::kLanes; ++lane)
      lanes[swap::lane_name(static_cast<swap::Lane>(lane))] = {{"bytes", prediction_->bytes[lane]},
                                                               {"busy_s", prediction_->step.busy_seconds[lane]}};
    return {{"step_s", prediction_->step_seconds},
            {"measured_step_s", log_.typical_step_seconds()},
            {"lanes", lanes},
            {"device_memory_peak", predicted_memory_.device},
            {"host_memory", predicted_memory_.host},
            {"peak_rss", predicted_memory_.process}};
  }

  const TrainOptions& options_;
  TrainingLog& log_;
  const ModelSpec spec_;
  Dataset data_;
  std::unique_ptr<Session> session_;
  std::int64_t per_step_ = 1, steps_ = 0;
  std::uint64_t write_limit_ = 0;
  std::optional<Profile> profile_;
  std::optional<Prediction> prediction_;
  PredictedMemory predicted_memory_;
  std::vector<swap::TaskRecord> timeline_;
  std::map<std::string, double> stalled_;  // by cause, in the traced steps
  double traced_seconds_ = 0;
  double first_held_out_ = NAN, last_held_out_ = NAN, last_loss_ = NAN;
};

void check_out(const fs::path& out) {
  std::error_code ignored;
  if (fs::exists(out, ignored) && !(fs::is_directory(out, ignored) && fs::is_empty(out, ignored)))
    throw Exception(io::Error{.kind = io::ErrorKind::usage,
                              .path = out.string(),
                              .detail = "--out exists and is not an empty folder: name another, or remove it"});
}

void check_trace(const fs::path& path) {
  if (!std::ofstream(path))
    throw Exception(io::Error{.kind = io::ErrorKind::environment,
                              .operation = "open",
                              .path = path.string(),
                              .error_number = errno,
                              .detail = "--trace must name a file that can be written"});
}

}  // namespace

int run_train(const TrainOptions& options) {
  if (!options.no_export) check_out(options.out);
  if (!options.trace.empty()) check_trace(options.trace);
  watch_signals();
  TrainingLog log(options.log_json, options.json);
  log.say(effective_configuration(options));
  log.object({{"config", json::parse(effective_configuration(options))}});
  return Training(options, log).run();
}

int run_eval(const EvalOptions& options) {
  watch_signals();
  TrainingLog log(options.log_json, false);
  Model model = load(options.model);
  const ModelSpec& spec = model.layers->spec();
  const Dataset data = Dataset::prepare(data_options(options, spec, fs::temp_directory_path()));
  const std::uint64_t device_fixed = prepare_torch(device_of(options), options.threads);
  SessionOptions settings = session_settings(options, device_fixed, [&](const std::string& line) { log.say(line); });
  settings.train = false;
  announce_device(options, settings, log);
  Session session(model, settings, {}, [&](const char* phase, std::uint64_t done, std::uint64_t total) {
    log.progress(phase, done, total);
  });
  std::int64_t count = data.training_sequences();
  if (options.max_sequences > 0) count = std::min(count, options.max_sequences);
  const auto read = [&](std::int64_t index, std::span<std::int64_t> out) { data.training_sequence(index, out); };
  double sum = 0;
  std::int64_t targets = 0;
  for (std::int64_t first = 0; first < count; first += options.micro_batch) {
    if (signals_seen() != 0) return 128 + signals_seen();
    const MicroBatch batch =
        micro_batch(read, first, std::min(options.micro_batch, count - first), options.sequence_length);
    const std::int64_t tokens = batch.target_tokens();
    sum += session.evaluate({batch}) * static_cast<double>(tokens);
    targets += tokens;
    log.progress("evaluating", first + options.micro_batch, std::max(count, first + options.micro_batch));
  }
  const double loss = sum / static_cast<double>(std::max<std::int64_t>(1, targets));
  const json result{{"loss", loss}, {"perplexity", std::exp(loss)}, {"tokens", targets}, {"sequences", count}};
  log.object(result);
  if (options.json)
    std::cout << result.dump() << std::endl;
  else
    std::cout << fmt::format("loss {:.6f}  perplexity {:.4f}  ({} tokens in {} sequences)", loss, std::exp(loss),
                             targets, count)
              << std::endl;
  return 0;
}

int run_profile(const ProfileJob& job) {
  prepare_torch(job.options.device, job.options.update_threads);
  if (job.machine != nullptr) *job.machine = measure_machine(job.options, job.say);
  if (job.model != nullptr) *job.model = measure_model(job.spec, job.options, job.say);
  return 0;
}

int run_export(const ExportOptions& options) {
  check_out(options.out);
  TrainingLog log({}, false);
  export_store(options.storage, options.out,
               [&](const char* phase, std::uint64_t done, std::uint64_t total) { log.progress(phase, done, total); });
  log.say("result: " + fs::absolute(options.out).string());
  return 0;
}

}  // namespace tierflow
