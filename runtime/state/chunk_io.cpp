#include "runtime/state/chunk_io.h"

#include <algorithm>

#include "runtime/base/exception.h"

namespace tierflow {

void load_chunk(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed,
                const std::vector<UnitSpec>& units, int id, bool train, UpdateThreads& threads,
                const WeightSource& weights) {
  const swap::Chunk& chunk = layout.chunks()[id];
  const PackedUnit& unit = packed.units[chunk.unit];
  const UnitSpec& spec = units[chunk.unit];
  struct Piece {
    const TensorSpec* tensor;
    std::uint64_t in_tensor, in_chunk, elements;
  };
  std::vector<Piece> pieces;
  for_each_piece(unit, chunk,
                 [&](const PackedTensor& tensor, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
                   for (std::uint64_t at = 0; at < count; at += swap::kChunkQuantum)
                     pieces.push_back({&spec.tensors[tensor.tensor], in_tensor + at, in_chunk + at,
                                       std::min<std::uint64_t>(swap::kChunkQuantum, count - at)});
                 });
  const auto fill = [&](std::uint16_t* hi, std::uint16_t* lo) {
    threads.each(pieces.size(), [&](std::size_t index) {
      const Piece& piece = pieces[index];
      std::vector<float> values(piece.elements);
      weights(*piece.tensor, piece.in_tensor, values);
      if (lo != nullptr)
        return optim::split_master(values.data(), hi + piece.in_chunk, lo + piece.in_chunk, piece.elements);
      for (std::uint64_t i = 0; i < piece.elements; ++i) hi[piece.in_chunk + i] = optim::bf16_from_float(values[i]);
    });
  };
  io::Error inner;
  const io::Error outer = executor.access(swap::ExtentKind::hi, id, true, [&](std::span<std::byte> words) {
    std::fill(words.begin(), words.end(), std::byte{0});
    auto* hi = reinterpret_cast<std::uint16_t*>(words.data());
    if (!train || !chunk.trainable) return fill(hi, nullptr);
    inner = executor.access(swap::ExtentKind::state, id, true, [&](std::span<std::byte> state) {
      std::fill(state.begin(), state.end(), std::byte{0});
      const optim::State view = state_view(unit.formats[chunk.group], chunk.elements, hi, state.data());
      optim::zero_moment(view.m, chunk.elements, true);
      optim::zero_moment(view.v, chunk.elements, false);
      fill(hi, view.lo);
    });
  });
  throw_if(inner);
  throw_if(outer);
}

namespace {

// Calls use(chunk id, piece of the chunk) for each part of the tensor.
template <class Use>
void for_each_part(const swap::Layout& layout, const PackedModel& packed, int unit, int tensor, Use use) {
  for (const swap::Chunk& chunk : layout.chunks_of(unit))
    for_each_piece(
        packed.units[unit], chunk,
        [&](const PackedTensor& piece, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
          if (piece.tensor == tensor) use(chunk, in_tensor, in_chunk, count);
        });
}

}  // namespace

void read_words(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed, int unit, int tensor,
                swap::ExtentKind kind, std::uint16_t* out) {
  for_each_part(layout, packed, unit, tensor,
                [&](const swap::Chunk& chunk, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
                  const int id = layout.first_chunk(unit) + chunk.index;
                  throw_if(executor.access(kind, id, false, [&](std::span<std::byte> bytes) {
                    // The low words of the master come first in the state.
                    std::copy_n(reinterpret_cast<const std::uint16_t*>(bytes.data()) + in_chunk, count,
                                out + in_tensor);
                  }));
                });
}

void write_tensor(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed, int unit, int tensor,
                  const float* values) {
  for_each_part(layout, packed, unit, tensor,
                [&](const swap::Chunk& chunk, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
                  const int id = layout.first_chunk(unit) + chunk.index;
                  // An extent is written whole: what the tensor does not cover comes from a copy.
                  const auto rewrite = [&](swap::ExtentKind kind, const std::vector<std::uint16_t>& words) {
                    std::vector<std::byte> copy;
                    throw_if(executor.access(
                        kind, id, false, [&](std::span<std::byte> bytes) { copy.assign(bytes.begin(), bytes.end()); }));
                    std::copy(words.begin(), words.end(), reinterpret_cast<std::uint16_t*>(copy.data()) + in_chunk);
                    throw_if(executor.access(kind, id, true, [&](std::span<std::byte> bytes) {
                      std::copy_n(copy.begin(), bytes.size(), bytes.begin());
                    }));
                  };
                  const bool split =
                      chunk.trainable && packed.units[unit].formats[chunk.group].master == optim::MasterFormat::split;
                  std::vector<std::uint16_t> hi(count), lo(count);
                  if (split)
                    optim::split_master(values + in_tensor, hi.data(), lo.data(), count);
                  else
                    for (std::uint64_t i = 0; i < count; ++i) hi[i] = optim::bf16_from_float(values[in_tensor + i]);
                  rewrite(swap::ExtentKind::hi, hi);
                  if (split) rewrite(swap::ExtentKind::state, lo);
                });
}

}  // namespace tierflow
