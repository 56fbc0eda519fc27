// The linear layers of blocks in another format than bf16.
#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/own_format.h"

namespace tierflow {
namespace {

// The weights that a base's format is for: matrices of linear layers, and of experts.
template <class Spec, class Use>
void for_each_base_weight(Spec& spec, Use use) {
  for (const StageSpec& stage : spec.stages) {
    if (stage.block < 0) continue;
    for (auto& tensor : spec.units[static_cast<std::size_t>(stage.units.front())].tensors) {
      if (is_adapter(tensor)) continue;
      const bool of_expert = tensor.part == Part::expert && tensor.decays;  // a matrix, not biases
      if (of_expert || !linear_module(tensor).empty()) use(tensor);
    }
  }
}

using Has = std::function<bool(const std::string& name, WeightFormat format)>;

const char* in_words(WeightFormat format) {
  if (format == WeightFormat::mxfp4) return "MXFP4";
  return format == WeightFormat::fp8 ? "FP8 (tiles of 128 x 128)" : "FP8 with a scale for each row, matrix or tensor";
}

}  // namespace

void set_base_format(ModelSpec& spec, WeightFormat format, const std::vector<std::string>& plain) {
  spec.base_format = format;
  spec.base_plain = plain;
  if (format == WeightFormat::bf16) return;
  if (window_steps(spec) != 0) fail_usage("weights whose gradients are projected are written again: they stay in bf16");
  const bool adapted = !spec.adapter_config_json.empty();
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (adapter_part(tensor) == AdapterPart::initial_a)
        fail_usage("adapters that begin with factors of the base are added when its format is known, not before");
  for_each_base_weight(spec, [&](TensorSpec& tensor) {
    if (adapted && tensor.trainable) return;
    tensor.trainable = false;
    if (std::ranges::find(plain, tensor.name) == plain.end()) tensor.format = format;
  });
}

std::vector<std::string> plain_beside(const ModelSpec& spec, WeightFormat format, const Has& has) {
  std::vector<std::string> plain;
  bool any = false;
  for_each_base_weight(spec, [&](const TensorSpec& tensor) {
    const bool fits = has && has(tensor.name, format);
    any = any || fits;
    if (!fits) plain.push_back(tensor.name);
  });
  if (!any) {
    const WeightFormat own = own_format(spec, has);
    throw Exception(
        io::ErrorKind::usage,
        fmt::format("the model's folder has no weights in {}: nothing could be kept as it is{}", in_words(format),
                    own == WeightFormat::bf16 ? "" : fmt::format("; what it has is {}", weight_format_name(own))));
  }
  return plain;
}

WeightFormat own_format(const ModelSpec& spec, const Has& has) {
  WeightFormat found = WeightFormat::bf16;
  for (const WeightFormat format : {WeightFormat::mxfp4, WeightFormat::fp8, WeightFormat::fp8_rows})
    for_each_base_weight(spec, [&](const TensorSpec& tensor) {
      if (found == WeightFormat::bf16 && has && has(tensor.name, format)) found = format;
    });
  return found;
}

}  // namespace tierflow
