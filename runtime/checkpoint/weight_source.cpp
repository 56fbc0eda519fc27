#include "runtime/checkpoint/weight_source.h"

#include <algorithm>

#include "runtime/base/exception.h"

namespace tierflow {

std::vector<std::byte> stored_weight(const TensorSpec& tensor, const StoredSource& stored,
                                     const std::function<void(std::uint64_t first, std::span<float> out)>& fill) {
  const bool whole = tensor.all_rows == 0;  // codes of several blocks a scale have no rows
  if (stored.has && (whole || is_unconverted(tensor.format)) && stored.has(tensor.name, tensor.format))
    return stored.read(tensor);
  if (is_unconverted(tensor.format))
    fail(io::ErrorKind::input, tensor.name,
         std::string("is not stored in ") + weight_format_name(tensor.format) + ": as such it cannot be kept");
  const auto elements = static_cast<std::uint64_t>(tensor.elements());
  std::vector<float> values(std::min(kQuantisedPiece, elements));
  Quantiser quantiser(tensor.format, tensor.shape);
  for (std::uint64_t first = 0; first < elements; first += values.size()) {
    const std::span<float> piece(values.data(), std::min<std::uint64_t>(values.size(), elements - first));
    fill(first, piece);
    try {
      quantiser.add(piece);
    } catch (const Exception& error) {
      fail(error.error().kind, tensor.name, error.error().detail);
    }
  }
  return quantiser.finish();
}

}  // namespace tierflow
