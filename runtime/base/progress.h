#pragma once
// How a long call reports what it does.
#include <cstdint>
#include <functional>
#include <string>

namespace tierflow {

// `done` of `total` units of the phase ("loading weights", "evaluating", "exporting", "saving", ...): bytes, elements
// or visits of a stage, as the phase counts. Called on the thread that works.
using Progress = std::function<void(const char* phase, std::uint64_t done, std::uint64_t total)>;

// A line for the user about what goes on.
using Say = std::function<void(const std::string& line)>;

// Called on the thread that writes a file, before `bytes` bytes of it go to the drive, and before `bytes` bytes are
// read back. It may wait. An exception from it ends the writing.
using BeforeMove = std::function<void(std::uint64_t bytes)>;

}  // namespace tierflow
