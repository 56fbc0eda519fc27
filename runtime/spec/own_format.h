#pragma once
// The format in which a model's folder has the base weights.
#include <functional>
#include <string>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// The unconverted format in which the folder has some of the weights that set_base_format() is for, as `has` says; bf16
// if there is none.
WeightFormat own_format(const ModelSpec& spec,
                        const std::function<bool(const std::string& name, WeightFormat format)>& has);

}  // namespace tierflow
