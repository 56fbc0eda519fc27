#include "runtime/spec/adapters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/spec/name_pattern.h"

namespace tierflow {
namespace {

constexpr std::string_view kWeight = ".weight", kPrefix = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";

[[noreturn]] void fail_usage(const std::string& detail) {
  throw Exception(io::ErrorKind::usage, detail);
}

bool fits(std::string_view module, std::string_view name) {
  return module == name ||
         (module.ends_with(name) && module.size() > name.size() && module[module.size() - name.size() - 1] == '.');
}
bool fits_any(std::string_view module, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const std::string& name) { return fits(module, name); });
}

// What a configuration says of each module.
class Choice {
 public:
  explicit Choice(const AdapterConfig& config)
      : config_(config), target_(whole(config.target_pattern)), exclude_(whole(config.exclude_pattern)) {}

  bool wants(const std::string& module, std::int64_t layer) const {
    const bool named = target_ ? target_->fits(module) : config_.targets.empty() || fits_any(module, config_.targets);
    const bool excluded = exclude_ ? exclude_->fits(module) : fits_any(module, config_.exclude);
    return named && !excluded &&
           (config_.layers.empty() || std::ranges::find(config_.layers, layer) != config_.layers.end());
  }
  std::int64_t rank(const std::string& module) { return first_fit(module, config_.rank_pattern, config_.rank); }
  double alpha(const std::string& module) { return first_fit(module, config_.alpha_pattern, config_.alpha); }

 private:
  static std::optional<NamePattern> whole(const std::string& expression) {
    return expression.empty() ? std::nullopt : std::optional<NamePattern>(expression);
  }
  template <class Value>
  Value first_fit(const std::string& module, const std::vector<std::pair<std::string, Value>>& patterns,
                  Value otherwise) {
    for (const auto& [expression, value] : patterns) {
      const auto compiled = at_the_end_.try_emplace(expression, expression, "(.*\\.)?(", ")").first;
      if (compiled->second.fits(module)) return value;
    }
    return otherwise;
  }

  const AdapterConfig& config_;
  const std::optional<NamePattern> target_, exclude_;
  std::map<std::string, NamePattern> at_the_end_;  // those that a module came to
};

// A name without the ".weight" at its end.
std::string without_weight(std::string_view name) {
  name.remove_suffix(std::min(name.size(), kWeight.size()));
  return std::string(name);
}

