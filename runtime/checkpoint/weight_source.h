#pragma once
// Sources of a model's first weights.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Fills elements [first, first + out.size()) of a tensor with its initial fp32 values. Called from several threads.
using WeightSource = std::function<void(const TensorSpec& tensor, std::uint64_t first, std::span<float> out)>;

// Weights that a source stores in a format other than bf16. has: whether it stores the tensor of that name in that
// format. read: the stored bytes (weight_format.h) of such a tensor.
struct StoredSource {
  std::function<bool(const std::string& name, WeightFormat format)> has;
  std::function<std::vector<std::byte>(const TensorSpec& tensor)> read;
};

// The stored bytes of a frozen tensor in its format, which is not bf16. If the source stores the tensor in this format,
// its bytes are taken; else they are made from its values, piece by piece. fill: as `weights`; it may take several
// threads. Throws Exception (kind input), which names the tensor.
std::vector<std::byte> stored_weight(const TensorSpec& tensor, const StoredSource& stored,
                                     const std::function<void(std::uint64_t first, std::span<float> out)>& fill);

}  // namespace tierflow
