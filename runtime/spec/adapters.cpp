#include "runtime/spec/adapters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/adapter_choice.h"
#include "runtime/spec/expert_adapters.h"
#include "runtime/spec/expert_parameters.h"
#include "runtime/spec/name_pattern.h"
#include "runtime/spec/outer_adapters.h"
#include "runtime/spec/saved_modules.h"

namespace tierflow {
namespace {

constexpr std::string_view kWeight = ".weight", kPrefix = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight", kA0 = ".lora_A0.weight",
                           kB0 = ".lora_B0.weight", kM = ".lora_magnitude_vector", kM0 = ".lora_magnitude_base";
// By AdapterPart, but for none.
constexpr std::array<std::string_view, 6> kParts = {kA, kB, kA0, kB0, kM, kM0};
constexpr std::string_view kTableA = ".lora_embedding_A", kTableB = ".lora_embedding_B";

// A name without the ".weight" at its end.
std::string without_weight(std::string_view name) {
  name.remove_suffix(std::min(name.size(), kWeight.size()));
  return std::string(name);
}

// Units whose linear layers have adapters where their names fit: those of blocks, by number. Of layers of one's own the
// last, which has the loss, is one of them.
std::map<std::size_t, std::int64_t> adapted_units(const ModelSpec& spec) {
  std::map<std::size_t, std::int64_t> blocks;
  for (std::size_t stage = 0; stage < spec.stages.size(); ++stage) {
    const StageSpec& of = spec.stages[stage];
    if (of.block >= 0)
      blocks.emplace(static_cast<std::size_t>(of.units.front()), of.block);
    else if (spec.config.architecture.empty())
      blocks.emplace(static_cast<std::size_t>(of.units.front()), static_cast<std::int64_t>(stage));
  }
  return blocks;
}

// PEFT would wrap what a name fits beside weights that have adapters, and fail where that is no matrix.
void expect_adapters_of_all_that_fits(const ModelSpec& spec, const std::vector<std::string>& parameters) {
  if (parameters.empty()) return;
  const std::map<std::size_t, std::int64_t> blocks = adapted_units(spec);
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit) {
    const bool block = blocks.contains(unit);
    for (const TensorSpec& tensor : spec.units[unit].tensors) {
      if (is_adapter(tensor) || tensor.part != Part::plain || (block && !linear_module(tensor).empty())) continue;
      for (const std::string& path : module_paths(spec, name_in_model(tensor.name)))
        for (const std::string& name : parameters)
          if (name_fits(path, name))
            fail_usage(fmt::format("the target parameter {} fits {} too, which has no adapter: give a longer name",
                                   printable(name), path));
    }
  }
}

// The same choice by the paths of modules in the whole model: no other part of it has one of them. Modules that PEFT
// would take for others are named by their weights.
void name_each_module(const ModelSpec& spec, AdapterConfig& config) {
  AdapterConfig named = config;
  named.targets.clear();
  named.exclude.clear();
  named.layers.clear();
  named.layer_patterns.clear();
  named.parameters.clear();
  named.rank_pattern.clear();
  named.alpha_pattern.clear();
  named.target_pattern = named.exclude_pattern = "";
  std::erase_if(named.saved, [](const std::string& name) { return name != kHead; });
  AdapterChoice choice(spec, config);
  const bool apart = config.dropout == 0 && !config.dora;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (!is_adapter(tensor) && tensor.trainable) {
        std::string saved = module_paths(spec, module_of(name_in_model(tensor.name))).back();
        if (std::ranges::find(named.saved, saved) == named.saved.end()) named.saved.push_back(std::move(saved));
      }
      if (adapter_part(tensor) != AdapterPart::a || tensor.first_row != 0) continue;
      const std::string module = linear_module(tensor);
      const bool by_weight = !is_expert_adapter(tensor) && ((apart && is_taken_for_expert(spec.config, module)) ||
                                                            choice.wants_parameter(module + ".weight"));
      const std::string path =
          fmt::format("{}{}", module_paths(spec, module).back(), by_weight ? kWeight : std::string_view());
      (by_weight || is_expert_adapter(tensor) ? named.parameters : named.targets).push_back(path);
      const std::string patterned = choice.patterned(module);
      if (choice.rank(patterned) != config.rank) named.rank_pattern.emplace_back(exactly(path), choice.rank(patterned));
      if (choice.alpha(patterned) != config.alpha)
        named.alpha_pattern.emplace_back(exactly(path), choice.alpha(patterned));
    }
  named.parameters_alone = named.targets.empty();
  config = std::move(named);
}

}  // namespace

