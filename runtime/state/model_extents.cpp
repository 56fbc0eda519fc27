#include "runtime/state/model_extents.h"

#include <algorithm>
#include <cstring>

#include "optim/adamw.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {

bool ModelExtents::has_low_words(const swap::Chunk& chunk) const {
  return has_state && chunk.trainable &&
         packed.units[chunk.unit].formats[chunk.group].master == optim::MasterFormat::split;
}

void read_words(const ModelExtents& model, int unit, int tensor, swap::ExtentKind kind, std::uint16_t* out) {
  model.for_each_part(
      unit, tensor,
      [&](const swap::Chunk& chunk, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
        model.read(kind, model.layout.first_chunk(unit) + chunk.index, [&](std::span<std::byte> bytes) {
          // The low words of the master come first in the state.
          std::copy_n(reinterpret_cast<const std::uint16_t*>(bytes.data()) + in_chunk, count, out + in_tensor);
        });
      });
}

void read_master(const ModelExtents& model, int unit, int tensor, float* out) {
  const TensorSpec& spec = model.units[unit].tensors[tensor];
  const auto elements = static_cast<std::size_t>(spec.elements());
  std::vector<std::uint16_t> hi(elements), lo(elements);
  if (spec.format == WeightFormat::bf16) {
    read_words(model, unit, tensor, swap::ExtentKind::hi, hi.data());
  } else {
    std::vector<std::uint16_t> stored(spec.words());
    read_words(model, unit, tensor, swap::ExtentKind::hi, stored.data());
    if (spec.format == WeightFormat::fp32) {
      std::memcpy(out, stored.data(), elements * sizeof(float));
      return;
    }
    dequantise(spec.format, spec.shape, std::as_bytes(std::span(stored)), 0, hi);
  }
  bool whole = true;
  model.for_each_part(unit, tensor,
                      [&](const swap::Chunk& chunk, auto...) { whole = whole && model.has_low_words(chunk); });
  if (!whole) {
    std::transform(hi.begin(), hi.end(), out, optim::float_from_bf16);
    return;
  }
  read_words(model, unit, tensor, swap::ExtentKind::state, lo.data());
  optim::join_master(hi.data(), lo.data(), out, elements);
}

}  // namespace tierflow
