#pragma once
// How the next token is chosen: generation_config.json, as transformers writes it.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tierflow {

// transformers' names and meanings. First comes the repetition penalty, then what may not come, then temperature,
// top_k, top_p and min_p.
struct Sampling {
  bool sample = false;      // do_sample; else the most likely token, the lowest id among equals
  double temperature = 1;   // logits are divided by it
  std::int64_t top_k = 50;  // this many of the most likely tokens stay; 0: all
  double top_p = 1;         // the most likely tokens that together reach this probability stay
  double min_p = 0;         // tokens with at least this share of the most likely one's probability stay
  double repetition_penalty =
      1;  // logits of tokens that came before are divided by it, or multiplied if they are below 0
  std::int64_t no_repeat_ngram_size =
      0;                            // no sequence of N tokens comes twice, those of the prompt included; 0: they may
  std::int64_t min_new_tokens = 0;  // tokens that come before one that may end the text
  std::vector<std::int64_t> suppress_tokens;  // never come
};

struct GenerationConfig {
  Sampling sampling;
  std::vector<std::int64_t> stop_tokens;  // eos_token_id
  std::vector<std::string> not_applied;   // fields that would change the text and are not supported
};

// transformers' defaults, changed by the model folder's generation_config.json if there is one. If it names no
// eos_token_id, that of config.json is used. Throws Exception (kind input), which names file and field.
GenerationConfig read_generation_config(const std::filesystem::path& model);

}  // namespace tierflow
