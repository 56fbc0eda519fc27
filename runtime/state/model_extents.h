#pragma once
// Reads a model's tensors. Each is put together from the parts of it in the extents, wherever these lie.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/spec/packing.h"

namespace tierflow {

// Calls `use` with the bytes of an extent, for reading. Throws Exception.
using ReadExtent =
    std::function<void(swap::ExtentKind kind, int chunk, const std::function<void(std::span<std::byte> bytes)>& use)>;

// Everything that it refers to outlives this.
struct ModelExtents {
  const std::vector<UnitSpec>& units;
  const PackedModel& packed;
  const swap::Layout& layout;
  bool has_state = true;  // false: only weights
  ReadExtent read = {};

  // Whether the chunk's state holds the low words of a master.
  bool has_low_words(const swap::Chunk& chunk) const;
  // Calls use(chunk, TensorPiece) for each part of the tensor.
  template <class Use>
  void for_each_part(int unit, int tensor, Use use) const {
    for (const swap::Chunk& chunk : layout.chunks_of(unit))
      for (const TensorPiece& piece : pieces_of(packed, chunk))
        if (piece.tensor->tensor == tensor) use(chunk, piece);
  }
};

// Words as fp32: masters where there are low words, else (lo null) weights.
void widen_words(const std::uint16_t* hi, const std::uint16_t* lo, std::span<float> values);

// The 16-bit words of a tensor: its bf16 weights (hi), the low words of its fp32 master (state, where it is split), its
// gradient. out: as many as the tensor has elements.
void read_words(const ModelExtents& model, int unit, int tensor, swap::ExtentKind kind, std::uint16_t* out);
// Receives the next elements of a tensor.
using UseMaster = std::function<void(std::span<const float> values)>;
// Hands `use` the fp32 master, or the weights as fp32 where there is none: in order, each extent read once, and no more
// than 64 Ki elements in memory beside it. Of a weight in a format with blocks it holds all stored bytes while it
// reads.
void read_master(const ModelExtents& model, int unit, int tensor, const UseMaster& use);

}  // namespace tierflow
