#include "runtime/program/step_trace.h"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>

#include "runtime/base/exception.h"

namespace tierflow {

StepTrace::StepTrace(std::filesystem::path path, TrainingLog& log) : path_(std::move(path)), log_(log) {
  if (wanted() && !std::ofstream(path_, std::ios::app))
    throw Exception(io::Error{.kind = io::ErrorKind::environment,
                              .operation = "open",
                              .path = path_.string(),
                              .error_number = errno,
                              .detail = "--trace must name a file that can be written"});
}

void StepTrace::begin_step(Session& session) {
  if (wanted()) session.take_timeline();
}

void StepTrace::end_step(std::int64_t step, Session& session, const std::optional<Prediction>& prediction) {
  if (!wanted()) return;
  std::vector<swap::TaskRecord> records = session.take_timeline();
  if (step > kTracedSteps) return;
  const swap::Summary summary = swap::summarise(records);
  traced_seconds_ += summary.end - summary.begin;
  for (const auto& [cause, seconds] : summary.stalled_by_cause()) stalled_[cause] += seconds;
  timeline_.insert(timeline_.end(), std::make_move_iterator(records.begin()), std::make_move_iterator(records.end()));
  if (step == kTracedSteps) write(step, prediction);
}

void StepTrace::finish(std::int64_t steps, const std::optional<Prediction>& prediction) {
  if (wanted() && steps < kTracedSteps) write(steps, prediction);
}

void StepTrace::write(std::int64_t steps, const std::optional<Prediction>& prediction) {
  std::vector<swap::NamedTimeline> timelines{{"measured", timeline_}};
  if (prediction) timelines.push_back({"predicted", prediction->records});
  if (const io::Error error = swap::write_trace(path_, timelines)) return log_.say("warning: " + error.message());
  std::string causes;
  double stalled = 0;
  for (const auto& [cause, seconds] : stalled_) {
    causes += fmt::format("{}{:.2f} s for {}", causes.empty() ? ": " : ", ", seconds, cause);
    stalled += seconds;
  }
  log_.say(fmt::format("trace of {} steps: {}; compute waited {:.2f} of {:.2f} s{}", steps, path_.string(), stalled,
                       traced_seconds_, causes));
  timeline_ = {};
}

}  // namespace tierflow
