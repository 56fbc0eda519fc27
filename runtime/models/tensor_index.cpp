#include "runtime/models/tensor_index.h"

#include "runtime/base/exception.h"

namespace tierflow::models {

TensorIndex::TensorIndex(const ModelSpec& spec, int stage) : transposed_(spec.config.transposed) {
  const StageSpec& layer = spec.stages.at(static_cast<std::size_t>(stage));
  for (int unit : layer.units) add(spec.units.at(static_cast<std::size_t>(unit)));
}

void TensorIndex::add(const UnitSpec& unit) {
  if (stage_.empty()) stage_ = unit.name;
  for (const TensorSpec& tensor : unit.tensors) {
    names_.push_back(tensor.name);
    scales_.push_back(tensor.scale);
  }
}

int TensorIndex::find(std::string_view end) const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    const std::string_view name = names_[i];
    if (!name.ends_with(end)) continue;
    if (name.size() == end.size() || name[name.size() - end.size() - 1] == '.') return static_cast<int>(i);
  }
  return -1;
}

int TensorIndex::at(std::string_view end) const {
  const int position = find(end);
  if (position < 0)
    throw Exception(io::ErrorKind::input, "unit '" + stage_ + "' has no tensor '" + std::string(end) + "'");
  return position;
}

}  // namespace tierflow::models
