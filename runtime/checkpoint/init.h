#pragma once
// Random initial weights: each number is a function of (seed, tensor, element) alone, so that any cut of a tensor, on
// any machine and any number of threads, has the same values.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Elements [first, first + out.size()) of the tensor's initial values: zeros, ones, or normal or uniform with its
// init_std (normal: cut at 6.2 standard deviations). Any thread may call it.
void initial_values(const TensorSpec& tensor, std::uint64_t seed, std::uint64_t first, std::span<float> out);

// Nearest bf16, ties to even; what a checkpoint made of initial values holds.
std::uint16_t to_bf16(float value);

// Writes config.json and bf16 safetensors with initial values into the folder, in bounded memory. The config.json is
// written last: a folder without it is not finished. Where the weights cannot be written, or `stop` says so, what was
// written is removed and an Exception thrown (cancelled, for `stop`). as: as in read_model_spec().
void init_checkpoint(const std::filesystem::path& config_json, const std::filesystem::path& folder, std::uint64_t seed,
                     std::uint64_t shard_bytes = std::uint64_t{5} << 30, const std::function<bool()>& stop = {},
                     const std::string& as = "");

}  // namespace tierflow
