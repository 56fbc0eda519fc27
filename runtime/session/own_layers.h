#pragma once
// What the functions that change a model need of a user's own layers (layers.h). Inside of session.
#include <memory>

#include "runtime/models/layered_model.h"
#include "runtime/spec/adapter_config.h"

namespace tierflow {

// The same modules under another specification; null for a model that is not of Layers. Throws Exception (kind usage)
// where a module that is no tierflow::Linear has an adapter there.
std::shared_ptr<LayeredModel> own_layers_as(const LayeredModel& model, const ModelSpec& spec);

// `config` with the path of each module that it names; unchanged for a model that is not of Layers. Throws Exception
// (kind usage) for what a user's own layers do not have.
AdapterConfig named_in_own_layers(const LayeredModel& model, AdapterConfig config);

// The matrices of a user's own layers that are no linear layer's weight: they stay in bf16. Empty for other models.
std::vector<std::string> no_linear_weights(const LayeredModel& model);

}  // namespace tierflow
