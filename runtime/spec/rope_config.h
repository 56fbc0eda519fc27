#pragma once
// Rotary embeddings and spans of attention as config.json describes them.
#include "runtime/base/strict_json.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// The share of a head's dimensions that rotates: where config.json is silent, and whether it may say another one.
struct RotatedShare {
  double partial = 1.0;
  bool any = false;
};

// transformers 5 writes rope_parameters, for a model with types of layers one object for each; earlier versions
// rope_theta beside rope_scaling. `type`: whose object ("full_attention"), where there is one for each.
RopeSpec read_rope(const JsonFields& fields, const ModelConfig& config, double theta, const RotatedShare& share = {},
                   const char* type = nullptr);

// For each layer whether its attention slides: layer_types, else all but every `period`-th; 0: none does. Throws
// Exception (kind input) for types that are neither.
std::vector<bool> sliding_layers(const JsonFields& fields, const ModelConfig& config, std::int64_t period);

}  // namespace tierflow
