#pragma once
// Reports the progress of a long call.
#include <cstdint>
#include <functional>

namespace tierflow {

// `done` of `total` units of the phase ("loading weights", "evaluating", "exporting", "saving", ...): bytes, elements
// or visits of a stage, as the phase counts. Called on the thread that works.
using Progress = std::function<void(const char* phase, std::uint64_t done, std::uint64_t total)>;

// Called on the thread that writes a file, before `bytes` bytes of it go to the drive, and before `bytes` bytes are
// read back. It may wait. An exception from it ends the writing.
using BeforeMove = std::function<void(std::uint64_t bytes)>;

}  // namespace tierflow
