#include "runtime/spec/outer_adapters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

// A matrix outside of blocks that is a target.
struct Target {
  std::string module;
  std::vector<std::size_t> stages;  // of its tiles
  std::int64_t rank = 0;
  double scale = 1;
};

class OuterAdapters {
 public:
  OuterAdapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice)
      : spec_(spec), config_(config), choice_(choice) {}

  // Beside what the stages of the head, or of the table, have in common with the rest of the model.
  void add_to_head(const Target& target) {
    std::size_t first = target.stages.front();
    if (first > 0 && spec_.stages[first - 1].kind == StageKind::norm) --first;
    if (spec_.stages[first].units.empty())
      fail_usage(
          fmt::format("{} is a target, but its head comes in tiles and has no norm before it: such a head has no "
                      "adapter here",
                      target.module));
    const std::int64_t hidden = spec_.config.hidden_size;
    TensorSpec& a = add(first, target, "lora_A.weight", {target.rank, hidden});
    a.init = Init::uniform;
    a.init_std = 1 / std::sqrt(3.0 * static_cast<double>(hidden));
    for (const std::size_t stage : target.stages) {
      const TensorSpec tile = matrix(stage);
      TensorSpec& b = add(stage, target, "lora_B.weight", {tile.shape.front(), target.rank});
      b.init = Init::zeros;
      b.first_row = tile.first_row;
      b.all_rows = tile.all_rows;
    }
  }

  void add_to_table(const Target& target) {
    for (const std::size_t stage : target.stages) {
      const TensorSpec tile = matrix(stage);
      TensorSpec& a = add(stage, target, "lora_embedding_A", {tile.shape.front(), target.rank});
      a.init = Init::zeros;
      a.moments_32 = true;  // as a table's: few of its rows have a gradient
      a.first_row = tile.first_row;
      a.all_rows = tile.all_rows;
    }
    StageSpec& last = spec_.stages[target.stages.back()];
    add(target.stages.back(), target, "lora_embedding_B", {spec_.config.hidden_size, target.rank}).init_std = 1;
    last.backward_needs_weights = true;
    last.backward_needs_input = target.stages.size() > 1;
  }

  Target target(const std::string& module, std::vector<std::size_t> stages) {
    if (config_.init != AdapterInit::standard || config_.dora)
      fail_usage(
          fmt::format("{} is a target: adapters of the head and of the token table begin with the default values "
                      "and have no magnitude (no --init, no --use-dora)",
                      module));
    if (has_transposed_weights(spec_))
      fail_usage(
          fmt::format("{} is a target: beside layers that are stored as [inputs, outputs], the head and the "
                      "token table have no adapters here",
                      module));
    const std::int64_t rank = choice_.rank(module);
    const auto wide = static_cast<double>(rank);
    return {.module = module,
            .stages = std::move(stages),
            .rank = rank,
            .scale = choice_.alpha(module) / (config_.rank_stabilised ? std::sqrt(wide) : wide)};
  }

 private:
  const TensorSpec& matrix(std::size_t stage) const {
    return spec_.units[static_cast<std::size_t>(spec_.stages[stage].units.front())].tensors.front();
  }
  TensorSpec& add(std::size_t stage, const Target& target, const char* part, std::vector<std::int64_t> shape) {
    UnitSpec& unit = spec_.units[static_cast<std::size_t>(spec_.stages[stage].units.front())];
    return unit.tensors.emplace_back(TensorSpec{.name = fmt::format("base_model.model.{}.{}", target.module, part),
                                                .role = fmt::format("{}.{}", target.module, part),
                                                .shape = std::move(shape),
                                                .scale = target.scale});
  }

  ModelSpec& spec_;
  const AdapterConfig& config_;
  AdapterChoice& choice_;
};

}  // namespace

void add_outer_adapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice,
                        std::set<std::string>& unused, std::vector<std::string>& modules) {
  if (config.target_pattern.empty() && config.targets.empty()) return;  // all linear layers: of blocks, in PEFT too
  if (spec.config.architecture.empty()) return;  // layers of one's own: each is adapted as a block
  const DecoderNames& names = spec.config.names;
  const std::string table = names.prefix + names.tokens;
  OuterAdapters outer(spec, config, choice);
  std::vector<std::pair<std::string, std::vector<std::size_t>>> found;  // module: the stages of its tiles
  const auto wants = [&](const std::string& module) {
    const std::vector<std::string> paths = module_paths(spec, module);
    const bool saved = std::ranges::any_of(config.saved, [&](const std::string& name) {
      return std::ranges::any_of(paths, [&](const std::string& path) { return path.ends_with(name); });
    });
    for (const std::string& path : paths)
      std::erase_if(unused, [&](const std::string& target) { return name_fits(path, target); });
    return !saved && choice.wants(module, -1);
  };
  for (std::size_t stage = 0; stage < spec.stages.size(); ++stage) {
    if (spec.stages[stage].block >= 0) continue;
    for (const std::int64_t unit : spec.stages[stage].units)
      for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors) {
        const std::string module = is_adapter(tensor) ? "" : linear_module(tensor);
        if (module.empty() || !wants(module)) continue;
        if (tensor.name != table && tensor.name != names.head)
          fail_usage(
              fmt::format("{} is a target: outside of blocks, only the head and the table of tokens can have "
                          "adapters; what else there is can be trained whole (modules to save)",
                          module_paths(spec, module).back()));
        if (found.empty() || found.back().first != module) found.push_back({module, {}});
        found.back().second.push_back(stage);
      }
  }
  if (spec.config.tie_word_embeddings && (!found.empty() || wants("lm_head")))
    fail_usage(
        fmt::format("{} is a target, but the table of tokens is the head too (tie_word_embeddings): it can be "
                    "trained whole (modules to save), or have PEFT's adapters over the model that Python streams",
                    found.empty() ? "lm_head" : module_paths(spec, found.front().first).back()));
  for (const auto& [module, stages] : found) {
    modules.push_back(module);
    const Target target = outer.target(module, stages);
    spec.stages[stages.front()].kind == StageKind::embedding ? outer.add_to_table(target) : outer.add_to_head(target);
  }
}

}  // namespace tierflow