AdapterPart adapter_part(const TensorSpec& tensor) {
  for (std::size_t i = 0; i < kParts.size(); ++i)
    if (tensor.name.ends_with(kParts.at(i))) return static_cast<AdapterPart>(i + 1);
  if (tensor.name.ends_with(kTableA)) return AdapterPart::a;
  return tensor.name.ends_with(kTableB) ? AdapterPart::b : AdapterPart::none;
}

bool is_adapter(const TensorSpec& tensor) {
  return adapter_part(tensor) != AdapterPart::none;
}

bool is_expert_adapter(const TensorSpec& tensor) {
  return is_adapter(tensor) && tensor.part == Part::expert;
}

bool is_table_adapter(const TensorSpec& tensor) {
  return tensor.name.ends_with(kTableA) || tensor.name.ends_with(kTableB);
}

bool is_turned_beside_base(const TensorSpec& tensor) {
  return is_expert_adapter(tensor) ? adapter_part(tensor) == AdapterPart::b : tensor.name.ends_with(kTableA);
}

bool has_transposed_weights(const ModelSpec& spec) {
  return spec.config.transposed;
}

std::string linear_module(const TensorSpec& tensor) {
  std::string_view name = tensor.name;
  if (is_adapter(tensor)) {
    name.remove_prefix(kPrefix.size());
    std::string path(name.substr(0, name.rfind(".lora_")));
    if (const std::size_t inner = path.find(kInnerWrapper); is_expert_adapter(tensor) && inner != std::string::npos)
      path.erase(inner, kInnerWrapper.size());
    return path;
  }
  const bool matrix = tensor.shape.size() == 2 && tensor.decays;  // norms of heads do not
  if (!matrix || !name.ends_with(kWeight) || tensor.part != Part::plain) return {};
  return module_of(name_in_model(tensor.name));
}

std::string name_beside_base(const TensorSpec& tensor) {
  const AdapterPart part = adapter_part(tensor);
  if (part == AdapterPart::initial_a) return fmt::format("{}{}{}", kPrefix, linear_module(tensor), kA);
  if (part == AdapterPart::initial_b) return fmt::format("{}{}{}", kPrefix, linear_module(tensor), kB);
  if (part == AdapterPart::initial_magnitude) return fmt::format("{}{}{}", kPrefix, linear_module(tensor), kM);
  if (is_expert_adapter(tensor)) {  // PEFT does not name the parameter
    const std::size_t end = tensor.name.rfind(".lora_"), dot = tensor.name.rfind('.', end - 1);
    return tensor.name.substr(0, dot) + tensor.name.substr(end);
  }
  if (part != AdapterPart::none) return tensor.name;
  return tensor.trainable ? std::string(kPrefix) + name_in_model(tensor.name) : "";
}

std::vector<std::int64_t> shape_beside_base(const TensorSpec& tensor) {
  const std::vector<std::int64_t> shape = tensor.checkpoint_shape();
  if (tensor.name.ends_with(kTableA)) return {shape[1], shape[0]};
  if (!is_expert_adapter(tensor)) return shape;
  if (adapter_part(tensor) == AdapterPart::a) return {shape[0] * shape[1], shape[2]};
  return {shape[1], shape[2] * shape[0]};
}

void check_first_factors(const ModelSpec& spec) {
  // Of a gradient, A0 takes the first singular vectors and B0 those that follow.
  const bool gradient = begins_with_gradient(spec);
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const AdapterPart part = adapter_part(tensor);  // A0 is [rank, in], B0 [out, rank]
      if (part != AdapterPart::initial_a && part != AdapterPart::initial_b) continue;
      const std::int64_t rank = tensor.shape[part == AdapterPart::initial_a ? 0 : 1],
                         side = tensor.shape[part == AdapterPart::initial_a ? 1 : 0];
      if ((gradient ? 2 : 1) * rank > side)
        fail_usage(
            fmt::format("adapters of rank {} cannot begin with factors of {}.weight{}, whose smaller side is {}: "
                        "exclude it, or give it a smaller rank",
                        rank, linear_module(tensor), gradient ? "'s gradient, which are twice as many" : "", side));
    }
}

