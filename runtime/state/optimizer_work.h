#pragma once
// The update lane's work: norms and AdamW over chunks, cut over the lane's own threads.
#include <atomic>
#include <cstdint>
#include <memory>
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

// One step's work: the deferred updates of the step before, with `deferred_params`, and the step's own updates that are
// not deferred, with `params`.
class OptimizerWork final : public swap::HostWork {
 public:
  // deferred: by chunk; outlives this, as the others do. skips_whole: no update of a step runs before all its gradients
  // are measured. Then a gradient that is not finite only costs this step. Otherwise it is an error, because updates
  // that ran before it cannot be undone.
  OptimizerWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads,
                const std::vector<bool>& deferred, bool skips_whole, optim::AdamWParams params,
                optim::AdamWParams deferred_params, float weight_decay, std::uint64_t seed);

  io::Error measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) override;
  // Also measures if the update is not deferred: measure() is then never called.
  io::Error update(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override;
  io::Error update_on_device(const swap::Chunk& chunk, swap::Device& device, const swap::DeviceUpdate& at) override;

  // Call before the first gradient of this step: drops its updates, so that they leave state and weights as they are.
  // Deferred updates of the step before still run.
  void skip_updates() { skip_ = true; }
  // After the executor's finish_updates(). The norm of all gradients as applied (bf16), summed in an order that no cut
  // changes.
  double gradient_norm() const;
  bool finite() const { return finite_; }
  std::uint64_t updated_at_once() const { return updated_; }
  std::uint64_t updated_deferred() const { return updated_deferred_; }

 private:
  // Part of a tensor in a chunk, of at most so many elements.
  struct Piece {
    std::uint64_t in_chunk = 0, in_tensor = 0, elements = 0;
    int tensor = 0;
    bool decays = false;
  };
  std::vector<Piece> pieces_of(const swap::Chunk& chunk, std::uint64_t most) const;
  optim::AdamWParams params_of(const swap::Chunk& chunk, const Piece& piece) const;
  // An error if the chunk's gradient is not finite and the step cannot be skipped.
  io::Error check_finite(const swap::Chunk& chunk) const;
  int chunk_id(const swap::Chunk& chunk) const { return layout_.first_chunk(chunk.unit) + chunk.index; }

  const PackedModel& model_;
  const swap::Layout& layout_;
  UpdateThreads& threads_;
  const std::vector<bool>& deferred_;
  const bool skips_whole_;
  const optim::AdamWParams params_, deferred_params_;
  const float weight_decay_;
  const std::uint64_t seed_;
  std::vector<std::vector<double>> squares_;  // by chunk, a sum each optim::kNormSegment
  std::atomic<bool> skip_ = false;
  std::atomic<bool> finite_ = true;
  std::atomic<std::uint64_t> updated_ = 0, updated_deferred_ = 0;
};

}  // namespace tierflow
