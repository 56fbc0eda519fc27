#pragma once
// OPT: learned positions that start at 2, ReLU, layer norms before the sublayers or (norm_before false) after the
// residual sums.
#include <memory>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

std::unique_ptr<LayeredModel> make_opt(ModelSpec spec);

}  // namespace tierflow::models
