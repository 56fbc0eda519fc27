#include "runtime/spec/adapter_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"

namespace tierflow {
namespace {

// By AdapterInit. The last is no choice among adapters.
constexpr std::array<std::string_view, 6> kInits = {"default", "pissa", "olora", "lora-ga", "lora_ga", "galore"};
constexpr std::string_view kIterated = "pissa_niter_";
constexpr std::int64_t kMostIterations = 100;
constexpr std::int64_t kMostSteps = 1'000'000'000;  // of a window

std::vector<std::string> names_of(const JsonFields& fields, const char* name, const Json& list) {
  std::vector<std::string> names;
  for (const Json& each : list) {
    if (!each.is_string() || each == "") fields.fail(name, "has an entry that is no name");
    names.push_back(each.get<std::string>());
  }
  return names;
}

// The names, or the expression, of a field that PEFT allows to be either.
void read_modules(const JsonFields& fields, const char* name, std::vector<std::string>& names, std::string& pattern) {
  const Json* found = fields.find(name);
  if (found == nullptr) return;
  if (found->is_string()) {
    if (*found != "all-linear") pattern = found->get<std::string>();
    return;
  }
  if (!found->is_array()) fields.fail(name, "is neither a list of names nor a regular expression");
  names = names_of(fields, name, *found);
}

// In the order of the file, where the first that fits counts. value_of: of a key's value.
template <class Value, class ValueOf>
void read_pattern(const JsonFields& fields, const nlohmann::ordered_json& in_order, const char* name,
                  std::vector<std::pair<std::string, Value>>& patterns, ValueOf value_of) {
  const Json* found = fields.find(name);
  if (found == nullptr) return;
  if (!found->is_object()) fields.fail(name, "is no object");
  const JsonFields values(*found, fields.where() + ": " + name);
  for (const auto& [expression, value] : in_order[name].items())
    patterns.emplace_back(expression, value_of(values, expression.c_str()));
}

// As PEFT does, which refuses the same.
void read_layer_patterns(const JsonFields& fields, AdapterConfig& config) {
  const Json *found = fields.find("layers_pattern"), *modules = fields.find("target_modules");
  if (found == nullptr || found->empty() || *found == "") return;
  if (!found->is_string() && !found->is_array()) fields.fail("layers_pattern", "is neither a name nor a list of names");
  config.layer_patterns = names_of(fields, "layers_pattern", found->is_array() ? *found : Json::array({*found}));
  if (config.layers.empty())
    fields.fail("layers_pattern", "stands without layers_to_transform, whose numbers it is for");
  if (modules != nullptr && modules->is_string())
    fields.fail("layers_pattern", "is for target_modules that are names, not a regular expression");
}

std::string of_changed_base(const std::string& init) {
  return fmt::format(
      "init_lora_weights is \"{}\": such adapters belong to a changed base, and cannot be read here; PEFT converts "
      "them "
      "(path_initial_model_for_weight_conversion)",
      printable(init));
}

bool set_known_init(AdapterConfig& config, std::string_view name) {
  if (name.starts_with(kIterated)) {
    const std::string_view digits = name.substr(kIterated.size());
    std::int64_t iterations = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), iterations);
    if (error != std::errc() || end != digits.data() + digits.size() || iterations < 1 || iterations > kMostIterations)
      return false;
    config.init = AdapterInit::pissa;
    config.pissa_iterations = iterations;
    return true;
  }
  const auto found = std::ranges::find(kInits, name);
  if (found == kInits.end()) return false;
  config.init = static_cast<AdapterInit>(found - kInits.begin());
  config.pissa_iterations = 0;
  return true;
}

// Of gaussian, orthogonal and eva the first values alone are special; others go with a base that was changed.
void read_init(const JsonFields& fields, AdapterConfig& config) {
  const Json* found = fields.find("init_lora_weights");
  if (found == nullptr || !found->is_string() || *found == "gaussian" || *found == "orthogonal" || *found == "eva")
    return;
  if (!set_known_init(config, found->get<std::string>()))
    fail_input(fields.where(), of_changed_base(found->get<std::string>()));
}

// A field that means nothing as long as it is absent, null, false, "none", or empty.
void refuse(const JsonFields& fields, const char* name) {
  const Json* found = fields.find(name);
  if (found != nullptr && *found != false && *found != "none" && !found->empty())
    fields.fail(name, "asks for a variant of LoRA that cannot be read here");
}

void check_parameters(const AdapterConfig& config) {
  if (config.parameters.empty()) {
    if (config.parameters_alone)
      fail_usage("there is nothing to adapt: no linear layers and no parameters are named as targets");
    return;
  }
  if (config.dropout != 0)
    fail_usage(fmt::format("adapters of parameters have no dropout, in PEFT as here: it is {}, and must be 0",
                           config.dropout));
  if (config.dora) fail_usage("adapters of parameters have no magnitude (DoRA), in PEFT as here");
  if (config.init != AdapterInit::standard)
    fail_usage(fmt::format("adapters of parameters begin as \"default\", not as \"{}\"", adapter_init_name(config)));
}

}  // namespace

