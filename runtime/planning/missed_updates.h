#pragma once
// The updates that sparse chunks (swap/layout.h) have missed, in which their gradient was zero, and what is needed to
// replay them later with the same bits.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "optim/adamw.h"
#include "runtime/spec/packing.h"
#include "swap/layout.h"

namespace tierflow {

// SessionOptions::embedding_part of the store with this identity.
std::uint64_t embedding_part_of(const std::string& identity);

// AdamW's settings, the same in every update of a run. seed: of stochastic rounding, mixed.
struct SteadyAdamW {
  float beta1 = 0.9F, beta2 = 0.999F, eps = 1e-8F, weight_decay = 0;
  std::uint64_t seed = 0;
  bool operator==(const SteadyAdamW&) const = default;
};

class MissedUpdates {
 public:
  // Begins after `updates` updates of the run, none of which any chunk has missed. The layout outlives this.
  MissedUpdates(const swap::Layout& layout, const SteadyAdamW& adamw, std::int64_t updates);
  // From the text that json() gave after `updates` updates of the run. Throws Exception (kind corruption) naming
  // `where` for any other text.
  MissedUpdates(const swap::Layout& layout, std::int64_t updates, const std::string& json, const std::string& where);

  // The run makes one more update, with this learning rate, which every sparse chunk misses until apply().
  void add(float lr);
  // From now on the chunk has had all updates.
  void apply(int chunk) { had_[chunk] = updates_; }
  bool missed(int chunk) const { return had_[chunk] < updates_; }
  std::int64_t count(int chunk) const { return updates_ - had_[chunk]; }
  bool any() const;
  const SteadyAdamW& adamw() const { return adamw_; }

  // Replays the chunk's missed updates on its hi words and state. each(n, work) must call work(i) for every i in [0,
  // n), in any order, and may do so on several threads.
  using Each = std::function<void(std::size_t count, const std::function<void(std::size_t)>& work)>;
  void replay(const PackedModel& model, const swap::Chunk& chunk, std::span<std::byte> words,
              std::span<std::byte> state, const Each& each) const;
  // A JSON object for the store's progress.
  std::string json() const;

 private:
  void forget_old();

  const swap::Layout* layout_;
  SteadyAdamW adamw_;
  std::int64_t updates_ = 0;
  std::vector<std::int64_t> had_;  // by chunk: how many updates it has had; only for sparse chunks
  std::vector<float> lr_;          // learning rates of the last updates: as many as any chunk has missed
};

}  // namespace tierflow
