#pragma once
// FRONT DOOR of state, which a session and a streamer share: a model's weights and optimizer state in the places that
// an arrangement gives them. It loads, binds, reads, writes and exports them; it does not compute or update. Throws
// Exception.
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/spec/packing.h"
#include "runtime/state/chunk_work.h"
#include "runtime/state/model_extents.h"
#include "swap/executor.h"

namespace tierflow {

// name: "cpu", "cuda". chaos_seed: of the CPU device, for tests. Throws Exception.
std::unique_ptr<swap::Device> open_device(const std::string& name, std::uint64_t chaos_seed = 0);

class StreamedState {
 public:
  struct Options {
    std::string device = "cpu";  // "cpu", "cuda"
    bool train = true;           // false: only weights, without optimizer state
    int update_threads = 0;      // 0: as many as torch uses
    std::uint64_t chaos_seed = 0;
    bool record = false;  // see swap::ExecutorOptions
  };
  // store: null if everything is resident. Everything that the arguments refer to outlives this.
  StreamedState(const std::vector<UnitSpec>& units, const PackedModel& packed, const swap::Layout& layout,
                const swap::Arrangement& arrangement, swap::Store* store, const Options& options);

  swap::Executor& executor() { return *executor_; }
  const swap::Executor& executor() const { return *executor_; }
  UpdateThreads& threads() { return threads_; }
  const std::vector<UnitSpec>& units() const { return units_; }
  const PackedModel& packed() const { return packed_; }
  const swap::Layout& layout() const { return layout_; }

  // Between the executor's enter() and leave(): views of the weights of the visited stage, unit after unit in UnitSpec
  // order. bf16 weights have their shapes; weights of other formats are their stored bytes (uint8). Undefined if the
  // pass needs no weights.
  std::vector<torch::Tensor> weights(const swap::Entered& entered) const;
  // The same for only the units that this part of the visit needs on demand.
  std::vector<torch::Tensor> needed_weights(const swap::Entered& entered) const;
  // Views of the fp32 gradients of the visited stage, to add to. Undefined where the visit adds to none. If the visit
  // says that a unit's gradient is fresh, its memory may hold any bits.
  std::vector<torch::Tensor> gradients(const swap::Entered& entered) const;

  // Call all following functions between the executor's plans.

  // Loads every weight from `weights` and sets the moments to zero. Tensors that `stored` has in their own format are
  // copied from it as bytes, without conversion.
  void load(const WeightSource& weights, const StoredSource& stored, const Progress& progress);
  // After Store::resume(): verifies every weight and its state, and reads what is resident into memory.
  void restore(swap::Store& store, const Progress& progress);
  ModelExtents extents();
  // As read_words() and read_master() of model_extents.h.
  void read_words(int unit, int tensor, swap::ExtentKind kind, std::uint16_t* out);
  void read_master(int unit, int tensor, const UseMaster& use);
  // Overwrites weights and fp32 master; the moments stay.
  void write(int unit, int tensor, const float* values);
  // The same for the wanted tensors of a unit: `change` gets values of a tensor, fp32 masters or weights, from its
  // element `first` on, and changes them. Every extent of the unit that holds such values is read and written once.
  using Wanted = std::function<bool(int tensor)>;
  using Change = std::function<void(int tensor, std::uint64_t first, std::span<float> values)>;
  void rewrite(int unit, const Wanted& wanted, const Change& change);
  // The bf16 words of a chunk, for reading.
  void read_chunk(int chunk, const std::function<void(std::span<std::byte> words)>& use);

 private:
  // offsets: one for each of these units; kNowhere: its views are undefined.
  std::vector<torch::Tensor> weights(const swap::Entered& entered, const std::vector<int>& units,
                                     const std::uint64_t* offsets) const;
  std::vector<torch::Tensor> views(
      const swap::Entered& entered, const std::vector<int>& units, const std::uint64_t* offsets,
      const std::function<torch::Tensor(const TensorSpec&, const PackedTensor&, std::byte* unit)>& view) const;
  void load_chunk(int id, const WeightSource& weights, const StoredSource& stored);
  std::span<const std::uint16_t> stored_words(const TensorSpec& tensor, const WeightSource& weights,
                                              const StoredSource& stored);

  const std::vector<UnitSpec>& units_;
  const PackedModel& packed_;
  const swap::Layout& layout_;
  const swap::Arrangement& arrangement_;
  const bool train_;
  const torch::Device torch_device_;
  std::unique_ptr<swap::Device> device_;
  UpdateThreads threads_;
  std::vector<std::byte> stored_;  // while loading: the tensor in its format of which some words are still to come
  std::unique_ptr<swap::Executor> executor_;  // last: drains before the rest goes
};

// How the words of a chunk come to an export: of the first of `chunks`. The others it reads after that, in this order.
using ReadChunk =
    std::function<void(std::span<const int> chunks, const std::function<void(std::span<std::byte> words)>& use)>;

// Writes the bf16 words of every tensor that is wanted, in the order in which the units' chunks hold them; but a tile
// of a table comes right after the tile before, which ends its unit. Each chunk is read once, or twice in such a unit.
void write_weights(CheckpointWriter& writer, const std::vector<UnitSpec>& units, const PackedModel& packed,
                   const swap::Layout& layout, const std::function<bool(int unit, int tensor)>& wanted,
                   const ReadChunk& read, const char* phase, const Progress& progress);

}  // namespace tierflow
