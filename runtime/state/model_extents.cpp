#include "runtime/state/model_extents.h"

#include <algorithm>
#include <cstring>

#include "optim/adamw.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kMasterElements = 1 << 16;  // handed on at once

}  // namespace

void widen_words(const std::uint16_t* hi, const std::uint16_t* lo, std::span<float> values) {
  if (lo != nullptr)
    optim::join_master(hi, lo, values.data(), values.size());
  else
    std::transform(hi, hi + values.size(), values.begin(), optim::float_from_bf16);
}

bool ModelExtents::has_low_words(const swap::Chunk& chunk) const {
  return has_state && chunk.changes() &&
         packed.units[chunk.unit].formats[chunk.group].master == optim::MasterFormat::split;
}

void read_words(const ModelExtents& model, int unit, int tensor, swap::ExtentKind kind, std::uint16_t* out) {
  model.for_each_part(unit, tensor, [&](const swap::Chunk& chunk, const TensorPiece& piece) {
    model.read(kind, chunk.id, [&](std::span<std::byte> bytes) {
      // The low words of the master come first in the state.
      const auto* words = reinterpret_cast<const std::uint16_t*>(bytes.data());
      std::copy_n(words + piece.in_chunk, piece.elements, out + piece.in_tensor);
    });
  });
}

void read_master(const ModelExtents& model, int unit, int tensor, const UseMaster& use) {
  const TensorSpec& spec = model.units[unit].tensors[tensor];
  std::vector<float> values(std::min<std::uint64_t>(kMasterElements, static_cast<std::uint64_t>(spec.elements())));
  // make(first, count) fills the values.
  const auto hand_on = [&](std::uint64_t elements, const auto& make) {
    for (std::uint64_t first = 0; first < elements; first += values.size()) {
      const std::uint64_t count = std::min<std::uint64_t>(values.size(), elements - first);
      make(first, count);
      use({values.data(), count});
    }
  };
  if (spec.format != WeightFormat::bf16 && spec.format != WeightFormat::fp32) {
    std::vector<std::uint16_t> stored(spec.words()), words(values.size());
    read_words(model, unit, tensor, swap::ExtentKind::hi, stored.data());
    hand_on(static_cast<std::uint64_t>(spec.elements()), [&](std::uint64_t first, std::uint64_t count) {
      dequantise(spec.format, spec.shape, std::as_bytes(std::span(stored)), first, {words.data(), count});
      std::transform(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(count), values.begin(),
                     optim::float_from_bf16);
    });
    return;
  }
  model.for_each_part(unit, tensor, [&](const swap::Chunk& chunk, const TensorPiece& piece) {
    model.read(swap::ExtentKind::hi, chunk.id, [&](std::span<std::byte> bytes) {
      const auto* hi = reinterpret_cast<const std::uint16_t*>(bytes.data()) + piece.in_chunk;
      if (spec.format == WeightFormat::fp32)  // two words each; a chunk begins at an even one
        return hand_on(piece.elements / 2, [&](std::uint64_t first, std::uint64_t n) {
          std::memcpy(values.data(), hi + 2 * first, n * sizeof(float));
        });
      const auto widen = [&](const std::uint16_t* lo) {
        hand_on(piece.elements, [&](std::uint64_t first, std::uint64_t n) {
          widen_words(hi + first, lo != nullptr ? lo + first : nullptr, {values.data(), n});
        });
      };
      if (!model.has_low_words(chunk)) return widen(nullptr);
      model.read(swap::ExtentKind::state, chunk.id, [&](std::span<std::byte> state) {
        widen(reinterpret_cast<const std::uint16_t*>(state.data()) + piece.in_chunk);
      });
    });
  });
}

}  // namespace tierflow
