#pragma once
// Measures this machine and a model's stages as a session uses them: the same device, pages, threads and kernels.
#include "runtime/profile.h"

namespace tierflow {

// Copies, updates, norms and checksums; reads and writes of the storage folders, where there are any, which are given
// up to 2 GB to write. About three seconds beside storage.
MachineProfile measure_machine(const SessionOptions& options, const Say& say);

// One micro-batch in each class of stages, forward and backward. Takes the memory of the largest stage.
ModelProfile measure_model(const ModelSpec& spec, const SessionOptions& options, const Say& say);

}  // namespace tierflow