// "q_proj" of "model.layers.0.self_attn.q_proj".
std::string last_name(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

void check(const AdapterConfig& config) {
  const auto check_rank = [](std::int64_t rank) {
    if (rank < 1 || rank > 4096) fail_usage(fmt::format("the rank of an adapter is {}; it must be 1 to 4096", rank));
  };
  const auto check_alpha = [](double alpha) {
    if (!(alpha > 0) || !std::isfinite(alpha))
      fail_usage(fmt::format("an adapter's alpha is {}; it must be above 0", alpha));
  };
  check_rank(config.rank);
  check_alpha(config.alpha);
  for (const auto& [name, rank] : config.rank_pattern) check_rank(rank);
  for (const auto& [name, alpha] : config.alpha_pattern) check_alpha(alpha);
  if (!(config.dropout >= 0 && config.dropout < 1))
    fail_usage(fmt::format("an adapter's dropout is {}; it must be at least 0 and below 1", config.dropout));
}

// adapter_config.json: the keys that mean something here. names: of linear layers; modules: those that have adapters.
// PEFT takes no expression together with numbers of layers: then the modules stand for both.
std::string peft_config(const AdapterConfig& config, const std::set<std::string>& names,
                        const std::vector<std::string>& modules, bool transposed) {
  const bool both = !config.target_pattern.empty() && !config.layers.empty();
  using Json = nlohmann::ordered_json;  // of patterns the first counts
  const auto number = [](double value) {
    return value == std::floor(value) && value < 1e15 ? Json(std::llround(value)) : Json(value);
  };
  const auto patterns = [](const auto& all, auto value_of) {
    Json object = Json::object();
    for (const auto& [name, value] : all) object.emplace(name, value_of(value));
    return object;
  };
  const Json json{{"peft_type", "LORA"},
                  {"task_type", "CAUSAL_LM"},
                  {"base_model_name_or_path", nullptr},
                  {"inference_mode", true},
                  {"r", config.rank},
                  {"lora_alpha", number(config.alpha)},
                  {"lora_dropout", config.dropout},
                  {"use_rslora", config.rank_stabilised},
                  {"use_dora", false},
                  {"bias", "none"},
                  {"fan_in_fan_out", transposed},
                  {"init_lora_weights", true},
                  {"modules_to_save", nullptr},
                  {"target_modules", both                             ? Json(modules)
                                     : !config.target_pattern.empty() ? Json(config.target_pattern)
                                     : config.targets.empty()         ? Json(names)
                                                                      : Json(config.targets)},
                  {"exclude_modules", !config.exclude_pattern.empty() ? Json(config.exclude_pattern)
                                      : config.exclude.empty()        ? Json()
                                                                      : Json(config.exclude)},
                  {"layers_to_transform", config.layers.empty() || both ? Json() : Json(config.layers)},
                  {"rank_pattern", patterns(config.rank_pattern, [](std::int64_t rank) { return Json(rank); })},
                  {"alpha_pattern", patterns(config.alpha_pattern, number)}};
  return json.dump(2) + "\n";
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
  for (const Json& each : *found) {
    if (!each.is_string()) fields.fail(name, "has an entry that is no name");
    names.push_back(each.get<std::string>());
  }
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

// A field that means nothing as long as it is absent, null, false, "none", or empty.
void refuse(const JsonFields& fields, const char* name) {
  const Json* found = fields.find(name);
  if (found != nullptr && *found != false && *found != "none" && !found->empty())
    fields.fail(name, "asks for a variant of LoRA that cannot be read here");
}

}  // namespace

AdapterConfig parse_adapter_config(const std::string& json, const std::string& where) {
  const Json object = parse_json(json, where);
  if (!object.is_object())
    throw Exception(io::Error{.kind = io::ErrorKind::input, .path = where, .detail = "is no JSON object"});
  const JsonFields fields(object, where);
  if (const std::string type = fields.text_or("peft_type", ""); type != "LORA")
    fields.fail("peft_type", fmt::format("is \"{}\"; only \"LORA\" can be read", printable(type)));
  for (const char* name : {"use_dora", "bias", "lora_bias", "modules_to_save", "layer_replication", "target_parameters",
                           "trainable_token_indices", "use_qalora", "use_bdlora", "alora_invocation_tokens",
                           "kasa_config", "monteclora_config", "arrow_config"})
    refuse(fields, name);
  // Of these the first values alone are special; others go with a base that was changed.
  if (const std::string init =
          fields.find("init_lora_weights") != nullptr && fields.find("init_lora_weights")->is_string()
              ? fields.text_or("init_lora_weights", "")
              : "";
      !init.empty() && init != "gaussian" && init != "orthogonal" && init != "eva")
    fields.fail("init_lora_weights",
                fmt::format("is \"{}\": such adapters belong to a changed base, and cannot be read "
                            "here; PEFT converts them (path_initial_model_for_weight_conversion)",
                            printable(init)));
  AdapterConfig config{.rank = fields.integer_or("r", 8, 1, 4096),
                       .alpha = fields.number_or("lora_alpha", 8, 0, 1e9),
                       .rank_stabilised = fields.boolean_or("use_rslora", false),
                       .dropout = fields.number_or("lora_dropout", 0, 0, 1)};
  read_modules(fields, "target_modules", config.targets, config.target_pattern);
  read_modules(fields, "exclude_modules", config.exclude, config.exclude_pattern);
  if (!(config.alpha > 0)) fields.fail("lora_alpha", "must be above 0");
  if (config.dropout >= 1) fields.fail("lora_dropout", "must be below 1");
  const auto in_order = nlohmann::ordered_json::parse(json);
  read_pattern(fields, in_order, "rank_pattern", config.rank_pattern,
               [](const JsonFields& values, const char* name) { return values.integer(name, 1, 4096); });
  read_pattern(fields, in_order, "alpha_pattern", config.alpha_pattern,
               [](const JsonFields& values, const char* name) { return values.number_or(name, 0, 1e-9, 1e9); });
  if (const Json* layers = fields.find("layers_to_transform"); layers != nullptr) {
    for (const Json& layer : layers->is_array() ? *layers : Json::array({*layers})) {
      if (!layer.is_number_integer() || layer < 0 || layer > (1 << 20))
        fields.fail("layers_to_transform", "has an entry that is no layer's number");
      config.layers.push_back(layer.get<std::int64_t>());
    }
  }
  return config;
}

void set_base_format(ModelSpec& spec, WeightFormat format) {
  spec.base_format = format;
  if (format == WeightFormat::bf16) return;
  for (const StageSpec& stage : spec.stages) {
    if (stage.block < 0) continue;
    for (TensorSpec& tensor : spec.units[static_cast<std::size_t>(stage.units.front())].tensors) {
      const bool of_expert = tensor.part == Part::expert && tensor.decays;  // a matrix, not biases
      if (!of_expert && (is_adapter(tensor) || linear_module(tensor).empty())) continue;
      tensor.format = format;
      tensor.trainable = false;
    }
  }
}

AdapterConfig read_adapter_config(const std::filesystem::path& folder) {
  constexpr const char* name = "adapter_config.json";
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    fail_input(folder.string(), "is no folder; give the one that holds adapter_config.json");
  const std::filesystem::path path = folder / name;
  return parse_adapter_config(read_text(open_beneath(folder, name), path, 1 << 20), path.string());
}

bool is_adapter(const TensorSpec& tensor) {
  return tensor.name.ends_with(kA) || tensor.name.ends_with(kB);
}

std::string linear_module(const TensorSpec& tensor) {
  std::string_view name = tensor.name;
  if (is_adapter(tensor)) {
    name.remove_prefix(kPrefix.size());
    name.remove_suffix(kA.size());
    return std::string(name);
  }
  if (tensor.shape.size() != 2 || !name.ends_with(kWeight) || tensor.part != Part::plain) return {};
  name.remove_suffix(kWeight.size());
  return std::string(name);
}

void add_adapters(ModelSpec& spec, const AdapterConfig& config) {
  check(config);
  Choice choice(config);
  const bool transposed = spec.config.family == Family::gpt2;  // Conv1D: [in, out]
  std::set<std::string> names;
  std::set<std::string> unused(config.targets.begin(), config.targets.end());
  for (UnitSpec& unit : spec.units)
    for (TensorSpec& tensor : unit.tensors) tensor.trainable = false;
  std::vector<std::string> modules;
  for (const StageSpec& stage : spec.stages) {
    if (stage.block < 0) continue;
    UnitSpec& unit = spec.units[static_cast<std::size_t>(stage.units.front())];
    const std::size_t base = unit.tensors.size();
    for (std::size_t i = 0; i < base; ++i) {
      const TensorSpec& tensor = unit.tensors[i];
      const std::string module = linear_module(tensor);
      if (module.empty()) continue;
      names.insert(last_name(module));
      std::erase_if(unused, [&](const std::string& target) { return fits(module, target); });
      if (!choice.wants(module, stage.block)) continue;
      const std::int64_t in = tensor.shape[transposed ? 0 : 1], out = tensor.shape[transposed ? 1 : 0];
      const std::int64_t rank = choice.rank(module);
      const double alpha = choice.alpha(module);
      const auto wide = static_cast<double>(rank);
      const std::string role = without_weight(tensor.role);
      unit.tensors.push_back({.name = fmt::format("{}{}{}", kPrefix, module, kA),
                              .role = fmt::format("{}{}", role, kA),
                              .shape = {rank, in},
                              .init = Init::uniform,
                              .init_std = 1 / std::sqrt(3.0 * static_cast<double>(in))});
      unit.tensors.push_back({.name = fmt::format("{}{}{}", kPrefix, module, kB),
                              .role = fmt::format("{}{}", role, kB),
                              .shape = {out, rank},
                              .init = Init::zeros,
                              .init_std = 0,
                              .scale = alpha / (config.rank_stabilised ? std::sqrt(wide) : wide)});
      modules.push_back(module);
    }
  }
  if (!unused.empty())
    fail_usage(fmt::format("no linear layer is called {}: this model has {}",
                           printable(fmt::format("{}", fmt::join(unused, " or ")), 200), fmt::join(names, ", ")));
  for (const std::int64_t layer : config.layers)
    if (layer < 0 || layer >= spec.config.layers)
      fail_usage(fmt::format("there is no layer {} to adapt: the model's are 0 to {}", layer, spec.config.layers - 1));
  if (modules.empty())
    fail_usage(fmt::format("no linear layer is left to adapt: this model has {}", fmt::join(names, ", ")));
  spec.config.adapter_dropout = config.dropout;
  spec.adapter_config_json = peft_config(config, names, modules, transposed);
}

}  // namespace tierflow