std::int64_t window_steps(const ModelSpec& spec) {
  if (spec.adapter_config_json.empty()) return 0;
  const AdapterConfig config = parse_adapter_config(spec.adapter_config_json, "the model's adapters");
  return config.init == AdapterInit::galore ? config.windows.steps : 0;
}

bool is_written_beside_base(const ModelSpec& spec) {
  return !spec.adapter_config_json.empty() && window_steps(spec) == 0;
}

bool trains_adapters_alone(const ModelSpec& spec) {
  if (spec.adapter_config_json.empty() || window_steps(spec) != 0) return false;
  return std::ranges::all_of(spec.units, [](const UnitSpec& unit) {
    return std::ranges::all_of(unit.tensors,
                               [](const TensorSpec& tensor) { return !tensor.trainable || is_adapter(tensor); });
  });
}

bool begins_with_gradient(const ModelSpec& spec) {
  return !spec.adapter_config_json.empty() &&
         of_gradient(parse_adapter_config(spec.adapter_config_json, "the model's adapters").init);
}

std::string tied_name_beside_base(const ModelSpec& spec) {
  const bool trained = spec.config.tie_word_embeddings && spec.units.front().tensors.front().trainable;
  return trained ? fmt::format("{}{}{}", kPrefix, kHead, kWeight) : "";
}

std::string name_in_whole_model(const ModelSpec& spec, const std::string& name) {
  return name.starts_with(kPrefix)
             ? fmt::format("{}{}", kPrefix, module_paths(spec, name.substr(kPrefix.size())).back())
             : name;
}

std::string adapter_config_beside_base(const ModelSpec& spec) {
  AdapterConfig config = parse_adapter_config(spec.adapter_config_json, "the model's adapters");
  const bool rewritten = !config.target_pattern.empty() && is_rewritten_by_peft(spec.config);
  if (!spec.wrapper.empty() || rewritten || has_layers_taken_for_experts(spec)) name_each_module(spec, config);
  return adapter_config_json(joined_with_first(std::move(config)), has_transposed_weights(spec));
}

