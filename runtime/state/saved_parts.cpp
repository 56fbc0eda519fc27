#include "runtime/state/saved_parts.h"

#include <functional>
#include <numeric>

#include "runtime/base/exception.h"

namespace tierflow {

void expect_plain(const TensorSpec& tensor, const char* done) {
  if (tensor.format != WeightFormat::bf16)
    fail_usage(tensor.name + " is stored as " + weight_format_name(tensor.format) + ", which is not " + done +
               ": use base_precision=\"bf16\", or the model that it came from");
}

std::vector<TensorHeader> headers_of(const std::vector<UnitSpec>& units, const PackedModel& packed,
                                     const SavedParts& parts) {
  std::vector<TensorHeader> headers;
  for (std::size_t unit = 0; unit < units.size(); ++unit)
    for (const PackedTensor& tensor : packed.units[unit].tensors) {
      const TensorSpec& of = units[unit].tensors[tensor.tensor];
      std::uint64_t elements = 0;
      for (const SavedPart& part : parts.at(unit).at(tensor.tensor)) {
        headers.push_back({.name = part.name, .dtype = Dtype::bf16, .shape = part.shape});
        elements += std::accumulate(part.shape.begin(), part.shape.end(), std::uint64_t{1}, std::multiplies<>());
      }
      if (elements != 0) expect_plain(of, "saved");
      if (elements != 0 && elements != tensor.elements)
        fail_usage(of.name + " is saved in parts that are not the whole");
    }
  return headers;
}

}  // namespace tierflow
