#pragma once
// FRONT DOOR of stream. Parameters that stream, for computation in an order that the caller decides: Python modules, or
// the caller's own loop. The caller takes a turn for each module that it is about to run. During the turn, what
// followed it the last time is fetched. Throws Exception. For one thread at a time; waits sleep.
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
#include "runtime/state/memory_use.h"
#include "runtime/state/saved_parts.h"
#include "runtime/stream/stream_work.h"
#include "swap/executor.h"

namespace tierflow {

struct StreamerOptions {
  std::string device = "cpu";                  // "cpu", "cuda"
  std::uint64_t device_memory = 0;             // bytes
  double workspace_share = 0;                  // share of device_memory that is left to the caller's own tensors
  std::uint64_t host_memory = 0;               // bytes: streaming buffers and residency
  std::vector<std::filesystem::path> storage;  // empty: everything must fit the host budget
  io::EngineKind engine = io::EngineKind::automatic;
  bool allow_buffered = false, allow_any_filesystem = false;
  Precision precision = Precision::fp32_master_adam8;
  std::uint64_t seed = 0;            // of stochastic rounding
  int update_threads = 0;            // 0: as many as torch uses
  std::uint64_t chunk_elements = 0;  // 0: from the host budget
  std::uint64_t chaos_seed = 0;      // CPU device: delays and poison, for tests
  // The state lies in files of `storage` that have names, and outlives the process from the first commit() on. If a run
  // with the same units, precision, seed and `run` committed a state there, all of it is verified and the Streamer
  // resumes from it: see resumed(). Any other state there is refused. Budgets and the folders' place may differ.
  bool durable = false;
  bool go_back = false;  // resume from the generation before if the newest cannot be read
  std::string run;       // the client's JSON object: it must be equal to resume
};

// What a client adds to a commit of a durable Streamer.
struct StreamerCommit {
  std::int64_t step = 0;  // how many steps the state has had
  std::string
      beside;  // the client's own bytes; they go to a file beside the state, and are verified when they are read
};

// A tensor that save() writes besides the streamed ones; `values` is called just before it is written.
struct ExtraTensor {
  SavedPart as;
  torch::ScalarType type;
  std::function<torch::Tensor()> values;
};

class Streamer {
 public:
  // stages: for each module that takes turns, the units whose weights it needs. Every unit is in at least one of them.
  // say: hears that a state moves to other folders, or goes back a generation. stored: the bytes of frozen tensors in
  // unconverted formats.
  Streamer(
      std::vector<UnitSpec> units, std::vector<std::vector<int>> stages, const WeightSource& weights,
      StreamerOptions options, const Progress& progress = {}, const Say& say = [](const std::string&) {},
      const StoredSource& stored = {});
  ~Streamer();

  // Takes a turn of a stage, and waits for its weights: bf16, unit after unit, in UnitSpec order. They are views of
  // memory that is valid until leave(). Weights that are stored in other formats are made dense in torch's memory.
  // pass: forward, backward or evaluate. gradients: in a backward, which of the stage's units get gradients (only
  // trainable ones). gradients_stay: see swap::VisitRequest.
  Weights enter(int stage, swap::Pass pass, const std::vector<bool>& gradients, bool gradients_stay);
  // Between enter() and leave() of a backward turn, use one of collect(), add() and sums(). `leaves` are enter()'s
  // weights. collect(): each leaf's gradient is added to its sum as soon as autograd has completed it, and is then
  // freed.
  void collect(const Weights& leaves);
  // Adds the gradient of each weight; undefined: it has none.
  void add(const Gradients& gradients);
  // For computation that adds to the sums itself. Returns the fp32 sum of each of enter()'s weights that requires a
  // gradient, undefined for the others. Each returned sum counts as added to. Valid until leave().
  Gradients sums(const Weights& leaves);
  void leave();
  bool inside() const;
  // Whether an address lies in the memory that all turns use.
  bool owns(const void* address) const;

