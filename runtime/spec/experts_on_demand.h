#pragma once
// Makes the experts of a mixture units of their own, so that a pass without gradients fetches only those that have
// tokens.
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Makes one stage of each layer with experts, its experts units on demand: a block, or where attention has a stage of
// its own, that and a stage of experts. What is computed has the same bits. Adapters and the base's format are as they
// were, so they come first. Nothing changes where the model has no experts, or where cutting a tensor of several
// experts would change the bits of its format, whose scales serve several of them (always in nf4_double). Not for
// training.
void set_experts_on_demand(ModelSpec& spec);
bool has_experts_on_demand(const ModelSpec& spec);

}  // namespace tierflow
