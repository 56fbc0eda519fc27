#include "runtime/planning/probed_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/spec/model_units.h"
#include "runtime/spec/trainable.h"

namespace tierflow {
namespace {

bool is_head(const StageSpec& stage) {
  return stage.kind == StageKind::head || stage.kind == StageKind::head_tile;
}

}  // namespace

void scale_micro_batch(ProbedModel& probed, std::int64_t to, std::int64_t from) {
  if (to == from) return;
  const double factor = static_cast<double>(to) / static_cast<double>(from);
  const auto more = [&](std::uint64_t& bytes) {
    bytes = static_cast<std::uint64_t>(static_cast<double>(bytes) * factor);
  };
  ComputeNeeds& needs = probed.needs;
  for (auto* stages :
       {&needs.carry_bytes, &needs.activation_bytes, &needs.swapped_bytes, &probed.stage_peaks, &probed.keeping_peaks})
    std::for_each(stages->begin(), stages->end(), more);
  for (auto* bytes : {&needs.stage_peak, &needs.keeping_peak, &needs.held_peak, &needs.micro_batch_bytes}) more(*bytes);
  for (swap::StageSeconds& seconds : probed.seconds) seconds *= factor;
}

double stage_operations(const ModelSpec& spec, int stage, std::int64_t micro_batch, std::int64_t sequence_length) {
  const ModelConfig& c = spec.config;
  const StageSpec& of = spec.stages[stage];
  const double tokens = static_cast<double>(micro_batch) * static_cast<double>(sequence_length);
  const double share =  // of the tokens, at an expert
      c.experts.count == 0 ? 0.0 : static_cast<double>(c.experts.per_token) / static_cast<double>(c.experts.count);
  double products = 0;  // parameters, each of which every token is multiplied with
  if (is_head(of)) {
    products = static_cast<double>(spec.units[of.units.back()].tensors.front().elements());
  } else if (of.kind != StageKind::embedding) {
    for (const int unit : of.units)
      for (const TensorSpec& tensor : spec.units[unit].tensors)
        if (tensor.shape.size() > 1 && tensor.decays)
          products += static_cast<double>(tensor.elements()) * (tensor.part == Part::expert ? share : 1.0);
  }
  double operations = tokens * (2 * products + static_cast<double>(c.hidden_size));
  if (of.kind == StageKind::block || of.kind == StageKind::attention) {
    const std::int64_t reach = c.layer(of.block).reach();
    const std::int64_t seen = reach == 0 ? sequence_length : std::min(sequence_length, reach);
    operations += 2 * tokens * static_cast<double>(seen) * static_cast<double>(c.heads * c.head_dim);
  }
  return operations;
}

int width_parts(const ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const std::int64_t experts = std::gcd(c.experts.width, c.experts.shared_width);  // 0 where there are none
  return static_cast<int>(
      std::gcd(std::gcd(std::gcd(c.heads, c.kv_heads), std::gcd(c.hidden_size, c.intermediate_size)), experts));
}

ModelSpec narrowed(const ModelSpec& spec, int parts) {
  const int all = width_parts(spec);
  ModelSpec narrow{.config = spec.config, .config_json = spec.config_json, .tiling = spec.tiling};
  ModelConfig& c = narrow.config;
  for (std::int64_t* size :
       {&c.heads, &c.kv_heads, &c.hidden_size, &c.intermediate_size, &c.experts.width, &c.experts.shared_width})
    *size = *size / all * parts;
  // The same rows in a tile, the same blocks whole and as many experts in a stage.
  const std::int64_t rows = std::max<std::int64_t>(1, spec.tiling.vocabulary_elements / spec.config.hidden_size);
  narrow.tiling.vocabulary_elements = rows * c.hidden_size;
  narrow.tiling.block_elements = INT64_MAX;
  build_units(narrow);
  std::vector<std::int64_t> elements(static_cast<std::size_t>(c.layers));
  for (const StageSpec& stage : narrow.stages)
    if (stage.block >= 0) elements[static_cast<std::size_t>(stage.block)] = narrow.units[stage.units[0]].parameters();
  narrow.tiling.block_elements = 0;
  for (const StageSpec& stage : spec.stages) {
    if (stage.kind == StageKind::block)
      narrow.tiling.block_elements =
          std::max(narrow.tiling.block_elements, elements[static_cast<std::size_t>(stage.block)]);
    narrow.tiling.experts = std::max(narrow.tiling.experts, stage.experts);
  }
  narrow.units.clear();
  narrow.stages.clear();
  build_units(narrow);
  train_as(narrow, spec);
  return narrow;
}

ProbedModel widened(const ModelSpec& spec, const std::array<NarrowProbe, 3>& narrowest_first, std::int64_t micro_batch,
                    std::int64_t sequence_length) {
  const NarrowProbe &low = narrowest_first[0], &middle = narrowest_first[1], &high = narrowest_first[2];
  const double all = width_parts(spec), x[] = {low.parts / all, middle.parts / all, high.parts / all};
  // Never less than of the widest, nor more than its weights' share says.
  const auto bytes_at = [&](std::uint64_t of_low, std::uint64_t of_middle, std::uint64_t of_high) {
    const double y[] = {static_cast<double>(of_low), static_cast<double>(of_middle), static_cast<double>(of_high)};
    double sum = 0;
    for (int i = 0; i < 3; ++i) {
      double term = y[i];
      for (int j = 0; j < 3; ++j)
        if (j != i) term *= (1 - x[j]) / (x[i] - x[j]);
      sum += term;
    }
    return static_cast<std::uint64_t>(std::llround(std::clamp(sum, y[2], y[2] / (x[2] * x[2]))));
  };
  const auto each = [&](auto member) {
    const auto &of_low = member(low.probed), &of_middle = member(middle.probed), &of_high = member(high.probed);
    std::vector<std::uint64_t> all_stages;
    for (std::size_t stage = 0; stage < of_high.size(); ++stage)
      all_stages.push_back(bytes_at(of_low[stage], of_middle[stage], of_high[stage]));
    return all_stages;
  };
  const auto largest = [](const std::vector<std::uint64_t>& of) {
    return of.empty() ? 0 : *std::max_element(of.begin(), of.end());
  };
  const ComputeNeeds& needs = high.probed.needs;
  ProbedModel wide{
      .needs = {.carry_bytes = each([](const auto& of) { return of.needs.carry_bytes; }),
                .activation_bytes = each([](const auto& of) { return of.needs.activation_bytes; }),
                .swapped_bytes = each([](const auto& of) { return of.needs.swapped_bytes; }),
                .micro_batch_bytes = bytes_at(low.probed.needs.micro_batch_bytes, middle.probed.needs.micro_batch_bytes,
                                              needs.micro_batch_bytes),
                .device_fixed = needs.device_fixed},
      .stage_peaks = each([](const auto& of) { return of.stage_peaks; }),
      .keeping_peaks = each([](const auto& of) { return of.keeping_peaks; }),
      .seconds = high.probed.seconds,
      .spread = high.probed.spread};
  wide.needs.stage_peak = largest(wide.stage_peaks);
  wide.needs.keeping_peak = largest(wide.keeping_peaks);
  // What torch keeps beyond the peak grows with it.
  wide.needs.held_peak =
      static_cast<std::uint64_t>(static_cast<double>(wide.needs.stage_peak) * static_cast<double>(needs.held_peak) /
                                 static_cast<double>(std::max<std::uint64_t>(1, needs.stage_peak)));
  const ModelSpec narrow = narrowed(spec, high.parts);
  for (std::size_t stage = 0; stage < wide.seconds.size(); ++stage) {
    const int at = static_cast<int>(stage);
    wide.seconds[stage] *= stage_operations(spec, at, micro_batch, sequence_length) /
                           stage_operations(narrow, at, micro_batch, sequence_length);
  }
  return wide;
}

}  // namespace tierflow
