#pragma once
// Tells models of the same shapes apart by some of their values.
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "runtime/checkpoint/safetensors.h"

namespace tierflow {

// Of each tensor's name and shape, and of up to 1,024 values at its beginning, its middle and its end. The same values
// have the same hash whatever type stores them and however they are split into files. Reads 12 KiB a tensor. Throws
// Exception as Checkpoint does. without: names of tensors that are left out.
std::uint64_t weights_hash(const Checkpoint& checkpoint, const std::set<std::string>& without = {});

// Of a model's folder, without what SourceFolder copies. as: as in read_model_spec(). Throws Exception as
// read_folder_spec() and Checkpoint do.
std::uint64_t weights_hash(const std::filesystem::path& folder, const std::string& as);
// As sixteen hexadecimal digits.
std::string hash_text(std::uint64_t hash);

}  // namespace tierflow
