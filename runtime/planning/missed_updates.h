#pragma once
// The updates that sparse chunks (swap/layout.h) have missed: in each their gradient was zero. What is needed to replay
// them later, with the bits that they would have had in their turn.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "optim/adamw.h"
#include "runtime/spec/packing.h"
#include "swap/layout.h"

namespace tierflow {

// Whether the store with this identity has its token tables cut into sparse chunks.
bool cut_for_rows(const std::string& identity);

// Of AdamW, the same in every update of a run. seed: of stochastic rounding, mixed.
struct SteadyAdamW {
  float beta1 = 0.9F, beta2 = 0.999F, eps = 1e-8F, weight_decay = 0;
  std::uint64_t seed = 0;
  bool operator==(const SteadyAdamW&) const = default;
};

class MissedUpdates {
 public:
  // After so many updates of the run, none of which any chunk has missed. The layout outlives this.
  MissedUpdates(const swap::Layout& layout, const SteadyAdamW& adamw, std::int64_t updates);
  // What json() gave, of a run after so many updates. Throws Exception (kind corruption) naming `where` for anything
  // else.
  MissedUpdates(const swap::Layout& layout, std::int64_t updates, const std::string& json, const std::string& where);

  // The run makes one more update, with this learning rate, which every sparse chunk misses until apply().
  void add(float lr);
  // The chunk has had all updates.
  void apply(int chunk) { had_[chunk] = updates_; }
  bool missed(int chunk) const { return had_[chunk] < updates_; }
  std::int64_t count(int chunk) const { return updates_ - had_[chunk]; }
  bool any() const;
  const SteadyAdamW& adamw() const { return adamw_; }

  // Replays what the chunk has missed on its hi words and state. each(n, work) calls work(i) for i in [0, n), in any
  // order and at once if it likes.
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
  std::vector<std::int64_t> had_;  // by chunk: how many of them; counts for sparse chunks alone
  std::vector<float> lr_;          // of the last ones: as many as a chunk has missed
};

}  // namespace tierflow
