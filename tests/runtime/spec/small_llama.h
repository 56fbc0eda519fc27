#pragma once
// A Llama of three layers with an untied head.
#include "runtime/spec/model_spec.h"

namespace tierflow::testing {

inline ModelSpec small_llama() {
  return parse_model_spec(R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64})",
                          "llama");
}

}  // namespace tierflow::testing
