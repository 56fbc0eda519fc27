#pragma once
// The timeline of a run's first steps, measured beside predicted, in the file that --trace names.
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/planning/prediction.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

inline constexpr std::int64_t kTracedSteps = 4;

class StepTrace {
 public:
  // An empty path traces nothing. Throws Exception if the file cannot be written.
  StepTrace(std::filesystem::path path, TrainingLog& log);

  bool wanted() const { return !path_.empty(); }
  // Drops what ran since the last step: loading and evaluation.
  void begin_step(Session& session);
  // Keeps the timeline of one of the first kTracedSteps steps; after the last of these the file is written.
  void end_step(std::int64_t step, Session& session, const std::optional<Prediction>& prediction);
  // After a run of `steps` steps: if the run was shorter than kTracedSteps, writes what there is.
  void finish(std::int64_t steps, const std::optional<Prediction>& prediction);

 private:
  void write(std::int64_t steps, const std::optional<Prediction>& prediction);

  const std::filesystem::path path_;
  TrainingLog& log_;
  std::vector<swap::TaskRecord> timeline_;
  std::map<std::string, double> stalled_;  // by cause, in the traced steps
  double traced_seconds_ = 0;
};

}  // namespace tierflow
