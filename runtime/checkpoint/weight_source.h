#pragma once
// Where a model's first weights come from.
#include <cstdint>
#include <functional>
#include <span>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Fills elements [first, first + out.size()) of a tensor with its initial fp32 values. Called from several threads.
using WeightSource = std::function<void(const TensorSpec& tensor, std::uint64_t first, std::span<float> out)>;

}  // namespace tierflow
