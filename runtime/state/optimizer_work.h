#pragma once
// A session's work on the update lane: the norm of all gradients, and AdamW over chunks, in this step or deferred to
// the next.
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/planning/missed_updates.h"
#include "runtime/state/chunk_work.h"

namespace tierflow {

// One step's work: the deferred updates of the step before, with `deferred_params`, and the step's own updates that are
// not deferred, with `params`.
class OptimizerWork final : public ChunkWork {
 public:
  // owed: by chunk, whether its first update is one that the step before deferred. skips_whole: no update of a step
  // runs before all its gradients are measured, or the step can be undone. Then a gradient that is not finite only
  // costs this step. Otherwise it is an error, because updates that ran before it cannot be undone.
  OptimizerWork(const PackedModel& model, const swap::Layout& layout, UpdateThreads& threads, std::vector<bool> owed,
                bool skips_whole, optim::AdamWParams params, optim::AdamWParams deferred_params, float weight_decay,
                std::uint64_t seed);

  io::Error measure(const swap::Chunk& chunk, std::span<const std::byte> gradient) override;
  // If the update is not deferred, it also measures the gradient; measure() is then never called.
  io::Error update(const swap::Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override;
  io::Error update_on_device(const swap::Chunk& chunk, swap::Device& device, const swap::DeviceUpdate& at) override;
  io::Error keep_gradient(const swap::Chunk& chunk, swap::Device& device, const swap::DeviceUpdate& at) override;
  void enqueue_measuring(const swap::Chunk& chunk, swap::Device& device, swap::StreamId stream,
                         const std::uint16_t* gradient, std::byte* found) override;
  io::Error take_measured(const swap::Chunk& chunk, std::span<const std::byte> found) override;
  io::Error catch_up(const swap::Chunk& chunk, std::span<std::byte> words, std::span<std::byte> state) override;

  // Before anything runs: how many parameters the updates have that the step before deferred, and what sparse chunks
  // have missed.
  void expect(std::uint64_t due_deferred, MissedUpdates missed) {
    due_deferred_ = due_deferred;
    missed_ = std::move(missed);
  }
  std::uint64_t due_deferred() const { return due_deferred_; }
  std::uint64_t caught_up() const { return caught_up_; }  // chunks
  // Says where gradients of this step are zeros, for zero_gradient(). The lane that moves them calls it.
  using Zeros = std::function<std::vector<swap::ElementRange>(const swap::Chunk& chunk)>;
  void set_zeros(Zeros zeros) { zeros_ = std::move(zeros); }
  std::vector<swap::ElementRange> zero_gradient(const swap::Chunk& chunk) const override {
    return zeros_ ? zeros_(chunk) : std::vector<swap::ElementRange>{};
  }
  // The progress for the commit that runs beside this step: that of the step before.
  void set_progress(std::string progress) { progress_ = std::move(progress); }
  std::string progress() const override { return progress_; }

  // Call before the first gradient of this step: drops its updates, so that they leave state and weights as they are.
  // Deferred updates of the step before still run.
  void skip_updates() { skip_ = true; }
  bool skips_updates() const { return skip_; }
  // After the executor's finish_updates(). The norm of all gradients as applied (bf16), summed in an order that no cut
  // changes.
  double gradient_norm() const;
  bool finite() const;
  std::uint64_t updated_at_once() const { return updated_; }
  std::uint64_t updated_deferred() const { return updated_deferred_; }

 private:
  // Whether the chunk's current update is the owed one; after this call it owes none.
  bool take_owed(const swap::Chunk& chunk);
  optim::AdamWParams params_of(bool deferred, const TensorPiece& piece) const;
  // An error if the chunk's gradient is not finite and the step cannot be skipped.
  io::Error check_finite(const swap::Chunk& chunk) const;
  io::Error refused_by_device(const swap::Chunk& chunk, const std::string& detail) const;

  std::vector<bool> owed_;  // by chunk; the update lane's alone
  const bool skips_whole_;
  const optim::AdamWParams params_, deferred_params_;
  const float weight_decay_;
  std::string progress_;
  Zeros zeros_;
  std::atomic<bool> skip_ = false;
  std::uint64_t due_deferred_ = 0;
  std::optional<MissedUpdates> missed_;
  std::atomic<std::uint64_t> updated_ = 0, updated_deferred_ = 0, caught_up_ = 0;
};

}  // namespace tierflow
