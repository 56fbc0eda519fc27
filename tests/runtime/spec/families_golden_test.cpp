// What each family reads of a config.json, as golden/families.txt has it: all that its class implies, what each field
// changes, and how it is refused. tests/python compares the same classes with transformers; this holds what was
// compared, field by field. Where reading is meant to change, see golden_text.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <sstream>

#include "runtime/base/exception.h"
#include "runtime/spec/families.h"
#include "tests/runtime/golden_text.h"

namespace tierflow::testing {
namespace {

// Of doubles so many digits as every machine's logarithms agree in.
std::string text(double value) {
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.12g", value);
  return digits.data();
}
std::string text(bool value) {
  return value ? "true" : "false";
}
std::string text(std::int64_t value) {
  return std::to_string(value);
}
std::string text(const std::string& value) {
  return value.empty() ? "-" : value;
}
std::string text(const std::vector<double>& values) {
  std::string list = "[";
  for (const double value : values) list += (list.size() == 1 ? "" : " ") + text(value);
  return list + "]";
}

using Words = std::map<std::string, std::string>;

void add(Words& words, const DecoderNames& n) {
  const std::vector<std::pair<const char*, const std::string*>> all = {{"prefix", &n.prefix},
                                                                       {"tokens", &n.tokens},
                                                                       {"norm", &n.norm},
                                                                       {"head", &n.head},
                                                                       {"positions", &n.positions},
                                                                       {"layers", &n.layers},
                                                                       {"q", &n.q},
                                                                       {"k", &n.k},
                                                                       {"v", &n.v},
                                                                       {"qkv", &n.qkv},
                                                                       {"o", &n.o},
                                                                       {"q_norm", &n.q_norm},
                                                                       {"k_norm", &n.k_norm},
                                                                       {"sinks", &n.sinks},
                                                                       {"gate", &n.gate},
                                                                       {"up", &n.up},
                                                                       {"gate_up", &n.gate_up},
                                                                       {"down", &n.down},
                                                                       {"attention_norm", &n.attention_norm},
                                                                       {"attention_out_norm", &n.attention_out_norm},
                                                                       {"mlp_norm", &n.mlp_norm},
                                                                       {"mlp_out_norm", &n.mlp_out_norm},
                                                                       {"router", &n.router},
                                                                       {"expert", &n.expert},
                                                                       {"stacked_in", &n.stacked_in},
                                                                       {"stacked_down", &n.stacked_down},
                                                                       {"expert_gate", &n.expert_gate},
                                                                       {"expert_up", &n.expert_up},
                                                                       {"expert_down", &n.expert_down},
                                                                       {"shared", &n.shared},
                                                                       {"shared_gate", &n.shared_gate}};
  for (const auto& [name, value] : all) words["names." + std::string(name)] = text(*value);
}

void add(Words& words, const std::string& at, const RopeSpec& r) {
  words[at + "theta"] = text(r.theta);
  words[at + "type"] = r.type;
  words[at + "partial"] = text(r.partial);
  words[at + "interleaved"] = text(r.interleaved);
  words[at + "rounded"] = text(r.rounded);
  words[at + "factor"] = text(r.factor);
  words[at + "attention_factor"] = text(r.attention_factor);
  words[at + "low_freq_factor"] = text(r.low_freq_factor);
  words[at + "high_freq_factor"] = text(r.high_freq_factor);
  words[at + "original_max_positions"] = text(r.original_max_positions);
  words[at + "beta_fast"] = text(r.beta_fast);
  words[at + "beta_slow"] = text(r.beta_slow);
  words[at + "truncate"] = text(r.truncate);
  words[at + "short_factors"] = text(r.short_factors);
  words[at + "long_factors"] = text(r.long_factors);
}

void add(Words& words, const ExpertsSpec& e) {
  words["experts.count"] = text(e.count);
  words["experts.per_token"] = text(e.per_token);
  words["experts.width"] = text(e.width);
  words["experts.shared_width"] = text(e.shared_width);
  words["experts.shared_gate"] = text(e.shared_gate);
  words["experts.normalised"] = text(e.normalised);
  words["experts.sigmoid"] = text(e.sigmoid);
  words["experts.wide"] = text(e.wide);
  words["experts.corrected"] = text(e.corrected);
  words["experts.groups"] = text(e.groups);
  words["experts.groups_taken"] = text(e.groups_taken);
  words["experts.scale"] = text(e.scale);
  words["experts.balance"] = text(e.balance);
  words["experts.rounded"] = text(e.rounded);
  words["experts.biases"] = text(e.biases);
  words["experts.weights_of_input"] = text(e.weights_of_input);
  words["experts.transposed"] = text(e.transposed);
  words["experts.by_turns"] = text(e.by_turns);
  words["experts.clamped.sharpness"] = text(e.clamped.sharpness);
  words["experts.clamped.limit"] = text(e.clamped.limit);
}

// Every field.
Words described(const ModelConfig& c) {
  const auto number = [](auto value) { return text(static_cast<std::int64_t>(value)); };
  Words words;
  words["vocab_size"] = text(c.vocab_size);
  words["hidden_size"] = text(c.hidden_size);
  words["intermediate_size"] = text(c.intermediate_size);
  words["heads"] = text(c.heads);
  words["kv_heads"] = text(c.kv_heads);
  words["head_dim"] = text(c.head_dim);
  words["max_positions"] = text(c.max_positions);
  words["norm_eps"] = text(c.norm_eps);
  words["initializer_range"] = text(c.initializer_range);
  words["residual_range"] = text(c.residual_range);
  words["activation"] = number(c.activation);
  words["tied"] = text(c.tie_word_embeddings);
  words["qkv_bias"] = text(c.qkv_bias);
  words["output_bias"] = text(c.output_bias);
  words["mlp_bias"] = text(c.mlp_bias);
  words["embedding_dropout"] = text(c.embedding_dropout);
  words["residual_dropout"] = text(c.residual_dropout);
  words["attention_dropout"] = text(c.attention_dropout);
  words["norm"] = number(c.norm);
  words["qk_norm"] = number(c.qk_norm);
  words["norm_of_sum"] = text(c.norm_of_sum);
  words["transposed"] = text(c.transposed);
  words["gated"] = text(c.gated);
  words["parallel"] = text(c.parallel);
  words["qkv_by_head"] = text(c.qkv_by_head);
  words["up_first"] = text(c.up_first);
  words["attention_scale"] = text(c.attention_scale);
  words["attention_softcap"] = text(c.attention_softcap);
  words["logits_softcap"] = text(c.logits_softcap);
  words["query_scaling"] = text(c.query_scaling.strength);
  words["query_scaling.period"] = text(c.query_scaling.period);
  words["query_scaling.offset"] = text(c.query_scaling.offset);
  words["query_scaling.rounded"] = text(c.query_scaling.rounded);
  words["query_scaling.without_rope"] = text(c.query_scaling.without_rope);
  words["embedding_multiplier"] = text(c.embedding_multiplier);
  words["logits_multiplier"] = text(c.logits_multiplier);
  words["residual_multiplier"] = text(c.residual_multiplier);
  words["normed_residual"] = text(c.normed_residual);
  words["position_offset"] = text(c.position_offset);
  // Of each layer its window, its rope, an x where it has experts, and its chunk; how many alike follow each other
  // before. A pattern is known by its first layers.
  std::string layers;
  for (std::int64_t i = 0, alike = 1; i < c.layers; i += alike) {
    const auto one = [&](std::int64_t layer) {
      const LayerSpec of = c.layer(layer);
      return text(of.window) + "/" + number(of.rope) + (of.experts ? "x" : "") +
             (of.chunk > 0 ? "/" + text(of.chunk) : "");
    };
    for (alike = 1; i + alike < c.layers && one(i + alike) == one(i);) ++alike;
    layers += (i == 0 ? "" : " ") + text(alike) + "*" + one(i);
  }
  words["layers"] = layers.size() > 100 ? layers.substr(0, 100) + " ... of " + text(c.layers) : layers;
  words["ropes"] = number(c.ropes.size());
  for (std::size_t i = 0; i < c.ropes.size(); ++i) add(words, "rope" + std::to_string(i) + ".", c.ropes[i]);
  add(words, c.experts);
  add(words, c.names);
  return words;
}

// What stands in `words` and not in `before`, or the other way round.
std::string changes(const Words& before, const Words& words) {
  std::string all;
  for (const auto& [name, value] : words) {
    const auto was = before.find(name);
    if (was == before.end() || was->second != value) all += (all.empty() ? "" : "; ") + name + " " + value;
  }
  for (const auto& [name, value] : before)
    if (!words.contains(name)) all += (all.empty() ? "" : "; ") + name + " gone";
  return all;
}

// A config.json that says the least that the family takes. Sizes that every number of heads divides.
Json least(const FamilyRow& row) {
  const std::string type(row.model_type);
  Json config = {{"model_type", type}, {"vocab_size", 64}, {"hidden_size", 99840}, {"num_hidden_layers", 8}};
  config["intermediate_size"] = 4096;
  if (type == "gpt2") {
    config = {{"model_type", type}, {"vocab_size", 64}, {"n_embd", 99840}, {"n_layer", 8}, {"n_head", 4}};
    return config;
  }
  if (type == "opt") config["ffn_dim"] = 4096;
  if (type == "helium") config["hidden_size"] = 20 * 128;
  if (type == "exaone4") config["sliding_window"] = nullptr;
  if (type == "ministral3") config["rope_parameters"] = {{"rope_type", "default"}};
  try {
    const Json& asked = config;
    read_config(row, JsonFields(asked, "config.json"), false);
  } catch (const Exception&) {
    config["num_attention_heads"] = 64;
  }
  return config;
}

std::string result(const Json& config, const Words& before) {
  try {
    return changes(before, described(parse_model_spec(config.dump(), "config.json").config));
  } catch (const Exception& error) {
    return std::string("refused: ") + error.what();
  }
}

// Each family's least, then each line of fields with what it changes in which families; a family that takes no notice
// is not there.
std::string read_all() {
  std::vector<const FamilyRow*> rows;
  for (const auto table : {rms_norm_families(), layer_norm_families(), expert_families()})
    for (const FamilyRow& row : table) rows.push_back(&row);
  std::ostringstream out;
  std::vector<Json> configs;
  std::vector<Words> plain;
  const Words nothing = described(ModelConfig{});
  for (const FamilyRow* row : rows) {
    configs.push_back(least(*row));
    plain.push_back(described(parse_model_spec(configs.back().dump(), "config.json").config));
    out << row->model_type << ": " << changes(nothing, plain.back()) << '\n';
  }
  for (const std::string& probe : lines_of(TIERFLOW_SPEC_GOLDEN "/families_fields.txt")) {
    std::map<std::string, std::string> families;  // by what it changes in them
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Json config = configs[i];
      config.update(Json::parse("{" + probe + "}"));
      const std::string changed = result(config, plain[i]);
      if (!changed.empty()) families[changed] += " " + std::string(rows[i]->model_type);
    }
    out << '\n' << probe << '\n';
    for (const auto& [changed, names] : families)
      out << "  " << changed << "\n   " << (std::ranges::count(names, ' ') == std::ssize(rows) ? " all" : names)
          << '\n';
  }
  return out.str();
}

TEST(FamiliesGolden, ReadEachFieldAsBefore) {
  expect_golden(TIERFLOW_SPEC_GOLDEN "/families.txt", read_all());
}

}  // namespace
}  // namespace tierflow::testing
