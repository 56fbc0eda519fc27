#include "runtime/spec/generation_config.h"

#include <utility>

#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kLargestFile = 16 << 20;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;

// A number or a list of numbers; false where there is none.
bool read_tokens(const JsonFields& fields, const char* name, std::vector<std::int64_t>& tokens) {
  const Json* ids = fields.find(name);
  if (ids == nullptr) return false;
  for (const Json& id : ids->is_array() ? *ids : Json::array({*ids})) {
    if (!id.is_number_integer() || id < 0 || id >= kMostTokens)
      fields.fail(name, "must be the id of a token, or a list of ids");
    tokens.push_back(id.get<std::int64_t>());
  }
  return true;
}

// Fields of transformers' that change which tokens come, with the value that changes nothing.
const std::vector<std::pair<std::string, Json>>& others() {
  static const std::vector<std::pair<std::string, Json>> all = {{"num_beams", 1},
                                                                {"typical_p", 1},
                                                                {"epsilon_cutoff", 0},
                                                                {"eta_cutoff", 0},
                                                                {"top_h", nullptr},
                                                                {"min_length", 0},
                                                                {"penalty_alpha", 0},
                                                                {"encoder_repetition_penalty", 1},
                                                                {"encoder_no_repeat_ngram_size", 0},
                                                                {"bad_words_ids", nullptr},
                                                                {"force_words_ids", nullptr},
                                                                {"constraints", nullptr},
                                                                {"forced_bos_token_id", nullptr},
                                                                {"forced_eos_token_id", nullptr},
                                                                {"begin_suppress_tokens", nullptr},
                                                                {"exponential_decay_length_penalty", nullptr},
                                                                {"sequence_bias", nullptr},
                                                                {"guidance_scale", 1},
                                                                {"watermarking_config", nullptr},
                                                                {"stop_strings", nullptr},
                                                                {"dola_layers", nullptr}};
  return all;
}

bool is_file(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

GenerationConfig read_generation_config(const std::filesystem::path& model) {
  GenerationConfig config;
  const auto own = model / "generation_config.json";
  if (is_file(own)) {
    const Json root = parse_json(read_text(own, kLargestFile), own.string());
    const JsonFields fields(root, own.string());
    Sampling& s = config.sampling;
    s.sample = fields.boolean_or("do_sample", s.sample);
    s.temperature = fields.number_or("temperature", s.temperature, 0, 1e6);
    s.top_k = fields.integer_or("top_k", s.top_k, 0, kMostTokens);
    s.top_p = fields.number_or("top_p", s.top_p, 0, 1);
    s.min_p = fields.number_or("min_p", s.min_p, 0, 1);
    s.repetition_penalty = fields.number_or("repetition_penalty", s.repetition_penalty, 1e-6, 1e6);
    if (s.sample && s.temperature == 0) s.sample = false;
    s.no_repeat_ngram_size = fields.integer_or("no_repeat_ngram_size", 0, 0, kMostTokens);
    s.min_new_tokens = fields.integer_or("min_new_tokens", 0, 0, kMostTokens);
    read_tokens(fields, "suppress_tokens", s.suppress_tokens);
    for (const auto& [name, neutral] : others())
      if (const Json* value = fields.find(name.c_str()); value != nullptr && *value != neutral)
        config.not_applied.push_back(name);
    if (read_tokens(fields, "eos_token_id", config.stop_tokens)) return config;
  }
  const auto of_model = model / "config.json";
  const Json root = parse_json(read_text(of_model, kLargestFile), of_model.string());
  const JsonFields fields(root, of_model.string());
  read_tokens(fields, "eos_token_id", config.stop_tokens);
  return config;
}

}  // namespace tierflow