void add_adapters(ModelSpec& spec, const AdapterConfig& config) {
  check_adapters(config);
  AdapterChoice choice(spec, config);
  SavedModules saved(spec, config.saved);
  const bool transposed = has_transposed_weights(spec), windows = config.init == AdapterInit::galore;
  std::set<std::string> names;
  std::set<std::string> unused(config.targets.begin(), config.targets.end()),
      unused_parameters(config.parameters.begin(), config.parameters.end());
  AdapterConfig written = config;
  written.ties_saved = false;
  const std::map<std::size_t, std::int64_t> blocks = adapted_units(spec);
  std::vector<std::string> modules;
  for (std::size_t index = 0; index < spec.units.size(); ++index) {
    UnitSpec& unit = spec.units[index];
    const auto block = blocks.find(index);
    const std::size_t base = unit.tensors.size();
    for (std::size_t i = 0; i < base; ++i) {
      TensorSpec& tensor = unit.tensors[i];
      const std::string module = block == blocks.end() ? "" : linear_module(tensor);
      if (!module.empty()) {
        names.insert(last_name(module));
        for (const std::string& path : module_paths(spec, module)) {
          std::erase_if(unused, [&](const std::string& target) { return name_fits(path, target); });
          std::erase_if(unused_parameters, [&](const std::string& name) { return name_fits(path + ".weight", name); });
        }
      }
      const bool by_weight = !module.empty() && choice.wants_parameter(module + ".weight"),
                 by_module = !module.empty() && choice.wants(module, block->second);
      if (by_weight && transposed)
        fail_usage(
            fmt::format("{}.weight is [inputs, outputs]: name the module as a target, not its parameter", module));
      if (by_weight && by_module)
        fail_usage(fmt::format("{} is a target both as a module and by its weight, as a parameter", module));
      const bool wanted = (by_weight || by_module) && (!windows || tensor.trainable);
      if (!windows) {
        tensor.trainable = saved.wants(tensor, wanted);
        if (tensor.trainable) tensor.format = WeightFormat::bf16;
        if (tensor.trainable && saved.is_tied_table(tensor)) written.ties_saved = true;
        if (tensor.trainable && by_weight)
          fail_usage(
              fmt::format("{}.weight is a target parameter, and in a module to save: give one of the two", module));
      }
      if (!wanted || (tensor.trainable && !windows)) continue;
      const std::int64_t in = tensor.shape[transposed ? 0 : 1], out = tensor.shape[transposed ? 1 : 0];
      const std::int64_t rank = choice.rank(choice.patterned(module));
      const double alpha = choice.alpha(choice.patterned(module));
      const auto wide = static_cast<double>(rank);
      const std::string role = without_weight(tensor.role);
      const auto add = [&](std::string_view part, std::vector<std::int64_t> shape) -> TensorSpec& {
        return unit.tensors.emplace_back(TensorSpec{.name = fmt::format("{}{}{}", kPrefix, module, part),
                                                    .role = fmt::format("{}{}", role, part),
                                                    .shape = std::move(shape),
                                                    .init = Init::zeros});
      };
      if (windows) {
        if (rank > std::min(in, out))
          fail_usage(fmt::format(
              "the gradient of {}.weight has no projector of rank {}: its smaller side is {}; give a smaller "
              "rank, or exclude it",
              module, rank, std::min(in, out)));
        tensor.trainable = false;
        tensor.rewritten = Rewritten::master;
        for (const bool is_a : {true, false}) {
          TensorSpec& factor = is_a ? add(kA, {rank, in}) : add(kB, {out, rank});
          factor.trainable = is_a == (out < in);
          factor.rewritten = Rewritten::words;
          factor.lr_scale = config.windows.scale;
          factor.decays = false;
        }
        modules.push_back(module);
        continue;
      }
      TensorSpec& a = add(kA, {rank, in});
      a.init = Init::uniform;
      a.init_std = 1 / std::sqrt(3.0 * static_cast<double>(in));
      add(kB, {out, rank}).scale = alpha / (config.rank_stabilised ? std::sqrt(wide) : wide);
      if (config.init != AdapterInit::standard) {
        add(kA0, {rank, in}).trainable = false;
        add(kB0, {out, rank}).trainable = false;
      }
      if (config.dora) {
        TensorSpec& magnitude = add(kM, {out});
        magnitude.moments_32 = true;
        magnitude.decays = false;  // it is a difference
        TensorSpec& lengths = add(kM0, {out});
        lengths.trainable = false;
        lengths.format = WeightFormat::fp32;
      }
      if (by_module) modules.push_back(module);
    }
  }
  add_expert_adapters(spec, config, choice, std::move(unused_parameters));
  if (!windows) add_outer_adapters(spec, config, choice, unused, modules);
  if (!unused.empty())
    fail_usage(fmt::format("no linear layer is called {}: this model has {}",
                           printable(fmt::format("{}", fmt::join(unused, " or ")), 200), fmt::join(names, ", ")));
  expect_adapters_of_all_that_fits(spec, config.parameters);
  saved.expect_used();
  name_head_as_in_model(written.saved);
  for (const std::int64_t layer : config.layers)
    if (layer < 0 || layer >= spec.config.layers)
      fail_usage(fmt::format("there is no layer {} to adapt: the model's are 0 to {}", layer, spec.config.layers - 1));
  const bool any = std::ranges::any_of(
      spec.units, [](const UnitSpec& unit) { return std::ranges::any_of(unit.tensors, is_adapter); });
  if (!any || (modules.empty() && !config.parameters_alone))
    fail_usage(fmt::format("no linear layer is left to adapt: this model has {}", fmt::join(names, ", ")));
  if (written.ties_saved && !config.ties_saved)
    fail_usage(
        "the embedding is the head too (tie_word_embeddings), but the adapters train a copy that is not "
        "(ensure_weight_tying is false): such a model cannot be made here");
  if (written.ties_saved && std::ranges::find(written.saved, kHead) == written.saved.end())
    written.saved.emplace_back(kHead);  // PEFT ties what it knows by this name, whatever the embedding is called
  // PEFT takes no expression together with numbers of layers: then the modules stand for both.
  if (!config.target_pattern.empty() && !config.layers.empty()) {
    written.targets = modules;
    written.target_pattern.clear();
    written.layers.clear();
    written.layer_patterns.clear();
  } else if (config.target_pattern.empty() && config.targets.empty() && !config.parameters_alone) {
    written.targets.assign(names.begin(), names.end());
  }
  spec.config.adapter_dropout = config.dropout;
  spec.adapter_config_json = adapter_config_json(written, transposed);
}

}  // namespace tierflow
