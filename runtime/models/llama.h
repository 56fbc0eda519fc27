#pragma once
// The Llama family: Llama 2 and 3, Mistral (sliding window), Qwen2 (biases of q, k, v), Qwen3 (norms of q and k).
#include <memory>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

std::unique_ptr<LayeredModel> make_llama(ModelSpec spec);

}  // namespace tierflow::models
