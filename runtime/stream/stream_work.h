#pragma once
// A Streamer's work on the update lane: norms tensor by tensor, fp32 sums of gradients, and AdamW with its own
// parameters for each tensor.
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/state/chunk_work.h"

namespace tierflow {

// How one tensor is updated.
struct TensorUpdate {
  bool active = false;  // false: the tensor and its moments stay as they are
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  std::int64_t step = 1;  // 1 for the tensor's first update
  double scale = 1;       // of the gradient
};

class StreamWork final : public ChunkWork {
 public:
  StreamWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads, std::uint64_t seed)
      : ChunkWork(model, layout, threads, seed), updates_(layout.units().size()) {}

  io::Error measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) override;
  io::Error accumulate(const swap::Chunk& chunk, std::span<const std::byte> incoming, std::span<std::byte> high,
                       std::span<std::byte> low, bool first) override;
  io::Error round_sum(const swap::Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low) override;
  io::Error update(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override;

  // The sum of squares of a tensor's gradient, rounded to bf16 as it is applied, in an order that no budget changes.
  // After the executor's finish_updates().
  double squares(int unit, int tensor) const;
  bool finite(int unit) const;
  // Sets what the unit's next update does, with an entry for each tensor. Call it before the update is planned.
  void set_updates(int unit, std::vector<TensorUpdate> updates);
  // Sets the progress for the commit that is planned next; the commit before must have ended.
  void set_progress(std::string progress) { progress_ = std::move(progress); }
  std::string progress() const override { return progress_; }
  // Elements that updates were asked for and that were updated, since the beginning.
  std::uint64_t asked() const { return asked_; }
  std::uint64_t updated() const { return updated_; }

 private:
  std::vector<std::vector<TensorUpdate>> updates_;  // by unit
  std::string progress_;
  std::uint64_t asked_ = 0;
  std::atomic<std::uint64_t> updated_ = 0;
};

// The fp32 sum with these words.
float sum_value(std::uint16_t high, std::uint16_t low);

}  // namespace tierflow
