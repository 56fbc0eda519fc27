#pragma once
// Measures this machine and a model's stages as a session uses them: the same device, pages, threads and kernels.
#include "runtime/planning/profile.h"

namespace tierflow {

// Copies, updates, norms and checksums; reads and writes of the storage folders, where there are any. Takes about three
// seconds besides storage. To each storage folder it writes up to 256 MB, or, for a whole measurement, 2 GB.
enum class Length : std::uint8_t { brief, whole };
MachineProfile measure_machine(const SessionOptions& options, Length length, const Say& say);

// One micro-batch in each class of stages, forward and backward, in about `seconds`. A model that would take longer is
// measured as a narrower one and scaled (ModelProfile::width). Takes the memory of the largest stage. Says how much is
// done and how long the rest will take.
ModelProfile measure_model(const ModelSpec& spec, const SessionOptions& options, double seconds, const Say& say);

// Floating-point operations a second of one large product, on the session's device.
double product_rate(const SessionOptions& options);

}  // namespace tierflow
