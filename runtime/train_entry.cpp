#include "runtime/train.h"

extern "C" {
__attribute__((visibility("default"))) int tierflow_run_train(const tierflow::TrainOptions* options) {
  return tierflow::run_train(*options);
}
__attribute__((visibility("default"))) int tierflow_run_eval(const tierflow::EvalOptions* options) {
  return tierflow::run_eval(*options);
}
__attribute__((visibility("default"))) int tierflow_run_export(const tierflow::ExportOptions* options) {
  return tierflow::run_export(*options);
}
__attribute__((visibility("default"))) int tierflow_run_profile(const tierflow::ProfileJob* job) {
  return tierflow::run_profile(*job);
}
}
