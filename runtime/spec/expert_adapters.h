#pragma once
// Adapters of experts' parameters, beside those of linear layers that adapters.cpp adds. Inside of spec alone.
#include <string_view>

#include "runtime/spec/adapter_choice.h"
#include "runtime/spec/adapter_config.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Where PEFT wraps two parameters of a module, this stands in the path of the first.
inline constexpr std::string_view kInnerWrapper = ".base_layer";

// Throws Exception (kind usage) for what adapters of parameters do not have.
void check_expert_adapters(const AdapterConfig& config);
// Adds factors of each expert to the units that its matrices are in, for each parameter that the configuration names.
// Throws Exception (kind usage) for a name that fits none, with those there are, and for a router's.
void add_expert_adapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice);

}  // namespace tierflow
