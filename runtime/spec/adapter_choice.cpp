#include "runtime/spec/adapter_choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/spec/wrapped_config.h"

namespace tierflow {
namespace {

std::optional<NamePattern> whole(const std::string& expression) {
  return expression.empty() ? std::nullopt : std::optional<NamePattern>(expression);
}

// Without a pattern the names count.
bool any_fits(const std::vector<std::string>& paths, const std::optional<NamePattern>& pattern,
              const std::vector<std::string>& names) {
  return std::ranges::any_of(paths, [&](const std::string& path) {
    if (pattern) return pattern->fits(path);
    return std::ranges::any_of(names, [&](const std::string& name) { return name_fits(path, name); });
  });
}

}  // namespace

bool name_fits(std::string_view module, std::string_view name) {
  return module == name ||
         (module.ends_with(name) && module.size() > name.size() && module[module.size() - name.size() - 1] == '.');
}

std::string exactly(const std::string& path) {
  std::string expression;
  for (const char c : path) expression += c == '.' ? std::string("\\.") : std::string(1, c);
  return expression;
}

std::vector<std::string> module_paths(const ModelSpec& spec, const std::string& module) {
  constexpr std::string_view text = "model.";
  if (wraps_with_head(spec.wrapper)) return {module, fmt::format("language_model.{}", module)};
  if (spec.wrapper.empty() || !module.starts_with(text)) return {module};
  return {module, fmt::format("model.language_model.{}", module.substr(text.size()))};
}

NamePattern at_the_end(const std::string& expression) {
  return NamePattern(expression, "(.*\\.)?(", ")");
}

AdapterChoice::AdapterChoice(const ModelSpec& spec, const AdapterConfig& config)
    : spec_(spec), config_(config), target_(whole(config.target_pattern)), exclude_(whole(config.exclude_pattern)) {}

bool AdapterChoice::wants(const std::string& module, std::int64_t layer) const {
  const std::vector<std::string> paths = module_paths(spec_, module);
  if (config_.parameters_alone) return false;
  const bool all = !target_ && config_.targets.empty();
  return (all || any_fits(paths, target_, config_.targets)) && !any_fits(paths, exclude_, config_.exclude) &&
         (config_.layers.empty() || is_in_layer(paths, layer));
}

bool AdapterChoice::is_in_layer(const std::vector<std::string>& paths, std::int64_t layer) const {
  if (std::ranges::find(config_.layers, layer) == config_.layers.end()) return false;
  if (config_.layer_patterns.empty()) return true;
  return std::ranges::any_of(config_.layer_patterns, [&](const std::string& expression) {
    const NamePattern numbered(expression, "(.*\\.)?(", fmt::format(")\\.{}\\..*", layer));
    return std::ranges::any_of(paths, [&](const std::string& path) { return numbered.fits(path); });
  });
}

bool AdapterChoice::wants_parameter(const std::string& path) const {
  return any_fits(module_paths(spec_, path), {}, config_.parameters);
}

std::string AdapterChoice::patterned(const std::string& path) const {
  const std::string weight = path + ".weight";
  return wants_parameter(weight) ? weight : path;
}

template <class Value>
Value AdapterChoice::first_fit(const std::string& module, const std::vector<std::pair<std::string, Value>>& patterns,
                               Value otherwise) {
  for (const auto& [expression, value] : patterns) {
    auto compiled = at_the_end_.find(expression);
    if (compiled == at_the_end_.end()) compiled = at_the_end_.emplace(expression, at_the_end(expression)).first;
    for (const std::string& path : module_paths(spec_, module))
      if (compiled->second.fits(path)) return value;
  }
  return otherwise;
}

std::int64_t AdapterChoice::rank(const std::string& module) {
  return first_fit(module, config_.rank_pattern, config_.rank);
}

double AdapterChoice::alpha(const std::string& module) {
  return first_fit(module, config_.alpha_pattern, config_.alpha);
}

}  // namespace tierflow