void check_adapters(const AdapterConfig& config) {
  // With their first values they are written as adapters of twice the rank.
  const bool windows = config.init == AdapterInit::galore;
  const std::int64_t most = config.init == AdapterInit::standard || windows ? 4096 : 2048;
  const auto check_rank = [&](std::int64_t rank) {
    if (rank < 1 || rank > most)
      fail_usage(fmt::format("the rank of an adapter is {}; it must be 1 to {}", rank, most));
  };
  const auto check_alpha = [](double alpha) {
    if (!(alpha > 0) || !std::isfinite(alpha))
      fail_usage(fmt::format("an adapter's alpha is {}; it must be above 0", alpha));
  };
  check_rank(config.rank);
  check_alpha(config.alpha);
  for (const auto& [name, rank] : config.rank_pattern) check_rank(rank);
  for (const auto& [name, alpha] : config.alpha_pattern) check_alpha(alpha);
  if (windows && !(config.windows.steps >= 1 && config.windows.scale > 0 && std::isfinite(config.windows.scale)))
    fail_usage(fmt::format("projected gradients take windows of at least 1 step and a scale above 0, not {} and {}",
                           config.windows.steps, config.windows.scale));
  if (windows && (config.dropout != 0 || config.rank_stabilised || !config.saved.empty()))
    fail_usage("projected gradients have no dropout, no scale of adapters, and train whole what is not projected");
  if (config.dora && config.init != AdapterInit::standard)
    fail_usage("adapters with a magnitude (DoRA) begin as \"default\", not with factors of the base");
  check_parameters(config);
  if (!(config.dropout >= 0 && config.dropout < 1))
    fail_usage(fmt::format("an adapter's dropout is {}; it must be at least 0 and below 1", config.dropout));
}

std::string adapter_init_name(const AdapterConfig& config) {
  if (config.pissa_iterations > 0) return fmt::format("{}{}", kIterated, config.pissa_iterations);
  return std::string(kInits.at(static_cast<std::size_t>(config.init)));
}

void set_adapter_init(AdapterConfig& config, const std::string& name) {
  if (!set_known_init(config, name) || config.init == AdapterInit::galore)
    fail_usage(fmt::format("adapters begin as {} or {}N, with N from 1 to {}; there is no \"{}\"",
                           fmt::join(std::span(kInits).first(kInits.size() - 1), ", "), kIterated, kMostIterations,
                           printable(name)));
}

std::uint64_t basis_columns(const AdapterConfig& config, std::uint64_t rank, std::uint64_t out, std::uint64_t in) {
  if (config.init == AdapterInit::olora) return rank;
  if (of_gradient(config.init)) return std::min({4 * rank, out, in});
  const bool whole = config.pissa_iterations == 0 && config.init != AdapterInit::galore;
  return whole ? 0 : std::min({rank + 8, out, in});
}

std::string adapter_config_json(const AdapterConfig& config, bool transposed) {
  using Json = nlohmann::ordered_json;  // of patterns the first counts
  const auto number = [](double value) {
    return value == std::floor(value) && value < 1e15 ? Json(std::llround(value)) : Json(value);
  };
  const auto patterns = [](const auto& all, auto value_of) {
    Json object = Json::object();
    for (const auto& [name, value] : all) object.emplace(name, value_of(value));
    return object;
  };
  const auto list = [](const auto& values) { return values.empty() ? Json() : Json(values); };
  const auto modules = [&](const std::string& pattern, const std::vector<std::string>& names) {
    return pattern.empty() ? list(names) : Json(pattern);
  };
  Json json{
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", nullptr},
      {"inference_mode", true},
      {"r", config.rank},
      {"lora_alpha", number(config.alpha)},
      {"lora_dropout", config.dropout},
      {"use_rslora", config.rank_stabilised},
      {"use_dora", config.dora},
      {"bias", "none"},
      {"fan_in_fan_out", transposed},
      {"init_lora_weights", config.init == AdapterInit::standard ? Json(true) : Json(adapter_init_name(config))},
      {"modules_to_save", list(config.saved)},
      {"ensure_weight_tying", config.ties_saved},
      {"target_modules", config.parameters_alone ? Json::array() : modules(config.target_pattern, config.targets)},
      {"exclude_modules", modules(config.exclude_pattern, config.exclude)},
      {"layers_to_transform", list(config.layers)},
      {"rank_pattern", patterns(config.rank_pattern, [](std::int64_t rank) { return Json(rank); })},
      {"alpha_pattern", patterns(config.alpha_pattern, number)}};
  if (!config.layer_patterns.empty()) json["layers_pattern"] = config.layer_patterns;
  if (!config.parameters.empty()) json["target_parameters"] = config.parameters;
  if (config.init == AdapterInit::galore)
    json["galore"] = {{"update_gap", config.windows.steps}, {"scale", config.windows.scale}};
  return json.dump(2) + "\n";
}

