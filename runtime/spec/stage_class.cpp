#include "runtime/spec/stage_class.h"

namespace tierflow {

std::string stage_class(const ModelSpec& spec, int stage) {
  static constexpr const char* kKinds[] = {"embedding", "block", "attention", "mlp",
                                           "experts",   "norm",  "head_tile", "head"};
  const auto name = [&](int index) { return std::string(kKinds[static_cast<int>(spec.stages[index].kind)]); };
  std::string text = name(stage);
  // A tile passes on what it found beside the hidden states: the first one gets none. So do stages of experts, and the
  // last one passes on none.
  const StageKind kind = spec.stages[stage].kind;
  if (kind == StageKind::embedding || kind == StageKind::head_tile || kind == StageKind::head ||
      kind == StageKind::experts)
    text.append(" after ").append(stage == 0 ? "nothing" : name(stage - 1));
  if (kind == StageKind::experts) text.append(" before ").append(name(stage + 1));
  if (spec.stages[stage].block >= 0) {
    const LayerSpec layer = spec.config.layer(spec.stages[stage].block);
    if (layer.window > 0) text.append(" window ").append(std::to_string(layer.window));
    if (layer.chunk > 0) text.append(" chunk ").append(std::to_string(layer.chunk));
    if (layer.rope < 0) text.append(" without positions");
  }
  std::vector<int> units = spec.stages[stage].units;
  if (!spec.stages[stage].on_demand.empty()) {
    text.append(" with ").append(std::to_string(spec.stages[stage].on_demand.size())).append(" on demand");
    units.push_back(spec.stages[stage].on_demand.front());
  }
  for (int unit : units) {
    text += " |";
    for (const TensorSpec& tensor : spec.units[unit].tensors) {
      if (!tensor.trainable) text += " frozen";
      if (tensor.format != WeightFormat::bf16) text.append(" ").append(weight_format_name(tensor.format));
      for (std::size_t i = 0; i < tensor.shape.size(); ++i)
        text.append(i == 0 ? " " : "x").append(std::to_string(tensor.shape[i]));
    }
  }
  return text;
}

}  // namespace tierflow
