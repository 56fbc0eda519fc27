#pragma once
// What this process and this machine have of memory, and how sizes are written for people.
#include <cstdint>
#include <string>

namespace tierflow {

std::uint64_t resident_set_peak();  // of this process, in bytes
std::uint64_t resident_set();       // now
std::uint64_t memory_available();   // of the machine, or of the cgroup where that is less

std::string human_bytes(std::uint64_t bytes);
// 7.62B, 152.0M, 0.66M, 8192: of parameters and tokens.
std::string human_count(double n);

}  // namespace tierflow
