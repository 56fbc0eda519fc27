#include "runtime/spec/expert_parameters.h"

#include <charconv>

namespace tierflow {

std::string expert_module(const ModelConfig& config) {
  // Where a folder has linear layers of all experts (GraniteMoe), transformers has the module beside them.
  const std::string& stacked = config.names.stacked_in;
  if (stacked.ends_with(".weight")) return stacked.substr(0, stacked.find('.')) + ".experts";
  return stacked.empty() ? "mlp.experts" : stacked.substr(0, stacked.rfind('.'));
}

std::optional<ExpertPart> expert_part(const ModelConfig& config, const TensorSpec& tensor) {
  if (tensor.part != Part::expert || !tensor.decays || tensor.shape.size() < 2) return std::nullopt;
  const DecoderNames& names = config.names;
  const auto parameter = [&](const char* name) {
    const std::string layer = tensor.name.substr(0, tensor.name.size() - tensor.role.size());
    return layer + expert_module(config) + "." + name;
  };
  if (tensor.shape.size() == 3) {
    const bool in = tensor.role == names.stacked_in;
    return ExpertPart{.parameter = parameter(in ? kExpertsIn : kExpertsDown),
                      .expert = tensor.first_row,
                      .experts = tensor.shape[0],
                      .rows = tensor.shape[config.experts.transposed ? 2 : 1]};
  }
  ExpertPart part{.rows = tensor.shape[0]};
  const std::string_view rest = std::string_view(tensor.role).substr(names.expert.size() + 1);
  std::from_chars(rest.data(), rest.data() + rest.size(), part.expert);
  const std::string_view matrix = rest.substr(rest.find('.') + 1);
  part.parameter = parameter(matrix.starts_with(names.expert_down + ".") ? kExpertsDown : kExpertsIn);
  if (matrix.starts_with(names.expert_up + ".")) part.row = config.experts.width;
  return part;
}

}  // namespace tierflow
