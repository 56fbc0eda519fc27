#pragma once
// Predicts a run's steps from the profile of this machine, and corrects the profile by what the steps take. Nothing
// here changes a bit of the run.
#include <array>
#include <optional>
#include <vector>

#include "runtime/base/load_meter.h"
#include "runtime/planning/correction.h"
#include "runtime/program/options.h"
#include "runtime/program/run_summary.h"

namespace tierflow {

class Forecast {
 public:
  // `spec` and `log` outlive it.
  Forecast(const ModelSpec& spec, TrainingLog& log);

  // Sets the choices that choose_placement() makes with the profile in the cache. If there is no profile and a run of
  // `steps` steps is long enough, this machine is measured first, before the session takes its memory, and the profile
  // is kept.
  void choose(SessionOptions& session, std::int64_t steps);
  // Prints the predicted time of the steps, if there is a profile.
  void predict_steps(const Session& session, const SessionOptions& options, RunSummary& summary);

  // Call these before and after each step.
  void begin_step(const Session& session);
  void end_step(const Session& session, const StepResult& result);
  // At the end of the run, however short: corrects the profile in the cache if the steps contradict it. end_step() does
  // this earlier, once there are enough steps.
  void finish(const Session& session);

 private:
  bool pays(const SessionOptions& session, std::int64_t steps) const;
  void measure(const SessionOptions& session);

  const ModelSpec& spec_;
  TrainingLog& log_;
  std::optional<ProfileCache> cache_;
  std::optional<Profile> profile_;
  std::array<swap::LaneCounters, swap::kLanes> before_{}, after_{};  // before the current step; after the last one
  bool between_ = false;  // other passes came before this step, and ran updates that it would have run
  std::int64_t begun_ = 0;
  std::optional<LoadMeter> load_;
  std::vector<StepShown> shown_;
  bool judged_ = false;
};

}  // namespace tierflow
