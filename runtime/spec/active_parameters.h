#pragma once
// How much of a mixture of experts one token takes.
#include <cstdint>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// Parameters that one token is computed with: all but the experts that it does not choose, and but the other tokens'
// rows of an embedding that no head shares.
std::int64_t active_parameters(const ModelSpec& spec);

}  // namespace tierflow
