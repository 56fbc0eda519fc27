#include "runtime/spec/token_tables.h"

#include <algorithm>

namespace tierflow {

std::vector<TokenTable> token_tables(const ModelSpec& spec) {
  std::vector<TokenTable> tables;
  for (const StageSpec& stage : spec.stages) {
    if (stage.kind != StageKind::embedding || stage.units.empty()) continue;
    const int unit = stage.units.front();
    const auto uses = [unit](const StageSpec& other) { return std::ranges::count(other.units, unit) != 0; };
    if (std::ranges::count_if(spec.stages, uses) != 1) continue;
    const std::vector<TensorSpec>& tensors = spec.units[unit].tensors;
    for (int tensor = 0; tensor < static_cast<int>(tensors.size()); ++tensor) {
      const TensorSpec& of = tensors[tensor];
      if (of.role != spec.config.names.tokens || !of.trainable || of.shape.size() != 2) continue;
      tables.push_back({unit, tensor, of.first_row, of.shape[0], of.shape[1]});
    }
  }
  return tables;
}

}  // namespace tierflow
