#pragma once
// How a model's text is drawn: generation_config.json, as transformers writes it.
#include <cstdint>
#include <filesystem>
#include <vector>

namespace tierflow {

// transformers' names and meanings; what is applied comes in this order, after the repetition penalty.
struct Sampling {
  bool sample = false;            // do_sample; else the most likely token, the lowest id among equals
  double temperature = 1;         // logits are divided by it
  std::int64_t top_k = 50;        // the most likely so many stay; 0: all
  double top_p = 1;               // the most likely tokens that together reach this probability stay
  double min_p = 0;               // those at least that share of the most likely one's probability stay
  double repetition_penalty = 1;  // logits of tokens that are there already are divided by it, or multiplied below 0
};

struct GenerationConfig {
  Sampling sampling;
  std::vector<std::int64_t> stop_tokens;  // eos_token_id
};

// What the model folder's generation_config.json says, if there is one, over transformers' defaults; where that names
// no eos_token_id, config.json's. Throws Exception (kind input) naming file and field.
GenerationConfig read_generation_config(const std::filesystem::path& model);

}  // namespace tierflow
