#pragma once
// How far a long call has come.
#include <cstdint>
#include <functional>

namespace tierflow {

// `done` of `total` bytes of the phase: "loading weights", "exporting", "saving" Called from the thread that works.
using Progress = std::function<void(const char* phase, std::uint64_t done, std::uint64_t total)>;

}  // namespace tierflow
