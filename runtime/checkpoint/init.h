#pragma once
// Random initial weights. Each number depends only on (seed, tensor, element). So the values are the same however a
// tensor is cut, on any machine and with any number of threads.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Elements [first, first + out.size()) of the tensor's initial values: zeros, ones, or normal or uniform with its
// init_std (normal: cut at 6.2 standard deviations). Any thread may call it.
void initial_values(const TensorSpec& tensor, std::uint64_t seed, std::uint64_t first, std::span<float> out);

// The nearest bf16, ties to even, as a checkpoint of initial values has it.
std::uint16_t to_bf16(float value);

// Writes config.json and bf16 safetensors with initial values into the folder, in bounded memory. The config.json is
// written last: a folder without it is not finished. If the weights cannot be written, or `stop` returns true, what was
// written is removed and an Exception thrown (kind cancelled for `stop`). as: as in read_model_spec().
void init_checkpoint(const std::filesystem::path& config_json, const std::filesystem::path& folder, std::uint64_t seed,
                     std::uint64_t shard_bytes = std::uint64_t{5} << 30, const std::function<bool()>& stop = {},
                     const std::string& as = "");

}  // namespace tierflow
