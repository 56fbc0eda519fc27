#include "runtime/stream_work.h"

#include <algorithm>
#include <bit>

namespace tierflow {

float sum_value(std::uint16_t high, std::uint16_t low) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16 | low);
}

std::uint16_t round_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

StreamWork::StreamWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads, std::uint64_t seed)
    : model_(model), layout_(layout), threads_(threads), seed_(seed) {
  measured_.resize(layout.chunks().size());
  updates_.resize(layout.units().size());
}

// Segments lie on a grid that starts with the chunk's group, so that the pieces are the same however it is cut.
std::vector<StreamWork::Piece> StreamWork::pieces_of(const swap::Chunk& chunk) const {
  std::vector<Piece> pieces;
  for_each_piece(model_.units[chunk.unit], chunk,
                 [&](const PackedTensor& tensor, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
                   while (count != 0) {
                     const std::uint64_t part =
                         std::min<std::uint64_t>(count, optim::kNormSegment - in_chunk % optim::kNormSegment);
                     pieces.push_back({in_chunk, in_tensor, part, tensor.tensor});
                     in_chunk += part;
                     in_tensor += part;
                     count -= part;
                   }
                 });
  return pieces;
}

io::Error StreamWork::measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) {
  const auto* words = reinterpret_cast<const std::uint16_t*>(gradient.data());
  Measured& measured = measured_[chunk_id(chunk)];
  measured.pieces = pieces_of(chunk);
  measured.squares.assign(measured.pieces.size(), 0.0);
  std::atomic<bool> finite = true;
  threads_.each(measured.pieces.size(), [&](std::size_t index) {
    const Piece& piece = measured.pieces[index];
    if (!optim::gradient_norm_squared(words + piece.in_chunk, piece.elements, &measured.squares[index])) finite = false;
  });
  measured.finite = finite;
  return {};
}

io::Error StreamWork::accumulate(const swap::Chunk& chunk, std::span<const std::byte> incoming,
                                 std::span<std::byte> high, std::span<std::byte> low, bool first) {
  const auto* added = reinterpret_cast<const std::uint16_t*>(incoming.data());
  auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
  auto* lower = reinterpret_cast<std::uint16_t*>(low.data());
  Measured& measured = measured_[chunk_id(chunk)];
  measured.pieces = pieces_of(chunk);
  measured.squares.assign(measured.pieces.size(), 0.0);
  std::atomic<bool> finite = true;
  threads_.each(measured.pieces.size(), [&](std::size_t index) {
    const Piece& piece = measured.pieces[index];
    alignas(64) thread_local std::uint16_t rounded[optim::kNormSegment];
    for (std::uint64_t i = 0; i < piece.elements; ++i) {
      const std::uint64_t at = piece.in_chunk + i;
      const float sum = sum_value(upper[at], first ? std::uint16_t{0} : lower[at]) + sum_value(added[at], 0);
      const auto bits = std::bit_cast<std::uint32_t>(sum);
      upper[at] = static_cast<std::uint16_t>(bits >> 16);
      lower[at] = static_cast<std::uint16_t>(bits);
      rounded[i] = round_to_bf16(sum);
    }
    if (!optim::gradient_norm_squared(rounded, piece.elements, &measured.squares[index])) finite = false;
  });
  measured.finite = finite;
  return {};
}

io::Error StreamWork::round_sum(const swap::Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low) {
  auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
  const auto* lower = reinterpret_cast<const std::uint16_t*>(low.data());
  const std::vector<Piece> pieces = pieces_of(chunk);
  threads_.each(pieces.size(), [&](std::size_t index) {
    const Piece& piece = pieces[index];
    for (std::uint64_t at = piece.in_chunk; at < piece.in_chunk + piece.elements; ++at)
      upper[at] = round_to_bf16(sum_value(upper[at], lower[at]));
  });
  return {};
}

io::Error StreamWork::update(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                             std::span<std::byte> state) {
  const StateFormat& format = model_.units[chunk.unit].formats[chunk.group];
  const auto* gradients = reinterpret_cast<const std::uint16_t*>(gradient.data());
  const optim::State view =
      state_view(format, chunk.elements, reinterpret_cast<std::uint16_t*>(words.data()), state.data());
  const std::vector<TensorUpdate>& updates = updates_[chunk.unit];
  const std::vector<Piece> pieces = pieces_of(chunk);
  const std::uint64_t moment_bytes = format.moments == optim::MomentFormat::block8 ? 1 : 4;
  threads_.each(pieces.size(), [&](std::size_t index) {
    const Piece& piece = pieces[index];
    const TensorUpdate& how = updates[piece.tensor];
    if (!how.active) return;
    const auto shifted = [&](optim::Moment moment) {
      moment.values = static_cast<std::byte*>(moment.values) + piece.in_chunk * moment_bytes;
      if (moment.absmax != nullptr) moment.absmax += piece.in_chunk / optim::kBlock;
      return moment;
    };
    const optim::AdamWParams params{.lr = static_cast<float>(how.lr),
                                    .beta1 = static_cast<float>(how.beta1),
                                    .beta2 = static_cast<float>(how.beta2),
                                    .eps = static_cast<float>(how.eps),
                                    .weight_decay = static_cast<float>(how.weight_decay),
                                    .step = how.step,
                                    .gradient_scale = static_cast<float>(how.scale),
                                    .rounding_key = seed_ ^ (static_cast<std::uint64_t>(chunk.unit) << 32 |
                                                             static_cast<std::uint64_t>(piece.tensor)),
                                    .first_element = piece.in_tensor};
    const optim::State part{.master = view.master,
                            .hi = view.hi + piece.in_chunk,
                            .lo = view.lo == nullptr ? nullptr : view.lo + piece.in_chunk,
                            .m = shifted(view.m),
                            .v = shifted(view.v)};
    updated_ += optim::adamw_update(params, gradients + piece.in_chunk, part, piece.elements).updated;
  });
  return {};
}

double StreamWork::squares(int unit, int tensor) const {
  double sum = 0;
  for (const swap::Chunk& chunk : layout_.chunks_of(unit)) {
    const Measured& measured = measured_[chunk_id(chunk)];
    for (std::size_t i = 0; i < measured.pieces.size(); ++i)
      if (measured.pieces[i].tensor == tensor) sum += measured.squares[i];
  }
  return sum;
}

bool StreamWork::finite(int unit) const {
  const auto chunks = layout_.chunks_of(unit);
  return std::all_of(chunks.begin(), chunks.end(),
                     [&](const swap::Chunk& chunk) { return measured_[chunk_id(chunk)].finite; });
}

void StreamWork::set_updates(int unit, std::vector<TensorUpdate> updates) {
  for (const PackedTensor& tensor : model_.units[unit].tensors)
    if (updates[tensor.tensor].active) asked_ += tensor.elements;
  updates_[unit] = std::move(updates);
}

}  // namespace tierflow
