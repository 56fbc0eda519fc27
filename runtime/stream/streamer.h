#pragma once
// FRONT DOOR of stream. Parameters that stream, for computation in an order that the caller decides: modules of Python,
// or the caller's own loop. The caller takes a turn for each module that it is about to run. What followed that turn
// the last time is fetched meanwhile. Throws Exception. One thread at a time; waits sleep.
#include <torch/types.h>

#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/volume.h"
#include "runtime/base/progress.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/models/layered_model.h"
#include "runtime/planning/profile.h"
#include "runtime/state/memory_use.h"
#include "runtime/state/saved_parts.h"
#include "runtime/stream/stream_work.h"
#include "swap/executor.h"

namespace tierflow {

struct StreamerOptions {
  std::string device = "cpu";                  // "cpu", "cuda"
  std::uint64_t device_memory = 0;             // bytes
  double workspace_share = 0;                  // of it, left to the caller's own tensors
  std::uint64_t host_memory = 0;               // bytes: streaming buffers and residency
  std::vector<std::filesystem::path> storage;  // empty: everything must fit the host budget
  io::EngineKind engine = io::EngineKind::automatic;
  bool allow_buffered = false, allow_any_filesystem = false;
  Precision precision = Precision::fp32_master_adam8;
  std::uint64_t seed = 0;            // of stochastic rounding
  int update_threads = 0;            // 0: as many as torch uses
  std::uint64_t chunk_elements = 0;  // 0: from the host budget
  std::uint64_t chaos_seed = 0;      // CPU device: delays and poison, for tests
  // The state lies in files of `storage` that have names, and outlives the process from the first commit() on. What a
  // run with the same units, precision, seed and `run` committed there is gone on with, after all of it is verified:
  // see resumed(). Anything else that lies there is refused. Budgets and the folders' place may differ.
  bool durable = false;
  bool go_back = false;  // where the newest generation of that cannot be read, the one before it
  std::string run;       // JSON object of the client's: what else has to be equal to go on
};

// What a client adds to a commit of a durable Streamer.
struct StreamerCommit {
  std::int64_t step = 0;  // how many steps the state has
  std::string beside;     // bytes of its own, in a file beside the state, checked when they are read
};

// A tensor that save() writes besides the streamed ones; `values` is called just before it is written.
struct ExtraTensor {
  SavedPart as;
  torch::ScalarType type;
  std::function<torch::Tensor()> values;
};

class Streamer {
 public:
  // stages: for each module that runs on its own, the units whose weights it needs. Every unit is in at least one of
  // them. say: hears what became of a state that is gone on with: that it moves, and that it goes back a generation.
  // stored: has the bytes of frozen tensors in unconverted formats.
  Streamer(
      std::vector<UnitSpec> units, std::vector<std::vector<int>> stages, const WeightSource& weights,
      StreamerOptions options, const Progress& progress = {}, const Say& say = [](const std::string&) {},
      const StoredSource& stored = {});
  ~Streamer();

  // Takes a turn of a stage, and waits for its weights: bf16, unit after unit, in UnitSpec order. They are views of
  // memory that is valid until leave(). Those that are stored in other formats are made dense in torch's memory. pass:
  // forward, backward or evaluate. gradients: in a backward, which of the stage's units get gradients (only trainable
  // ones). gradients_stay: see swap::VisitRequest.
  Weights enter(int stage, swap::Pass pass, const std::vector<bool>& gradients, bool gradients_stay);
  // Between enter() and leave() of a backward turn: `leaves` are enter()'s weights. From now on, each leaf's gradient
  // is added to its sum as soon as autograd has completed it, and is then freed.
  void collect(const Weights& leaves);
  // The same by hand: the gradient of each weight, undefined where there is none.
  void add(const Gradients& gradients);
  // The same for computation that adds to the sums itself. Returns the fp32 sum for each of enter()'s weights that
  // requires a gradient, undefined for the others. Each returned sum counts as added to. Valid until leave().
  Gradients sums(const Weights& leaves);
  void leave();
  bool inside() const;
  // Whether an address is in memory that turns reuse.
  bool owns(const void* address) const;

