#include "runtime/state/optimizer_work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>

#include "runtime/planning/update_scratch.h"

namespace tierflow {
namespace {

// Until the stream has done what it was given. A copy of memory that is not pinned would wait for that inside the
// driver, where other threads' copies and launches may have to wait with it.
io::Error wait_for(swap::Device& device, swap::StreamId stream) {
  return device.synchronize(device.record(stream));
}

}  // namespace

OptimizerWork::OptimizerWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads,
                             std::vector<bool> owed, bool skips_whole, optim::AdamWParams params,
                             optim::AdamWParams deferred_params, float weight_decay, std::uint64_t seed)
    : ChunkWork(model, layout, threads, seed),
      owed_(std::move(owed)),
      skips_whole_(skips_whole),
      params_(params),
      deferred_params_(deferred_params),
      weight_decay_(weight_decay) {}

io::Error OptimizerWork::measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) {
  // None where it was measured on the device.
  if (measured(chunk).squares.empty()) measure_pieces(chunk, segments_of(chunk), gradient);
  return check_finite(chunk);
}

void OptimizerWork::enqueue_measuring(const swap::Chunk& chunk, swap::Device& device, swap::StreamId stream,
                                      const std::uint16_t* gradient, std::byte* found) {
  device.enqueue(stream, [gradient, found, elements = chunk.elements,
                          &refused = measured(chunk).refused](const swap::DeviceQueue& queue) {
    try {
      measure_gradient(queue, gradient, elements, measured_of(elements), found);
    } catch (const std::exception& error) {
      refused = error.what();
    }
  });
}

// The sum of a segment with an element that is not finite is not finite; no other one's is so large.
io::Error OptimizerWork::take_measured(const swap::Chunk& chunk, std::span<const std::byte> found) {
  Measured& sums = measured(chunk);
  if (!sums.refused.empty()) return refused_by_device(chunk, sums.refused);
  sums.squares.resize(measured_of(chunk.elements).segments);
  std::memcpy(sums.squares.data(), found.data(), sums.squares.size() * sizeof(double));
  sums.finite = std::ranges::all_of(sums.squares, [](double sum) { return std::isfinite(sum); });
  return {};
}

io::Error OptimizerWork::keep_gradient(const swap::Chunk& chunk, swap::Device& device, const swap::DeviceUpdate& at) {
  constexpr auto on = swap::StreamId::update;
  std::vector<std::byte> found(measured_of(chunk.elements).bytes);
  device.round_gradient(on, at.gradient, at.sum, chunk.elements);
  enqueue_measuring(chunk, device, on, at.gradient, at.scratch);
  if (io::Error failed = wait_for(device, on)) return failed;
  device.copy_to_host(on, found.data(), at.scratch, found.size());
  if (io::Error failed = wait_for(device, on)) return failed;
  if (io::Error failed = take_measured(chunk, found)) return failed;
  return check_finite(chunk);
}

io::Error OptimizerWork::refused_by_device(const swap::Chunk& chunk, const std::string& detail) const {
  return {.kind = io::ErrorKind::io,
          .operation = "update on the device",
          .path = layout_.units()[chunk.unit].name,
          .detail = detail};
}

io::Error OptimizerWork::check_finite(const swap::Chunk& chunk) const {
  if (measured(chunk).finite || skip_ || skips_whole_) return {};
  return {.kind = io::ErrorKind::numeric,
          .operation = "update",
          .path = layout_.units()[chunk.unit].name,
          .detail =
              "a gradient is not finite, and without clipping other layers of this step are updated already: the "
              "state is torn; "
              "start again from the last export, with --clip, a lower --lr or a longer --warmup"};
}

bool OptimizerWork::take_owed(const swap::Chunk& chunk) {
  const bool owed = owed_[chunk.id];
  owed_[chunk.id] = false;
  return owed;
}

optim::AdamWParams OptimizerWork::params_of(bool deferred, const TensorPiece& piece) const {
  optim::AdamWParams params = deferred ? deferred_params_ : params_;
  params.weight_decay = piece.tensor->decays ? weight_decay_ : 0.0F;
  params.lr *= piece.tensor->lr_scale;
  return params;
}

