#pragma once
// Rotary tables, as transformers computes them (Su et al., RoFormer; Meta's smoothing for Llama 3.1; Peng et al., YaRN;
// Ding et al., LongRoPE).
#include <ATen/core/Tensor.h>

#include <utility>

#include "runtime/spec/model_spec.h"

namespace tierflow::models {

// Inverse frequencies, fp32 [rotated / 2], for sequences of `positions` tokens. Throws Exception for an unknown type.
at::Tensor inverse_frequencies(const RopeSpec& rope, std::int64_t head_dim, std::int64_t positions);
// cos and sin, fp32 [positions, rotated / 2] on `device`, of sequences of `context` tokens.
std::pair<at::Tensor, at::Tensor> rope_tables(const RopeSpec& rope, std::int64_t head_dim, std::int64_t positions,
                                              std::int64_t context, at::Device device);

}  // namespace tierflow::models