  // How many backward turns the unit's gradient sums up; 0 if it has none.
  int gradients_of(int unit) const;
  // Whether the tensor had a gradient in one of them.
  bool touched(int unit, int tensor) const;
  // Waits. Sum of squares of the tensor's gradient as it will be applied (bf16), before scaling.
  double squares(int unit, int tensor);
  // Waits. Whether all of the unit's gradient is finite.
  bool finite(int unit);
  // fp32, before scaling. Between turns.
  torch::Tensor gradient(int unit, int tensor);
  // drop_gradient(): drops the gradient of a whole unit, also one that an interrupted step left incomplete. forget():
  // the tensor counts as without a gradient, so the next step() does not update it.
  void drop_gradient(int unit);
  void forget(int unit, int tensor);
  // The gradients of these units become updates, each ahead of its unit's next turn.
  void step(std::vector<std::pair<int, std::vector<TensorUpdate>>> updates);
  // Waits until no unit owes an update; throws where one did not reach every parameter it was asked for.
  void finish_updates();

  // The tensor's values between turns, updates included. master: fp32; else bf16.
  torch::Tensor read(int unit, int tensor, bool master);
  // Overwrites them, master included; moments stay. values: fp32, of the tensor's shape. Throws Exception (kind usage)
  // for a tensor of another format than bf16.
  void write(int unit, int tensor, const torch::Tensor& values);
  // Streamed safetensors in `folder`, tensors in unit order: bf16. No config.json. Returns the name of the first
  // streamed tensor that holds an infinity or no number; empty: none does. Throws Exception (kind usage) where one of
  // them has another format.
  std::string save(const std::filesystem::path& folder, const SavedParts& parts, const std::vector<ExtraTensor>& extra,
                   std::uint64_t shard_bytes, const Progress& progress = {});

  // Writes weights, masters and moments of everything that is trained to one file, exactly, and reads them back
  // (stream_state.h). Call between steps: gradients are not in the file.
  void save_state(const std::filesystem::path& file, const Progress& progress = {});
  void load_state(const std::filesystem::path& file, const Progress& progress = {});

  // Of a durable Streamer, between turns. Makes the present state durable, owed updates included: what is resident
  // and has changed is written, then manifest and superblock, each flushed. Gradients are not part of it. The
  // generation before stays as it is until the call returns. After an error of the store no later commit is taken.
  void commit(const StreamerCommit& commit);
  // The same beside the turns that follow, of what is trained: only what lies beside is durable when this returns. What
  // an update would overwrite of it waits. Follows a commit(), and ends the one before.
  void begin_commit(const StreamerCommit& commit);
  // Waits until what begin_commit() began is durable. Between turns.
  void end_commit();
  // Whether export_committed() may run beside turns: the host budget counts the two chunks that it reads into.
  bool exports_beside() const;
  // Writes the model of the newest commit as a folder (script_model.h); `beside` of that commit says how. On any
  // thread, also while turns go on, but no commit is begun until it returns. Returns the name of the first streamed
  // tensor that holds an infinity or no number; empty: none does. Throws Exception.
  std::string export_committed(const std::filesystem::path& folder, const Progress& progress = {}) const;
  // What came with the state that is gone on with; nothing for a new one.
  const std::optional<StreamerCommit>& resumed() const;
  // Removes the state when the Streamer ends, though it was committed.
  void discard();

  MemoryUse memory() const;
  std::array<swap::LaneCounters, swap::kLanes> lanes() const;
  std::optional<io::VolumeMode> storage_mode() const;
  std::uint64_t departures() const;  // turns that came in another order than the last time
  std::string describe() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What a Streamer over these units would arrange: bytes by tier, without making anything. Throws as the constructor
// does where the budgets are too small.
struct StreamerBytes {
  std::uint64_t parameters = 0, trainable_parameters = 0;
  std::uint64_t state_bytes = 0;     // weights and optimizer state
  std::uint64_t gradient_bytes = 0;  // staged gradients, without the sums' low words
  std::uint64_t device_bytes = 0, host_bytes = 0, storage_bytes = 0;
  double hi_resident = 0, state_resident = 0, gradient_resident = 0;  // shares
  // Bytes a step moves between storage and host: in layer-major order, and in a loop of `micro_batches` passes.
  std::uint64_t layer_major_read = 0, layer_major_write = 0, loop_read = 0, loop_write = 0;
  // And between host and device.
  std::uint64_t layer_major_link = 0, loop_link = 0;
};
StreamerBytes streamer_bytes(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages,
                             const StreamerOptions& options, int micro_batches);

}  // namespace tierflow
