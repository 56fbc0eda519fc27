#include "runtime/spec/experts_on_demand.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "runtime/spec/weight_codes.h"

namespace tierflow {
namespace {

// The expert that a tensor's role names; none where the tensor holds all of its stage, one after the other.
std::optional<std::int64_t> expert_named(const ModelConfig& config, const TensorSpec& tensor) {
  const std::string before = config.names.expert + ".";
  if (!tensor.role.starts_with(before)) return std::nullopt;
  std::int64_t expert = 0;
  const char* const begin = tensor.role.data() + before.size();
  const auto [end, error] = std::from_chars(begin, tensor.role.data() + tensor.role.size(), expert);
  if (error != std::errc() || *end != '.') return std::nullopt;
  return expert;
}

// Whether no two experts of the tensor share a scale.
bool has_scales_of_one(const TensorSpec& tensor) {
  const std::int64_t of_one = tensor.elements() / tensor.shape.front();
  switch (tensor.format) {
    case WeightFormat::int8:
      return of_one % weights::kInt8Block == 0;
    case WeightFormat::nf4:
      return of_one % weights::kNf4Block == 0;
    case WeightFormat::nf4_double:
      return false;
    case WeightFormat::bf16:
    case WeightFormat::fp8:
    case WeightFormat::fp8_rows:
    case WeightFormat::mxfp4:
    case WeightFormat::fp32:
      return true;
  }
  return false;
}

bool can_be_cut(const ModelSpec& spec) {
  return std::ranges::all_of(spec.units, [&](const UnitSpec& unit) {
    return std::ranges::all_of(unit.tensors, [&](const TensorSpec& tensor) {
      return tensor.part != Part::expert || expert_named(spec.config, tensor) || has_scales_of_one(tensor);
    });
  });
}

// Moves the experts of a stage's unit to units of their own, and leaves the rest.
void take_experts(const ModelConfig& config, const StageSpec& stage, UnitSpec& unit, std::vector<UnitSpec>& experts) {
  std::vector<TensorSpec> rest;
  for (TensorSpec& tensor : unit.tensors) {
    if (tensor.part != Part::expert) {
      rest.push_back(std::move(tensor));
    } else if (const auto expert = expert_named(config, tensor)) {
      experts[static_cast<std::size_t>(*expert)].tensors.push_back(std::move(tensor));
    } else {
      for (std::int64_t here = 0; here < stage.experts; ++here) {
        TensorSpec one = tensor;
        one.shape.front() = 1;
        one.first_row = tensor.first_row + here;
        one.all_rows = config.experts.count == 1 ? 0 : config.experts.count;
        experts[static_cast<std::size_t>(stage.first_expert + here)].tensors.push_back(std::move(one));
      }
    }
  }
  unit.tensors = std::move(rest);
}

}  // namespace

void set_experts_on_demand(ModelSpec& spec) {
  if (!can_be_cut(spec)) return;
  const ModelConfig& config = spec.config;
  std::vector<UnitSpec> units;
  std::vector<StageSpec> stages;
  std::vector<int> now(spec.units.size(), -1);  // by unit: where it is now
  const auto add = [&](UnitSpec unit) {
    units.push_back(std::move(unit));
    return static_cast<int>(units.size()) - 1;
  };
  for (std::size_t index = 0; index < spec.stages.size(); ++index) {
    StageSpec stage = spec.stages[index];
    std::vector<UnitSpec> experts(stage.experts > 0 ? static_cast<std::size_t>(config.experts.count) : 0);
    for (std::size_t i = 0; i < experts.size(); ++i)
      experts[i].name = "layers." + std::to_string(stage.block) + ".expert." + std::to_string(i);
    for (int& unit : stage.units) {
      int& place = now[static_cast<std::size_t>(unit)];
      if (place < 0) {
        UnitSpec own = std::move(spec.units[static_cast<std::size_t>(unit)]);
        if (stage.experts > 0) take_experts(config, stage, own, experts);
        place = add(std::move(own));
      }
      unit = place;
    }
    // Further stages of the same layer's experts have nothing else.
    for (; stage.experts > 0 && stage.first_expert + stage.experts < config.experts.count; ++index) {
      const StageSpec& next = spec.stages[index + 1];
      take_experts(config, next, spec.units[static_cast<std::size_t>(next.units.front())], experts);
      stage.experts += next.experts;
    }
    if (stage.kind == StageKind::mlp && stage.experts > 0) stage.kind = StageKind::experts;
    for (UnitSpec& expert : experts) stage.on_demand.push_back(add(std::move(expert)));
    stages.push_back(std::move(stage));
  }
  spec.units = std::move(units);
  spec.stages = std::move(stages);
}

bool has_experts_on_demand(const ModelSpec& spec) {
  return std::ranges::any_of(spec.stages, [](const StageSpec& stage) { return !stage.on_demand.empty(); });
}

}  // namespace tierflow