AdapterConfig parse_adapter_config(const std::string& json, const std::string& where) {
  const Json object = parse_json(json, where);
  if (!object.is_object())
    throw Exception(io::Error{.kind = io::ErrorKind::input, .path = where, .detail = "is no JSON object"});
  const JsonFields fields(object, where);
  if (const std::string type = fields.text_or("peft_type", ""); type != "LORA")
    fields.fail("peft_type", fmt::format("is \"{}\"; only \"LORA\" can be read", printable(type)));
  for (const char* name : {"bias", "lora_bias", "layer_replication", "trainable_token_indices", "use_qalora",
                           "use_bdlora", "alora_invocation_tokens", "kasa_config", "monteclora_config", "arrow_config"})
    refuse(fields, name);
  AdapterConfig config{.rank = fields.integer_or("r", 8, 1, 4096),
                       .alpha = fields.number_or("lora_alpha", 8, 0, 1e9),
                       .rank_stabilised = fields.boolean_or("use_rslora", false),
                       .dropout = fields.number_or("lora_dropout", 0, 0, 1),
                       .dora = fields.boolean_or("use_dora", false)};
  read_init(fields, config);
  if (const Json* windows = fields.find("galore"); windows != nullptr && config.init == AdapterInit::galore) {
    if (!windows->is_object()) fields.fail("galore", "is no object");
    const JsonFields of(*windows, fields.where() + ": galore");
    config.windows = {.steps = of.integer("update_gap", 1, kMostSteps), .scale = of.number_or("scale", 1, 0, 1e9)};
  }
  read_modules(fields, "target_modules", config.targets, config.target_pattern);
  read_modules(fields, "exclude_modules", config.exclude, config.exclude_pattern);
  if (const Json* parameters = fields.find("target_parameters"); parameters != nullptr) {
    if (!parameters->is_array()) fields.fail("target_parameters", "is no list of names");
    config.parameters = names_of(fields, "target_parameters", *parameters);
    const Json* modules = fields.find("target_modules");
    config.parameters_alone = !config.parameters.empty() && (modules == nullptr || modules->empty());
  }
  if (!(config.alpha > 0)) fields.fail("lora_alpha", "must be above 0");
  if (config.dropout >= 1) fields.fail("lora_dropout", "must be below 1");
  const auto in_order = nlohmann::ordered_json::parse(json);
  read_pattern(fields, in_order, "rank_pattern", config.rank_pattern,
               [](const JsonFields& values, const char* name) { return values.integer(name, 1, 4096); });
  read_pattern(fields, in_order, "alpha_pattern", config.alpha_pattern,
               [](const JsonFields& values, const char* name) { return values.number_or(name, 0, 1e-9, 1e9); });
  if (const Json* saved = fields.find("modules_to_save"); saved != nullptr) {
    if (!saved->is_array()) fields.fail("modules_to_save", "is no list of names");
    config.saved = names_of(fields, "modules_to_save", *saved);
  }
  config.ties_saved = fields.boolean_or("ensure_weight_tying", false);
  if (const Json* layers = fields.find("layers_to_transform"); layers != nullptr) {
    for (const Json& layer : layers->is_array() ? *layers : Json::array({*layers})) {
      if (!layer.is_number_integer() || layer < 0 || layer > (1 << 20))
        fields.fail("layers_to_transform", "has an entry that is no layer's number");
      config.layers.push_back(layer.get<std::int64_t>());
    }
  }
  read_layer_patterns(fields, config);
  return config;
}

AdapterConfig read_adapter_config(const std::filesystem::path& folder) {
  constexpr const char* name = "adapter_config.json";
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    fail_input(folder.string(), "is no folder; give the one that holds adapter_config.json");
  const std::filesystem::path path = folder / name;
  if (std::filesystem::symlink_status(path, ignored).type() == std::filesystem::file_type::not_found)
    fail_input(path.string(), "does not exist: adapters are a folder as PEFT writes it");
  const AdapterConfig config =
      parse_adapter_config(read_text(open_beneath(folder, name), path, 1 << 20), path.string());
  if (config.init != AdapterInit::standard) fail_input(path.string(), of_changed_base(adapter_init_name(config)));
  return config;
}

AdapterConfig joined_with_first(AdapterConfig config) {
  if (config.init == AdapterInit::standard) return config;
  set_adapter_init(config, "default");
  const double more = config.rank_stabilised ? std::sqrt(2.0) : 2;  // what keeps alpha / rank, or alpha / sqrt(rank)
  config.rank *= 2;
  config.alpha *= more;
  for (auto& [name, rank] : config.rank_pattern) rank *= 2;
  for (auto& [name, alpha] : config.alpha_pattern) alpha *= more;
  return config;
}

}  // namespace tierflow
