#pragma once
// Layers of one's own (layers.h) for the functions that change a model. Inside of session.
#include <memory>

#include "runtime/models/layered_model.h"
#include "runtime/spec/adapter_config.h"

namespace tierflow {

// The same modules under another specification; null for a model that is not of Layers. Throws Exception (kind usage)
// where a module that is no tierflow::Linear has an adapter there.
std::shared_ptr<LayeredModel> own_layers_as(const LayeredModel& model, const ModelSpec& spec);

// `config` with each module that it means by its path; as it is for a model that is not of Layers. Throws Exception
// (kind usage) for what layers of one's own have none of.
AdapterConfig named_in_own_layers(const LayeredModel& model, AdapterConfig config);

// The matrices of layers of one's own that are no linear layer's weight: they stay in bf16. Empty for other models.
std::vector<std::string> no_linear_weights(const LayeredModel& model);

}  // namespace tierflow
