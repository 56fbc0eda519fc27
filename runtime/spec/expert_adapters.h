#pragma once
// Adapters of experts' parameters, besides those of linear layers that adapters.cpp adds. Only for use inside of spec.
#include <set>
#include <string>

#include "runtime/spec/adapter_choice.h"
#include "runtime/spec/adapter_config.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Adds factors of each expert to the units that its matrices are in, for each parameter that the configuration names.
// unused: names that fit no weight of a linear layer. Throws Exception (kind usage) for one that fits none of experts
// either, with those there are, for a router's, and where PEFT would take the factors for others.
void add_expert_adapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice,
                         std::set<std::string> unused);

// PEFT 0.21 takes modules of some mixtures that are called as experts' were in transformers 4 for these. Whether this
// one, with an adapter, has to stand among the parameters, as its weight, if PEFT is to find it.
bool is_taken_for_expert(const ModelConfig& config, const std::string& module);
bool has_layers_taken_for_experts(const ModelSpec& spec);
// Whether PEFT 0.21 rewrites what chooses modules of this model: of an expression it keeps last names alone, and takes
// parameters of experts that it fits for modules.
bool is_rewritten_by_peft(const ModelConfig& config);

// Whether transformers 5 does not tell PEFT that the matrices of this model's experts are stacked transposed: to PEFT,
// the factor of their inputs is that of their results.
bool turns_experts_in_peft(const ModelConfig& config);

}  // namespace tierflow
