#include "swap/plan.h"

namespace tierflow::swap {

const char* lane_name(Lane lane) {
  static constexpr const char* kNames[kLanes] = {"disk_read", "disk_write", "upload", "download",
                                                 "compute",   "update",     "commit"};
  return kNames[static_cast<int>(lane)];
}

const char* task_name(TaskKind kind) {
  static constexpr const char* kNames[] = {"read_hi",           "read_state",
                                           "read_gradient",     "write_hi",
                                           "write_state",       "write_gradient",
                                           "upload_hi",         "download_hi",
                                           "download_gradient", "save_activations",
                                           "load_activations",  "read_activations",
                                           "write_activations", "compute",
                                           "measure",           "update",
                                           "read_gradient_low", "write_gradient_low",
                                           "accumulate",        "upload_state",
                                           "upload_gradient",   "update_on_device",
                                           "download_state",    "commit",
                                           "catch_up",          "keep_gradient"};
  return kNames[static_cast<int>(kind)];
}

const char* pass_name(Pass pass) {
  static constexpr const char* kNames[] = {"forward", "head", "backward", "evaluate"};
  return kNames[static_cast<int>(pass)];
}

}  // namespace tierflow::swap
