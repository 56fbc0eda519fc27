#include "runtime/state/chunk_work.h"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>

namespace tierflow {

struct UpdateThreads::Impl {
  explicit Impl(int threads) : arena(threads) {}
  tbb::task_arena arena;
};

UpdateThreads::UpdateThreads(int threads) : impl_(std::make_unique<Impl>(threads)) {}
UpdateThreads::~UpdateThreads() = default;

void UpdateThreads::each(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count == 1) return work(0);
  impl_->arena.execute([&] { tbb::parallel_for(std::size_t{0}, count, work); });
}

std::vector<TensorPiece> ChunkWork::segments_of(const swap::Chunk& chunk) const {
  std::vector<TensorPiece> segments;
  for (std::uint64_t at = 0; at < chunk.elements; at += optim::kNormSegment)
    segments.push_back({.in_chunk = at, .elements = std::min<std::uint64_t>(optim::kNormSegment, chunk.elements - at)});
  return segments;
}

void ChunkWork::measure_pieces(const swap::Chunk& chunk, std::vector<TensorPiece> pieces,
                               const MeasurePiece& measure_piece) {
  Measured& found = measured(chunk);
  found.pieces = std::move(pieces);
  found.squares.assign(found.pieces.size(), 0.0);
  std::atomic<bool> finite = true;
  threads_.each(found.pieces.size(), [&](std::size_t index) {
    if (!measure_piece(found.pieces[index], found.squares[index])) finite = false;
  });
  found.finite = finite;
}

void ChunkWork::measure_pieces(const swap::Chunk& chunk, std::vector<TensorPiece> pieces,
                               std::span<const std::byte> gradient) {
  const auto* words = reinterpret_cast<const std::uint16_t*>(gradient.data());
  measure_pieces(chunk, std::move(pieces), [&](const TensorPiece& piece, double& squares) {
    return optim::gradient_norm_squared(words + piece.in_chunk, piece.elements, &squares);
  });
}

optim::AdamWParams ChunkWork::at_piece(optim::AdamWParams params, const swap::Chunk& chunk,
                                       const TensorPiece& piece) const {
  params.rounding_key = rounding_key(seed_, chunk.unit, piece.tensor->tensor);
  params.first_element = piece.in_tensor;
  return params;
}

std::uint64_t ChunkWork::update_pieces(
    const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
    std::span<std::byte> state, const std::function<std::optional<optim::AdamWParams>(const TensorPiece&)>& params_of) {
  const std::vector<TensorPiece> pieces = pieces_of(model_, chunk, kUpdatedAtOnce);
  const auto* gradients = reinterpret_cast<const std::uint16_t*>(gradient.data());
  const optim::State view =
      state_view(format_of(chunk), chunk.elements, reinterpret_cast<std::uint16_t*>(words.data()), state.data());
  std::atomic<std::uint64_t> updated = 0;
  threads_.each(pieces.size(), [&](std::size_t index) {
    const TensorPiece& piece = pieces[index];
    const std::optional<optim::AdamWParams> params = params_of(piece);
    if (!params) return;
    const optim::State of_piece = state_from(view, piece.in_chunk);
    if (params->step == 1) {  // another optimizer may have left its own
      optim::zero_moment(of_piece.m, piece.elements, true);
      optim::zero_moment(of_piece.v, piece.elements, false);
    }
    updated +=
        optim::adamw_update(at_piece(*params, chunk, piece), gradients + piece.in_chunk, of_piece, piece.elements)
            .updated;
  });
  return updated;
}

}  // namespace tierflow
