// What is made of each field of PEFT's adapter_config.json, of generation_config.json and of a quantization_config, and
// how it is refused, as golden/foreign_json.txt has it for the lines of golden/foreign_json_fields.txt. Where reading
// is meant to change, see golden_text.h.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/base/exception.h"
#include "runtime/spec/adapter_config.h"
#include "runtime/spec/generation_config.h"
#include "runtime/spec/model_spec.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/golden_text.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

using Json = nlohmann::json;

// What PEFT would read back, and what its file does not say.
Json adapters(const std::string& text) {
  const AdapterConfig config = parse_adapter_config(text, "file");
  check_adapters(config);
  Json json = Json::parse(adapter_config_json(config, /*transposed=*/false));
  json["parameters_alone"] = config.parameters_alone;
  return json;
}

Json generation(const std::string& text) {
  const TempDir folder;
  write_file(folder.path() / "generation_config.json", text);
  write_file(folder.path() / "config.json", R"({"eos_token_id": 77})");
  const GenerationConfig config = [&] {
    try {
      return read_generation_config(folder.path());
    } catch (const Exception& error) {
      std::string line = error.what();
      const std::string name = folder.path().string() + "/";
      if (const std::size_t at = line.find(name); at != std::string::npos) line.erase(at, name.size());
      throw Exception(error.error().kind, line);
    }
  }();
  const Sampling& s = config.sampling;
  return {{"sample", s.sample},
          {"temperature", s.temperature},
          {"top_k", s.top_k},
          {"top_p", s.top_p},
          {"min_p", s.min_p},
          {"repetition_penalty", s.repetition_penalty},
          {"no_repeat_ngram_size", s.no_repeat_ngram_size},
          {"min_new_tokens", s.min_new_tokens},
          {"suppress_tokens", s.suppress_tokens},
          {"stop_tokens", config.stop_tokens},
          {"not_applied", config.not_applied}};
}

Json quantised(const std::string& text) {
  check_quantised(text, "file");
  return "can be read";
}

// The values that are not those of `plain`.
std::string difference(const Json& plain, const Json& json) {
  if (!json.is_object()) return json.dump();
  std::string all;
  for (const auto& [name, value] : json.items())
    if (!plain.contains(name) || plain[name] != value) all += (all.empty() ? "" : ", ") + name + ": " + value.dump();
  return all.empty() ? "nothing" : all;
}

std::string outcome(const std::function<Json(const std::string&)>& read, const Json& plain, const std::string& text) {
  try {
    return difference(plain, read(text));
  } catch (const Exception& error) {
    return std::string("refused: ") + error.what();
  }
}

TEST(ForeignJson, EachFieldIsReadAsBefore) {
  std::ostringstream out;
  std::function<Json(const std::string&)> read;
  std::string least;
  Json plain;
  for (const std::string& line : lines_of(TIERFLOW_SPEC_GOLDEN "/foreign_json_fields.txt")) {
    if (line.starts_with("file ")) {
      read = line == "file adapter_config.json"      ? adapters
             : line == "file generation_config.json" ? generation
                                                     : quantised;
      least = line == "file adapter_config.json" ? R"("peft_type": "LORA")" : "";
      plain = line == "file quantization_config" ? Json() : read("{" + least + "}");
      out << (out.view().empty() ? "" : "\n") << line << '\n' << plain.dump(2) << '\n';
      continue;
    }
    Json config = Json::parse("{" + least + "}");
    config.update(Json::parse("{" + line + "}"));
    out << line << "\n  " << outcome(read, plain, config.dump()) << '\n';
  }
  expect_golden(TIERFLOW_SPEC_GOLDEN "/foreign_json.txt", out.str());
}

}  // namespace
}  // namespace tierflow::testing
