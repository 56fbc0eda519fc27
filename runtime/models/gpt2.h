#pragma once
// GPT-2: learned positions, layer norms before the sublayers, weights [in, out].
#include <memory>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

std::unique_ptr<LayeredModel> make_gpt2(ModelSpec spec);

}  // namespace tierflow::models
