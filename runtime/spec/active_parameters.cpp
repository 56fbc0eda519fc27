#include "runtime/spec/active_parameters.h"

#include <vector>

namespace tierflow {

std::int64_t active_parameters(const ModelSpec& spec) {
  std::int64_t count = 0, of_experts = 0;
  std::vector<bool> table(spec.units.size());  // rows are looked up in it, and it serves nothing else
  for (const StageSpec& stage : spec.stages)
    for (const int unit : stage.units) table[static_cast<std::size_t>(unit)] = stage.kind == StageKind::embedding;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (const TensorSpec& tensor : spec.units[unit].tensors) {
      const std::int64_t elements = tensor.elements();
      if (table[unit])
        count += tensor.first_row == 0 ? elements / tensor.shape.front() : 0;  // of all tiles together one row
      else
        (tensor.part == Part::expert ? of_experts : count) += elements;
    }
  const ExpertsSpec& experts = spec.config.experts;
  return of_experts == 0 ? count : count + of_experts / experts.count * experts.per_token;
}

}  // namespace tierflow
