#include "runtime/optimizer_work.h"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <cmath>

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

OptimizerWork::OptimizerWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads,
                             const std::vector<bool>& deferred, bool skips_whole, optim::AdamWParams params,
                             optim::AdamWParams deferred_params, float weight_decay, std::uint64_t seed)
    : model_(model),
      layout_(layout),
      threads_(threads),
      deferred_(deferred),
      skips_whole_(skips_whole),
      params_(params),
      deferred_params_(deferred_params),
      weight_decay_(weight_decay),
      seed_(seed) {
  squares_.resize(layout.chunks().size());
}

io::Error OptimizerWork::measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) {
  const auto* words = reinterpret_cast<const std::uint16_t*>(gradient.data());
  std::vector<double>& squares = squares_[chunk_id(chunk)];
  squares.assign((chunk.elements + optim::kNormSegment - 1) / optim::kNormSegment, 0.0);
  threads_.each(squares.size(), [&](std::size_t segment) {
    const std::uint64_t first = segment * optim::kNormSegment;
    if (!optim::gradient_norm_squared(
            words + first, std::min<std::uint64_t>(optim::kNormSegment, chunk.elements - first), &squares[segment]))
      finite_ = false;
  });
  if (finite_ || skip_ || skips_whole_) return {};
  return {.kind = io::ErrorKind::numeric,
          .operation = "update",
          .path = layout_.units()[chunk.unit].name,
          .detail =
              "a gradient is not finite, and without clipping other layers of this step are updated already: the "
              "state is torn; "
              "start again from the last export, with --clip, a lower --lr or a longer --warmup"};
}

io::Error OptimizerWork::update(const swap::Chunk& chunk, std::span<const std::byte> gradient,
                                std::span<std::byte> words, std::span<std::byte> state) {
  const bool deferred = deferred_[chunk_id(chunk)];
  if (!deferred) {
    if (io::Error error = measure(chunk, gradient)) return error;
    if (skip_) return {};
  }
  const PackedUnit& unit = model_.units[chunk.unit];
  const StateFormat& format = unit.formats[chunk.group];
  const auto* gradients = reinterpret_cast<const std::uint16_t*>(gradient.data());
  const optim::State view =
      state_view(format, chunk.elements, reinterpret_cast<std::uint16_t*>(words.data()), state.data());

  struct Piece {
    std::uint64_t in_chunk, in_tensor, elements;
    int tensor;
    bool decays;
  };
  std::vector<Piece> pieces;
  for_each_piece(
      unit, chunk,
      [&](const PackedTensor& tensor, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
        for (std::uint64_t at = 0; at < count; at += optim::kNormSegment)
          pieces.push_back({in_chunk + at, in_tensor + at, std::min<std::uint64_t>(optim::kNormSegment, count - at),
                            tensor.tensor, tensor.decays});
      });
  std::atomic<std::uint64_t>& updated = deferred ? updated_deferred_ : updated_;
  threads_.each(pieces.size(), [&](std::size_t index) {
    const Piece& piece = pieces[index];
    optim::AdamWParams params = deferred ? deferred_params_ : params_;
    params.weight_decay = piece.decays ? weight_decay_ : 0.0F;
    params.rounding_key = rounding_key(seed_, chunk.unit, piece.tensor);
    params.first_element = piece.in_tensor;
    updated += optim::adamw_update(params, gradients + piece.in_chunk, state_from(view, piece.in_chunk), piece.elements)
                   .updated;
  });
  return {};
}

double OptimizerWork::gradient_norm() const {
  double sum = 0;
  for (const std::vector<double>& chunk : squares_)
    for (const double segment : chunk) sum += segment;
  return std::sqrt(sum);
}

}  // namespace tierflow
