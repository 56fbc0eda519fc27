#include <c10/util/Exception.h>

#include <stdexcept>

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"
#include "runtime/program/train.h"

namespace {

// torch's own errors carry a backtrace: the program, which has no torch, gets their line.
template <class Work>
int without_backtrace(Work work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    if (tierflow::is_out_of_memory(error))
      throw tierflow::Exception(tierflow::io::ErrorKind::memory, error.what_without_backtrace());
    throw std::runtime_error(error.what_without_backtrace());
  }
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int tierflow_run_train(const tierflow::TrainOptions* options) {
  return without_backtrace([&] { return tierflow::run_train(*options); });
}
__attribute__((visibility("default"))) int tierflow_run_eval(const tierflow::EvalOptions* options) {
  return without_backtrace([&] { return tierflow::run_eval(*options); });
}
__attribute__((visibility("default"))) int tierflow_run_generate(const tierflow::GenerateOptions* options) {
  return without_backtrace([&] { return tierflow::run_generate(*options); });
}
__attribute__((visibility("default"))) int tierflow_run_export(const tierflow::ExportOptions* options) {
  return without_backtrace([&] { return tierflow::run_export(*options); });
}
__attribute__((visibility("default"))) int tierflow_run_merge(const tierflow::MergeOptions* options) {
  return without_backtrace([&] { return tierflow::run_merge(*options); });
}
__attribute__((visibility("default"))) int tierflow_run_profile(const tierflow::ProfileJob* job) {
  return without_backtrace([&] { return tierflow::run_profile(*job); });
}
}
