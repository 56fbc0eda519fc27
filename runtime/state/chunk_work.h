#pragma once
// The work on a chunk that every kind of update has, on threads: the sums of its gradient's squares, and AdamW over the
// pieces of its tensors.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "optim/adamw.h"
#include "runtime/spec/packing.h"
#include "swap/executor.h"

namespace tierflow {

class UpdateThreads {
 public:
  explicit UpdateThreads(int threads);
  ~UpdateThreads();
  // Calls work(i) for i in [0, count) on the threads and returns when all are done.
  void each(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The model, the layout and the threads outlive this.
class ChunkWork : public swap::UpdateWork {
 public:
  ChunkWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads, std::uint64_t seed)
      : model_(model), layout_(layout), threads_(threads), seed_(seed), measured_(layout.chunks().size()) {}

 protected:
  // Elements of what one thread updates at a time.
  static constexpr std::uint64_t kUpdatedAtOnce = 64 * 1024;
  // Pieces of kNormSegment elements of the whole chunk, padding included.
  std::vector<TensorPiece> segments_of(const swap::Chunk& chunk) const;

  // The measurements of a chunk's gradient, for the pieces that were measured last.
  struct Measured {
    std::vector<TensorPiece> pieces;
    std::vector<double> squares;  // a sum each
    bool finite = true;
    std::string refused;  // why the device refused to measure; empty: it did not
  };
  Measured& measured(const swap::Chunk& chunk) { return measured_[chunk.id]; }
  const Measured& measured(const swap::Chunk& chunk) const { return measured_[chunk.id]; }
  // measure_piece: stores the sum of the piece's squares; returns false if an element is not finite.
  using MeasurePiece = std::function<bool(const TensorPiece& piece, double& squares)>;
  void measure_pieces(const swap::Chunk& chunk, std::vector<TensorPiece> pieces, const MeasurePiece& measure_piece);
  // The same for a bf16 gradient.
  void measure_pieces(const swap::Chunk& chunk, std::vector<TensorPiece> pieces, std::span<const std::byte> gradient);

  // AdamW over all pieces: how many elements were updated. params_of: nothing if the tensor and its moments stay as
  // they are; rounding key and first element are filled in.
  std::uint64_t update_pieces(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                              std::span<std::byte> state,
                              const std::function<std::optional<optim::AdamWParams>(const TensorPiece&)>& params_of);
  optim::AdamWParams at_piece(optim::AdamWParams params, const swap::Chunk& chunk, const TensorPiece& piece) const;
  const StateFormat& format_of(const swap::Chunk& chunk) const { return model_.units[chunk.unit].formats[chunk.group]; }

  const PackedModel& model_;
  const swap::Layout& layout_;
  UpdateThreads& threads_;

 private:
  const std::uint64_t seed_;
  std::vector<Measured> measured_;  // by chunk
};

}  // namespace tierflow
