#pragma once
// Rotary embeddings and spans of attention as config.json describes them.
#include "runtime/base/strict_json.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Which rotary embeddings a class may have.
struct RopeRule {
  double partial = 1.0;  // the share of a head's dimensions that rotates if config.json does not say
  bool any = false;      // config.json may have another share
  bool alpha = false;    // "dynamic" with an alpha: theta is multiplied with alpha^(d / (d - 2)), d that rotate
};

// transformers 5 writes rope_parameters, for a model with types of layers one object for each; earlier versions
// rope_theta beside rope_scaling. `type`: whose object ("full_attention"), where there is one for each.
RopeSpec read_rope(const JsonFields& fields, const ModelConfig& config, double theta, const RopeRule& rule = {},
                   const char* type = nullptr);

// For each layer whether its attention slides: layer_types, else all but every `period`-th; 0: none does. Throws
// Exception (kind input) for types that are neither.
std::vector<bool> sliding_layers(const JsonFields& fields, const ModelConfig& config, std::int64_t period);

}  // namespace tierflow
