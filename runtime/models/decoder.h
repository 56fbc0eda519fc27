#pragma once
// Llama and the families that differ from it by what spec/decoder_spec.h says, all that model_spec.h reads: one
// interpreter of that description.
#include <memory>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

std::unique_ptr<LayeredModel> make_decoder(ModelSpec spec);

}  // namespace tierflow::models
