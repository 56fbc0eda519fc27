#include "runtime/spec/generation_config.h"

#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kLargestFile = 16 << 20;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;

// A number or a list of numbers; false where there is none.
bool read_stop_tokens(const JsonFields& fields, std::vector<std::int64_t>& tokens) {
  const Json* ids = fields.find("eos_token_id");
  if (ids == nullptr) return false;
  for (const Json& id : ids->is_array() ? *ids : Json::array({*ids})) {
    if (!id.is_number_integer() || id < 0 || id >= kMostTokens)
      fields.fail("eos_token_id", "must be the id of a token, or a list of ids");
    tokens.push_back(id.get<std::int64_t>());
  }
  return true;
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
    if (read_stop_tokens(fields, config.stop_tokens)) return config;
  }
  const auto of_model = model / "config.json";
  const Json root = parse_json(read_text(of_model, kLargestFile), of_model.string());
  const JsonFields fields(root, of_model.string());
  read_stop_tokens(fields, config.stop_tokens);
  return config;
}

}  // namespace tierflow