io::Error OptimizerWork::update(const swap::Chunk& chunk, std::span<const std::byte> gradient,
                                std::span<std::byte> words, std::span<std::byte> state) {
  const bool deferred = take_owed(chunk);
  if (!deferred) {
    if (io::Error error = measure(chunk, gradient)) return error;
    if (skip_) return {};
  }
  (deferred ? updated_deferred_ : updated_) += update_pieces(
      chunk, gradient, words, state, [&](const TensorPiece& piece) { return params_of(deferred, piece); });
  return {};
}

io::Error OptimizerWork::catch_up(const swap::Chunk& chunk, std::span<std::byte> words, std::span<std::byte> state) {
  missed_->replay(model_, chunk, words, state,
                  [this](std::size_t count, const auto& work) { threads_.each(count, work); });
  ++caught_up_;
  return {};
}

io::Error OptimizerWork::update_on_device(const swap::Chunk& chunk, swap::Device& device,
                                          const swap::DeviceUpdate& at) {
  constexpr auto on = swap::StreamId::update;
  const bool deferred = take_owed(chunk);
  const std::vector<TensorPiece> pieces = !deferred && skip_ ? std::vector<TensorPiece>{} : pieces_of(model_, chunk);
  const UpdateScratch scratch(pieces.size(), chunk.elements);
  const optim::State state = state_view(format_of(chunk), chunk.elements, at.words, at.state);
  std::vector<std::byte> found(scratch.bytes);
  std::string refused;
  if (io::Error failed = wait_for(device, on)) return failed;
  device.copy_to_device(on, at.scratch, found.data(), found.size());
  if (at.sum != nullptr) device.round_gradient(on, at.gradient, at.sum, chunk.elements);
  device.enqueue(on, [&](const swap::DeviceQueue& queue) {
    const bool here = queue.device == swap::DeviceQueue::kHost;
    const optim::CudaStream there{.device = queue.device, .stream = queue.stream};
    optim::DeviceReport* reports = scratch.reports_at(at.scratch);
    try {
      if (!deferred) measure_gradient(queue, at.gradient, chunk.elements, scratch, at.scratch);
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const TensorPiece& piece = pieces[i];
        const optim::AdamWParams params = at_piece(params_of(deferred, piece), chunk, piece);
        const std::uint16_t* gradient = at.gradient + piece.in_chunk;
        const optim::State part = state_from(state, piece.in_chunk);
        if (here)
          reports[i].skipped = optim::adamw_update(params, gradient, part, piece.elements).skipped;
        else
          optim::adamw_update_on_device(params, gradient, part, part, piece.elements, reports + i, there);
      }
    } catch (const std::exception& error) {
      refused = error.what();
    }
  });
  if (io::Error failed = wait_for(device, on)) return failed;
  device.copy_to_host(on, found.data(), at.scratch, found.size());
  if (io::Error failed = wait_for(device, on)) return failed;
  if (!refused.empty()) return refused_by_device(chunk, refused);
  if (!deferred) {
    Measured& sums = measured(chunk);
    sums.squares.assign(scratch.sums_at(found.data()), scratch.sums_at(found.data()) + scratch.segments);
    sums.finite = *scratch.not_finite_at(found.data()) == 0;
    if (io::Error error = check_finite(chunk)) return error;
  }
  for (std::size_t i = 0; i < pieces.size(); ++i)
    (deferred ? updated_deferred_ : updated_) += pieces[i].elements - scratch.reports_at(found.data())[i].skipped;
  return {};
}

double OptimizerWork::gradient_norm() const {
  double sum = 0;
  for (const swap::Chunk& chunk : layout_.chunks())
    for (const double segment : measured(chunk).squares) sum += segment;
  return std::sqrt(sum);
}

bool OptimizerWork::finite() const {
  return std::ranges::all_of(layout_.chunks(), [&](const swap::Chunk& chunk) { return measured(chunk).finite; });
}

}  // namespace tierflow