  // How many backward turns the unit's gradient sums up; 0 if it has none.
  int gradients_of(int unit) const;
  // Whether the tensor had a gradient in one of these turns.
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
  // The gradients of these units become owed updates, each of which runs ahead of its unit's next turn.
  void step(std::vector<std::pair<int, std::vector<TensorUpdate>>> updates);
  // Waits until no unit owes an update. Throws if an update did not reach every parameter that it was for.
  void finish_updates();

  // The tensor's values between turns, updates included. master: fp32; else bf16.
  torch::Tensor read(int unit, int tensor, bool master);
  // Overwrites the tensor's values, master included; moments stay. values: fp32, of the tensor's shape. Throws
  // Exception (kind usage) for a tensor of another format than bf16.
  void write(int unit, int tensor, const torch::Tensor& values);
  // Writes bf16 safetensors to `folder`, streamed, tensors in unit order, without a config.json. Returns the name of
  // the first streamed tensor that holds an infinity or a NaN; empty: none does. Throws Exception (kind usage) if a
  // tensor has another format than bf16.
  std::string save(const std::filesystem::path& folder, const SavedParts& parts, const std::vector<ExtraTensor>& extra,
                   std::uint64_t shard_bytes, const Progress& progress = {});

  // Writes weights, masters and moments of everything that is trained to one file, exactly, and reads them back
  // (stream_state.h). Call between steps: gradients are not in the file.
  void save_state(const std::filesystem::path& file, const Progress& progress = {});
  void load_state(const std::filesystem::path& file, const Progress& progress = {});

  // For a durable Streamer, between turns. Makes the present state durable, owed updates included: resident state that
  // has changed is written, then manifest and superblock, each flushed. Gradients are not part of it. The generation
  // before stays as it is until the call returns. After an error of the store every later commit is refused.
  void commit(const StreamerCommit& commit);
  // Commits what is trained, while the following turns run. When this call returns, only the file beside the state is
  // durable. An update waits before it overwrites what is being committed. There must have been a commit() before.
  // Waits for the end of the commit before.
  void begin_commit(const StreamerCommit& commit);
  // Waits until what begin_commit() began is durable. Between turns.
  void end_commit();
  // Whether export_committed() may run beside turns: the host budget has room for the two chunks that it reads into.
  bool exports_beside() const;
  // Writes the model of the newest commit as a folder (script_model.h); `beside` of that commit says how. It may run on
  // any thread, also while turns are taken, but no commit may begin until it returns. Returns the name of the first
  // streamed tensor that holds an infinity or a NaN; empty: none does. Throws Exception.
  std::string export_committed(const std::filesystem::path& folder, const Progress& progress = {}) const;
  // What the client added to the commit that this Streamer resumed from; nothing for a new state.
  const std::optional<StreamerCommit>& resumed() const;
  // Makes the Streamer remove its state when it ends, though it was committed.
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

// The bytes in each tier that a Streamer over these units would take. Nothing is made. Throws as the constructor does
// if the budgets are too small.
struct StreamerBytes {
  std::uint64_t parameters = 0, trainable_parameters = 0;
  std::uint64_t state_bytes = 0;     // weights and optimizer state
  std::uint64_t gradient_bytes = 0;  // staged gradients, without the sums' low words
  std::uint64_t device_bytes = 0, host_bytes = 0, storage_bytes = 0;
  double hi_resident = 0, state_resident = 0, gradient_resident = 0;  // shares
  // Bytes a step moves between storage and host: in layer-major order, and in a loop of `micro_batches` passes.
  std::uint64_t layer_major_read = 0, layer_major_write = 0, loop_read = 0, loop_write = 0;
  // The same between host and device.
  std::uint64_t layer_major_link = 0, loop_link = 0;
};
StreamerBytes streamer_bytes(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages,
                             const StreamerOptions& options, int micro_batches);

}  // namespace tierflow
