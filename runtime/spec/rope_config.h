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

// For each layer whether its attention slides, or is otherwise of the type `slides`: layer_types, else all but every
// `period`-th; 0: none does. Throws Exception (kind input) for types that are neither that nor full_attention.
std::vector<bool> sliding_layers(const JsonFields& fields, const ModelConfig& config, std::int64_t period,
                                 const char* slides = "sliding_attention");

// For each layer whether it has a rotary embedding: no_rope_layers; else, or if that is an empty list, all but every
// no_rope_layer_interval-th, 4 by default. Throws Exception (kind input) for other lists.
std::vector<bool> rotary_layers(const JsonFields& fields, const ModelConfig& config);

}  // namespace tierflow
