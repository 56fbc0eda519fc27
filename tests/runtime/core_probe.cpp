// Shows the Python tests what the C++ side reads: `check FOLDER` prints every parameter's elements, sum and first
// value; `tokens TOKENIZER PYTHON FILE` prints token ids, one a line; `sequences OPTIONS`, a JSON object, prints a JSON
// array a training sequence, [ids, labels, positions], in the order of an epoch.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/data/data.h"
#include "runtime/spec/model_spec.h"

namespace {

void check(const std::filesystem::path& folder) {
  const auto spec = tierflow::read_model_spec(folder / "config.json");
  const auto checkpoint = tierflow::Checkpoint::open(folder);
  tierflow::check_tensors(spec, checkpoint);
  for (const auto& unit : spec.units)
    for (const auto& tensor : unit.tensors) {
      std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
      checkpoint.read_f32(tensor.name, 0, values);
      double sum = 0;
      for (const float value : values) sum += value;
      std::printf("%s %zu %.17g %.9g\n", tensor.name.c_str(), values.size(), sum, static_cast<double>(values[0]));
    }
}

void tokens(const std::string& tokenizer, const std::string& python, const std::string& file) {
  tierflow::DataOptions options{.paths = {file},
                                .tokenizer = tokenizer,
                                .python = python,
                                .vocab_size = 1 << 20,
                                .sequence_length = 2,
                                .held_out = 0};
  options.sequence_length = tierflow::Dataset::prepare(options).tokens();
  std::vector<std::int64_t> ids(static_cast<std::size_t>(options.sequence_length));
  tierflow::Dataset::prepare(options).training_sequence(0, ids);
  for (const auto id : ids) std::printf("%lld\n", static_cast<long long>(id));
}

void sequences(const std::string& text) {
  const auto given = nlohmann::json::parse(text);
  const auto path = [&](const char* name) { return std::filesystem::path(given.value(name, "")); };
  tierflow::DataOptions options{.weights = given.value("weights", std::vector<double>{}),
                                .format = given.value("format", "auto"),
                                .train_on = given.value("train_on", "assistant"),
                                .packing = given.value("packing", "auto"),
                                .chat_template = path("chat_template"),
                                .tokenizer = path("tokenizer"),
                                .python = path("python"),
                                .row_cache = path("row_cache"),
                                .cache = path("cache"),
                                .vocab_size = 1 << 20,
                                .pairs = tierflow::Pairs::either,
                                .sequence_length = given.at("sequence_length"),
                                .held_out = given.value("held_out", 0.0),
                                .seed = given.value("seed", std::uint64_t{0}),
                                .skip_bad_records = given.value("skip", false)};
  for (const std::string name : given.at("paths")) options.paths.emplace_back(name);
  const auto data = tierflow::Dataset::prepare(options);
  const auto length = static_cast<std::size_t>(options.sequence_length);
  std::vector<std::int64_t> ids(length), labels(length), positions(length);
  for (std::int64_t i = 0; i < data.training_sequences(); ++i) {
    data.training_sequence(i, ids, labels, positions);
    std::printf("%s\n", nlohmann::json::array({ids, labels, positions}).dump().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 2 && words[0] == "check") return check(words[1]), 0;
    if (words.size() == 4 && words[0] == "tokens") return tokens(words[1], words[2], words[3]), 0;
    if (words.size() == 2 && words[0] == "sequences") return sequences(words[1]), 0;
    return 2;
  } catch (const tierflow::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.error().kind);
  }
}
