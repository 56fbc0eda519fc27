#include "runtime/stream/stream_work.h"

#include <algorithm>
#include <bit>

namespace tierflow {

float sum_value(std::uint16_t high, std::uint16_t low) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16 | low);
}

io::Error StreamWork::measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) {
  measure_pieces(chunk, pieces_of(model_, chunk, optim::kNormSegment), gradient);
  return {};
}

io::Error StreamWork::accumulate(const swap::Chunk& chunk, std::span<const std::byte> incoming,
                                 std::span<std::byte> high, std::span<std::byte> low, bool first) {
  const auto* added = reinterpret_cast<const std::uint16_t*>(incoming.data());
  auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
  auto* lower = reinterpret_cast<std::uint16_t*>(low.data());
  measure_pieces(chunk, pieces_of(model_, chunk, optim::kNormSegment), [&](const TensorPiece& piece, double& squares) {
    alignas(64) thread_local std::uint16_t rounded[optim::kNormSegment];
    for (std::uint64_t i = 0; i < piece.elements; ++i) {
      const std::uint64_t at = piece.in_chunk + i;
      const float sum = sum_value(upper[at], first ? std::uint16_t{0} : lower[at]) + sum_value(added[at], 0);
      const auto bits = std::bit_cast<std::uint32_t>(sum);
      upper[at] = static_cast<std::uint16_t>(bits >> 16);
      lower[at] = static_cast<std::uint16_t>(bits);
      rounded[i] = swap::gradient_to_bf16(sum);
    }
    return optim::gradient_norm_squared(rounded, piece.elements, &squares);
  });
  return {};
}

io::Error StreamWork::round_sum(const swap::Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low) {
  auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
  const auto* lower = reinterpret_cast<const std::uint16_t*>(low.data());
  const std::vector<TensorPiece> pieces = pieces_of(model_, chunk, kUpdatedAtOnce);
  threads_.each(pieces.size(), [&](std::size_t index) {
    const TensorPiece& piece = pieces[index];
    for (std::uint64_t at = piece.in_chunk; at < piece.in_chunk + piece.elements; ++at)
      upper[at] = swap::gradient_to_bf16(sum_value(upper[at], lower[at]));
  });
  return {};
}

io::Error StreamWork::update(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                             std::span<std::byte> state) {
  const std::vector<TensorUpdate>& updates = updates_[chunk.unit];
  updated_ +=
      update_pieces(chunk, gradient, words, state, [&](const TensorPiece& piece) -> std::optional<optim::AdamWParams> {
        const TensorUpdate& how = updates[piece.tensor->tensor];
        if (!how.active) return {};
        return optim::AdamWParams{.lr = static_cast<float>(how.lr),
                                  .beta1 = static_cast<float>(how.beta1),
                                  .beta2 = static_cast<float>(how.beta2),
                                  .eps = static_cast<float>(how.eps),
                                  .weight_decay = static_cast<float>(how.weight_decay),
                                  .step = how.step,
                                  .gradient_scale = static_cast<float>(how.scale)};
      });
  return {};
}

double StreamWork::squares(int unit, int tensor) const {
  double sum = 0;
  for (const swap::Chunk& chunk : layout_.chunks_of(unit)) {
    const Measured& found = measured(chunk);
    for (std::size_t i = 0; i < found.pieces.size(); ++i)
      if (found.pieces[i].tensor->tensor == tensor) sum += found.squares[i];
  }
  return sum;
}

bool StreamWork::finite(int unit) const {
  return std::ranges::all_of(layout_.chunks_of(unit), [&](const swap::Chunk& chunk) { return measured(chunk).finite; });
}

void StreamWork::set_updates(int unit, std::vector<TensorUpdate> updates) {
  for (const PackedTensor& tensor : model_.units[unit].tensors)
    if (updates[tensor.tensor].active) asked_ += tensor.elements;
  updates_[unit] = std::move(updates);
}

}  // namespace tierflow
