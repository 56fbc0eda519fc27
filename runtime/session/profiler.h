#pragma once
// Measures this machine and a model's stages as a session uses them: the same device, pages, threads and kernels.
#include <memory>

#include "runtime/planning/profile.h"
#include "swap/device.h"

namespace tierflow {

// Copies, updates, norms and checksums; reads and writes of the storage folders, where there are any. About three
// seconds beside storage, which is given up to 256 MB a folder to write, or, for a whole measurement, 2 GB.
enum class Length : std::uint8_t { brief, whole };
MachineProfile measure_machine(const SessionOptions& options, Length length, const Say& say);

// One micro-batch in each class of stages, forward and backward, in about so many seconds: what takes longer is
// measured on a narrower model and scaled (ModelProfile::width). Takes the memory of the largest stage. Says how far it
// is and how long it will take.
ModelProfile measure_model(const ModelSpec& spec, const SessionOptions& options, double seconds, const Say& say);

// Floating-point operations a second of one large product, on the session's device.
double product_rate(const SessionOptions& options);

// The device of a session with these options.
std::unique_ptr<swap::Device> open_device(const SessionOptions& options);

}  // namespace tierflow
