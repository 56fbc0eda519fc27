#include "runtime/spec/trainable.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/name_pattern.h"

namespace tierflow {
namespace {

class Pattern {
 public:
  explicit Pattern(const std::string& text) : text_(text), expression_(text) {}
  bool fits(const std::string& name) {
    const bool found = expression_.found_in(name);
    used_ = used_ || found;
    return found;
  }
  bool used() const { return used_; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  NamePattern expression_;
  bool used_ = false;
};

std::vector<Pattern> patterns_of(const std::vector<std::string>& texts) {
  return {texts.begin(), texts.end()};
}

bool any_fits(std::vector<Pattern>& patterns, const std::string& name) {
  bool found = false;
  for (Pattern& pattern : patterns) found = pattern.fits(name) || found;  // each is to know whether it fits any
  return found;
}

// Names of tensors, those of the first block for all blocks.
std::vector<std::string> some_names(const ModelSpec& spec, bool trained) {
  std::vector<std::string> names;
  std::set<std::string> roles;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if ((!trained || tensor.trainable) && roles.insert(tensor.role).second) names.push_back(tensor.name);
  return names;
}

void expect_used(const std::vector<Pattern>& patterns, const ModelSpec& spec, bool trained = false) {
  for (const Pattern& pattern : patterns)
    if (!pattern.used())
      fail_usage(fmt::format("no tensor{} has \"{}\" in its name; there are, for instance, {}",
                             trained ? " that is trained" : "", pattern.text(),
                             fmt::join(some_names(spec, trained), ", ")));
}

}  // namespace

void set_trainable(ModelSpec& spec, const TrainableConfig& config) {
  if (window_steps(spec) != 0) fail_usage("what is trained is chosen before gradients are projected, not after");
  std::vector<Pattern> wanted = patterns_of(config.trainable), frozen = patterns_of(config.freeze);
  if (config.last_layers < 0 || config.last_layers > spec.config.layers)
    fail_usage(
        fmt::format("the last {} layers cannot be trained: the model has {}", config.last_layers, spec.config.layers));
  std::set<std::size_t> last;
  for (const StageSpec& stage : spec.stages)
    if (stage.block >= spec.config.layers - config.last_layers && stage.block >= 0)
      last.insert(static_cast<std::size_t>(stage.units.front()));
  bool any = false;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (TensorSpec& tensor : spec.units[unit].tensors) {
      const bool named = any_fits(wanted, tensor.name) || wanted.empty();
      const bool out = any_fits(frozen, tensor.name) || (config.last_layers > 0 && !last.contains(unit));
      tensor.trainable = tensor.trainable && named && !out;
      any = any || tensor.trainable;
    }
  expect_used(wanted, spec);
  expect_used(frozen, spec);
  if (!any) fail_usage("no tensor is left to train");
  if (!(config == TrainableConfig()))
    spec.trainable_json =
        nlohmann::json{{"trainable", config.trainable}, {"freeze", config.freeze}, {"last_layers", config.last_layers}}
            .dump();
}

void set_trainable_again(ModelSpec& spec, const std::string& json) {
  const auto object = nlohmann::json::parse(json);
  set_trainable(
      spec,
      {.trainable = object.at("trainable"), .freeze = object.at("freeze"), .last_layers = object.at("last_layers")});
}

void train_as(ModelSpec& spec, const ModelSpec& like) {
  if (like.base_format != WeightFormat::bf16) set_base_format(spec, like.base_format, like.base_plain);
  const bool windows = window_steps(like) != 0;  // of what is trained
  if (windows && !like.trainable_json.empty()) set_trainable_again(spec, like.trainable_json);
  if (!like.adapter_config_json.empty())
    add_adapters(spec, parse_adapter_config(like.adapter_config_json, "the model's adapters"));
  if (!windows && !like.trainable_json.empty()) set_trainable_again(spec, like.trainable_json);
}

void set_learning_rates(ModelSpec& spec, const std::vector<std::pair<std::string, double>>& by_pattern) {
  std::vector<Pattern> patterns;
  for (const auto& [text, scale] : by_pattern) {
    if (!(scale >= 0 && scale < 1e9))
      fail_usage(fmt::format("a learning rate is multiplied by {}; it must be at least 0 and below 1e9", scale));
    patterns.emplace_back(text);
  }
  for (UnitSpec& unit : spec.units)
    for (TensorSpec& tensor : unit.tensors) {
      if (!tensor.trainable) continue;
      std::size_t first = patterns.size();
      for (std::size_t i = patterns.size(); i-- > 0;)
        if (patterns[i].fits(tensor.name)) first = i;
      if (first < patterns.size()) tensor.lr_scale *= by_pattern[first].second;
    }
  expect_used(patterns, spec, /*trained=*/true);
}

void remove_dropout(ModelSpec& spec) {
  spec.config.embedding_dropout = spec.config.residual_dropout = 0;
  spec.config.attention_dropout = spec.config.adapter_dropout = 0;
}

}  // namespace tierflow
