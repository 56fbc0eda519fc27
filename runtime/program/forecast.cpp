#include "runtime/program/forecast.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/signals.h"
#include "runtime/planning/probed_model.h"
#include "runtime/program/session_settings.h"
#include "runtime/program/step_trace.h"
#include "runtime/program/train_library.h"
#include "runtime/session/profiler.h"

namespace tierflow {
namespace {

constexpr double kStageSeconds = 8;      // for measuring the stages at the start of a run
constexpr double kMeasuring = 12;        // what all of it takes, about
constexpr double kPays = 10;             // a run this many times as long is worth it
constexpr double kSlowest = 1e9;         // operations a second that any machine does
constexpr std::size_t kJudgedSteps = 8;  // after the first, whose state is still on its way

}  // namespace

Forecast::Forecast(const ModelSpec& spec, TrainingLog& log) : spec_(spec), log_(log) {}

// Measuring writes to the drives: not under a limit of what a run may write, nor for a run that uses none.
bool Forecast::pays(const SessionOptions& session, std::int64_t steps) const {
  if (session.storage.empty() || session.write_limit != 0) return false;
  double operations = 0;
  for (int stage = 0; stage < static_cast<int>(spec_.stages.size()); ++stage)
    operations += 3 * stage_operations(spec_, stage, session.micro_batch, session.sequence_length);
  const double all = operations * session.micro_batches * static_cast<double>(steps);
  constexpr double kEnough = kPays * kMeasuring;
  return all / kSlowest > kEnough && all / product_rate(session) > kEnough;
}

void Forecast::measure(const SessionOptions& session) {
  const Say say = [this](const std::string& line) {
    throw_if_stopped();
    log_.say(line);
  };
  log_.say(fmt::format("this machine has no profile for this run yet: measured once, in about {:.0f} s", kMeasuring));
  try {
    Profile profile;
    const auto machine = cache_->machine();
    profile.machine = machine ? *machine : measure_machine(session, Length::brief, say);
    profile.model = measure_model(spec_, session, kStageSeconds, say);
    if (!machine) cache_->keep(profile.machine);
    cache_->keep(profile.model);
    profile_ = std::move(profile);
  } catch (const Stopped&) {
    throw;
  } catch (const Exception& error) {
    log_.say(std::string("warning: not measured: ") + error.what());
  } catch (const c10::Error& error) {
    log_.say(std::string("warning: not measured: ") + error.what_without_backtrace());
  }
}

void Forecast::choose(SessionOptions& session, std::int64_t steps) {
  cache_.emplace(spec_, session, train_build(), log_.teller());
  auto machine = cache_->machine();
  auto model = cache_->model();
  if (machine && model && model->covers(spec_))
    profile_ = Profile{*std::move(machine), *std::move(model)};
  else if (pays(session, steps))
    measure(session);
  if (!profile_) return;
  const Placement placement = choose_placement(spec_, session, *profile_);
  if (placement.plan.arrangement.staged)
    log_.say("clipping: " + speculation_text(placement.prediction.step_seconds, placement.step_seconds_speculative,
                                             placement.staged_because,
                                             session.micro_batch * session.micro_batches * session.sequence_length));
}

void Forecast::predict_steps(const Session& session, const SessionOptions& options, RunSummary& summary) {
  if (!profile_) return log_.say("no prediction: `tierflow plan` with these options measures this machine, once");
  summary.prediction = predict(session.plan(), rates_of(spec_, *profile_), kTracedSteps);
  summary.predicted_memory = predicted_memory(session.plan(), options, spec_, profile_->model);
  const double tokens = static_cast<double>(options.micro_batch * options.micro_batches * options.sequence_length);
  log_.say(fmt::format("predicted: {:.3g} s a step, {}; the process {} at most", summary.prediction->step_seconds,
                       speed_text(tokens / summary.prediction->step_seconds),
                       human_bytes(summary.predicted_memory.process)));
  if (const std::string doubt = doubt_of(*profile_); !doubt.empty()) log_.say("that is rough: " + doubt);
}

void Forecast::begin_step(const Session& session) {
  before_ = session.lanes();
  constexpr auto kCompute = static_cast<std::size_t>(swap::Lane::compute);
  between_ = before_[kCompute].tasks != after_[kCompute].tasks;
  if (++begun_ == 2) load_.emplace();
}

void Forecast::end_step(const Session& session, const StepResult& result) {
  const auto now = after_ = session.lanes();
  if (!profile_ || judged_ || begun_ < 2 || between_ || result.skipped || result.computed_again != 0) return;
  if (!as_predicted(result)) return;
  StepShown& step = shown_.emplace_back(StepShown{.seconds = result.seconds});
  for (int lane = 0; lane < swap::kLanes; ++lane)
    step.busy_seconds[lane] = now[lane].busy_seconds - before_[lane].busy_seconds;
  if (shown_.size() >= kJudgedSteps) finish(session);
}

void Forecast::finish(const Session& session) {
  if (!profile_ || judged_ || shown_.empty()) return;
  judged_ = true;
  const Verdict verdict = judge(spec_, session.plan(), *profile_, shown_, load_->other_cores());
  if (!verdict.line.empty()) log_.say(verdict.line);
  // A head that distils takes its own time, of which the profile of other runs should know nothing.
  if (!verdict.corrected || session.options().loss.distills()) return;
  cache_->keep(verdict.corrected->machine);
  cache_->keep(verdict.corrected->model);
}

}  // namespace tierflow
