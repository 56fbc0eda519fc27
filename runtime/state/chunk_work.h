#pragma once
// What every kind of update work does with a chunk: the pieces of its tensors, and AdamW over them on threads.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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

// Part of one tensor in a chunk. Offsets and lengths in elements.
struct TensorPiece {
  std::uint64_t in_chunk = 0, in_tensor = 0, elements = 0;
  int tensor = 0;
  bool decays = false;
  float lr_scale = 1;
};

// The model, the layout and the threads outlive this.
class ChunkWork : public swap::HostWork {
 public:
  ChunkWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads, std::uint64_t seed)
      : model_(model), layout_(layout), threads_(threads), seed_(seed) {}

 protected:
  // Pieces of at most `most` elements each. on_grid: they end at multiples of it from the beginning of the chunk too.
  std::vector<TensorPiece> pieces_of(const swap::Chunk& chunk, std::uint64_t most, bool on_grid) const;
  // AdamW over all pieces, on the threads: how many elements were updated. params_of: nothing where the tensor and its
  // moments stay as they are; rounding key and first element are filled in.
  std::uint64_t update_pieces(const swap::Chunk& chunk, const std::vector<TensorPiece>& pieces,
                              std::span<const std::byte> gradient, std::span<std::byte> words,
                              std::span<std::byte> state,
                              const std::function<std::optional<optim::AdamWParams>(const TensorPiece&)>& params_of);
  optim::AdamWParams at_piece(optim::AdamWParams params, const swap::Chunk& chunk, const TensorPiece& piece) const;
  const StateFormat& format_of(const swap::Chunk& chunk) const { return model_.units[chunk.unit].formats[chunk.group]; }
  int chunk_id(const swap::Chunk& chunk) const { return layout_.first_chunk(chunk.unit) + chunk.index; }

  const PackedModel& model_;
  const swap::Layout& layout_;
  UpdateThreads& threads_;

 private:
  const std::uint64_t seed_;
};

}  // namespace tierflow
