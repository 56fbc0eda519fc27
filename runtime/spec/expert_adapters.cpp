#include "runtime/spec/expert_adapters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/expert_parameters.h"

namespace tierflow {
namespace {

// What of a name is behind a path's last dot, and what is before.
std::string before_last(const std::string& path) {
  return path.substr(0, path.rfind('.'));
}
std::string behind_last(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

// A parameter of a stage's experts: its matrices are [out, in], whatever way they lie.
struct Parameter {
  const char* name;
  std::int64_t in, out;
};

// A router's tensor, by its path in a folder or in transformers.
bool fits_router(const ModelSpec& spec, const TensorSpec& tensor, const std::string& module, const std::string& name) {
  const std::string kind = behind_last(tensor.name);
  for (const std::string& path : {tensor.name, fmt::format("{}.gate.{}", before_last(module), kind),
                                  fmt::format("{}.router.{}", before_last(module), kind)})
    for (const std::string& each : module_paths(spec, path))
      if (name_fits(each, name)) return true;
  return false;
}

}  // namespace

void add_expert_adapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice,
                         std::set<std::string> unused) {
  if (config.parameters.empty()) return;
  const ModelConfig& c = spec.config;
  const std::vector<Parameter> parameters{{kExpertsIn, c.hidden_size, 2 * c.experts.width},
                                          {kExpertsDown, c.experts.width, c.hidden_size}};
  std::set<std::string> names;
  for (const StageSpec& stage : spec.stages) {
    if (stage.experts == 0) continue;
    UnitSpec& unit = spec.units[static_cast<std::size_t>(stage.units.front())];
    const std::string in_layer = expert_module(c);
    const std::string module = fmt::format("{}layers.{}.{}", c.names.prefix, stage.block, in_layer);
    for (const TensorSpec& tensor : unit.tensors)
      for (const std::string& name : config.parameters)
        if (tensor.role.starts_with(c.names.router + ".") && fits_router(spec, tensor, module, name))
          fail_usage(
              fmt::format("the target parameter {} is a router's: routers have no adapters here", printable(name)));
    std::vector<Parameter> wanted;
    for (const Parameter& parameter : parameters) {
      names.insert(fmt::format("{}.{}", in_layer, parameter.name));
      const std::string path = fmt::format("{}.{}", module, parameter.name);
      for (const std::string& each : module_paths(spec, path))
        std::erase_if(unused, [&](const std::string& name) { return name_fits(each, name); });
      if (!choice.wants_parameter(path)) continue;
      if (turns_experts_in_peft(c))
        fail_usage(fmt::format("adapters on {} are not supported: PEFT takes these matrices of {} the other way round",
                               path, c.architecture));
      wanted.push_back(parameter);
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const char* name = wanted[i].name;
      const std::string path = fmt::format("{}.{}", module, name);
      const std::int64_t rank = choice.rank(path);
      const auto wide = static_cast<double>(rank);
      const auto add = [&](std::string_view part, std::int64_t rows, std::int64_t columns) -> TensorSpec& {
        const std::string_view wrapper = i + 1 < wanted.size() ? kInnerWrapper : "";
        return unit.tensors.emplace_back(
            TensorSpec{.name = fmt::format("base_model.model.{}{}.{}.{}.weight", module, wrapper, name, part),
                       .role = fmt::format("{}.{}.{}.weight", in_layer, name, part),
                       .shape = {stage.experts, rows, columns},
                       .first_row = stage.first_expert,
                       .all_rows = stage.experts == c.experts.count ? 0 : c.experts.count,
                       .part = Part::expert,
                       .init = Init::zeros});
      };
      TensorSpec& a = add("lora_A", rank, wanted[i].in);
      a.init = Init::uniform;
      a.init_std = 1 / std::sqrt(3.0 * static_cast<double>(wanted[i].in));
      add("lora_B", wanted[i].out, rank).scale = choice.alpha(path) / (config.rank_stabilised ? std::sqrt(wide) : wide);
    }
  }
  if (unused.empty()) return;
  const std::string called = printable(fmt::format("{}", fmt::join(unused, " or ")), 200);
  if (names.empty())
    fail_usage(fmt::format(
        "no parameter of experts and no linear layer's weight in a block is called {}: the model has no experts",
        called));
  fail_usage(fmt::format("no parameter of experts is called {}: this model has {}", called, fmt::join(names, ", ")));
}

bool is_taken_for_expert(const ModelConfig& config, const std::string& module) {
  const std::string name = behind_last(module);
  const DecoderNames& names = config.names;
  return (config.model_type == "glm4_moe" || config.model_type == "qwen3_moe") &&
         (name == names.expert_gate || name == names.expert_up || name == names.expert_down);
}

bool is_rewritten_by_peft(const ModelConfig& config) {
  constexpr std::array kTypes{"mixtral", "qwen3_moe", "olmoe", "glm4_moe"};
  return std::ranges::find(kTypes, config.model_type) != kTypes.end();
}

bool turns_experts_in_peft(const ModelConfig& config) {
  return config.model_type == "llama4_text";
}

bool has_layers_taken_for_experts(const ModelSpec& spec) {
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (is_adapter(tensor) && !is_expert_adapter(tensor) && is_taken_for_expert(spec.config, linear_module(tensor)))
        return true;
  return false;
}

}  // namespace tierflow
