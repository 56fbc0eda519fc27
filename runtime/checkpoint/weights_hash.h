#pragma once
// Tells models of the same shapes apart by some of their values.
#include <cstdint>
#include <set>
#include <string>

#include "runtime/checkpoint/safetensors.h"

namespace tierflow {

// Of each tensor's name and shape, and of up to 1,024 values at its beginning, its middle and its end. The same values
// have the same hash whatever type stores them and however they are split into files. Reads 12 KiB a tensor. Throws
// Exception as Checkpoint does. without: names of tensors that are left out.
std::uint64_t weights_hash(const Checkpoint& checkpoint, const std::set<std::string>& without = {});

}  // namespace tierflow
