#pragma once
// A layer's experts as transformers 5 holds them: two parameters, gate_up_proj and down_proj, with the matrices of all
// experts, whatever a folder has. Adapters name these (PEFT's target_parameters).
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/spec/model_spec.h"

namespace tierflow {

inline constexpr const char* kExpertsIn = "gate_up_proj";  // rows of gate, then those of up; or by turns
inline constexpr const char* kExpertsDown = "down_proj";

// Where PEFT wraps two parameters of a module, this stands in the path of the first.
inline constexpr std::string_view kInnerWrapper = ".base_layer";

// The module in a layer that has them: "mlp.experts".
std::string expert_module(const ModelConfig& config);

// Which part of a parameter a tensor of the model is.
struct ExpertPart {
  std::string parameter;                 // its path: "model.layers.3.mlp.experts.gate_up_proj"
  std::int64_t expert = 0, experts = 1;  // the first, and how many
  std::int64_t row = 0, rows = 0;        // of each one's outputs
};
// Nothing, unless it has matrices of experts.
std::optional<ExpertPart> expert_part(const ModelConfig& config, const TensorSpec& tensor);

}  // namespace tierflow
