#include "runtime/base/signals.h"
#include "runtime/program/run_common.h"
#include "runtime/program/train.h"
#include "runtime/session/profiler.h"

namespace tierflow {

int run_profile(const ProfileJob& job) {
  watch_signals();
  const Say say = [&](const std::string& line) {
    throw_if_stopped();
    job.say(line);
  };
  prepare_torch(job.options.device, job.options.update_threads);
  if (job.machine != nullptr) *job.machine = measure_machine(job.options, Length::whole, say);
  throw_if_stopped();
  if (job.model != nullptr) *job.model = measure_model(job.spec, job.options, job.seconds, say);
  throw_if_stopped();
  return 0;
}

}  // namespace tierflow
