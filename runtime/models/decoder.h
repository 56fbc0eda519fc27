#pragma once
// All models that model_spec.h reads: one interpreter of their description in spec/decoder_spec.h.
#include <memory>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

std::unique_ptr<LayeredModel> make_decoder(ModelSpec spec);

}  // namespace tierflow::models
