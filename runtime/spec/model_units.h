#pragma once
// The tensors of each family, by the names and shapes that transformers saves.
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Fills units and stages from a checked config.
void build_units(ModelSpec& spec);

}  // namespace tierflow
