#pragma once
// Which stages compute the same thing on the same shapes, so that measuring one is enough. No torch here.
#include <string>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Equal for two stages of models of one config (depth apart) that take the same input and have the same tensors.
std::string stage_class(const ModelSpec& spec, int stage);

}  // namespace tierflow
