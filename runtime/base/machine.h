#pragma once
// The memory of this process and this machine, and how sizes are written for people.
#include <cstdint>
#include <string>

namespace tierflow {

std::uint64_t resident_set_peak();  // of this process, in bytes
std::uint64_t resident_set();       // now
std::uint64_t memory_available();   // of the machine, or of the cgroup if that has less

std::string human_bytes(std::uint64_t bytes);
// 7.62B, 152.0M, 0.66M, 8192: of parameters and tokens.
std::string human_count(double n);

}  // namespace tierflow
