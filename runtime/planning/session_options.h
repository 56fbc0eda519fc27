#pragma once
// What a session is asked for. No torch here: `tierflow plan` uses the same options without it.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/volume.h"
#include "runtime/spec/cache_shape.h"
#include "runtime/spec/loss_rule.h"
#include "runtime/spec/packing.h"

namespace tierflow {

// Of a session that clips and commits: whether a step runs its updates beside its backward, before its norm is known,
// and is undone where it clips (speculation.h): never; where it is likely not to clip; or whenever it can, for tests.
enum class Speculation : std::uint8_t { never, likely, always };

struct SessionOptions {
  std::string device = "cpu";                  // "cpu", "cuda"
  std::uint64_t device_memory = 0;             // bytes: weights, gradients, activations and workspace
  std::uint64_t host_memory = 0;               // bytes: streaming buffers and residency
  std::vector<std::filesystem::path> storage;  // empty: everything must fit the host budget
  io::EngineKind engine = io::EngineKind::automatic;
  bool allow_buffered = false, allow_any_filesystem = false;
  // The most bytes that a session may write to storage; 0: any number. A limit that loading and the first step would
  // exceed is refused. After that the client asks bytes_written_after_next_step().
  std::uint64_t write_limit = 0;
  std::function<void(const io::Notice&)>
      on_notice;  // hears what the drives report; called on a thread of theirs, must not block
  Precision precision = Precision::fp32_master_adam8;
  std::optional<double> clip = 1.0;  // global gradient norm; none: updates run beside the backward
  // Changes no bit; choose_placement() says where it is worth it.
  Speculation speculation = Speculation::never;
  // Without clip: the share of the updates that is deferred, each to run ahead of its own layer's next forward. Changes
  // no bit; choose_placement() finds the fastest.
  double deferred_share = 0;
  // The share of the units whose updates run on the device, as far as it has room. It also changes no bit.
  double device_update_share = 0;
  // What a GPU's memory is used for besides, where there is room: gradients are rounded and measured there on their way
  // to the host, and optimizer state stays there. None: on a GPU. Changes no bit.
  std::optional<bool> as_on_gpu;
  LossRule loss;  // of step()
  // How many of each position's most likely tokens an evaluation hands on (HeadScores).
  std::int64_t top = 0;
  std::int64_t micro_batch = 1;  // sequences in a micro-batch; of pairs an even number
  int micro_batches = 1;         // in a step
  std::int64_t sequence_length = 512;
  std::uint64_t seed = 0;  // of dropout and stochastic rounding
  // How many items (micro-batches of blocks) swap their activations to the host, and how many to storage, instead of
  // computing them again. Changes no bit; choose_placement() finds the fastest.
  int swap_to_host = 0, swap_to_storage = 0;
  int update_threads = 0;   // 0: as many as torch uses
  bool keep_store = false;  // make a store even if everything is resident: see commit() and export_store()
  // Steps from one commit to the next. A commit makes the state durable in `storage`, while the next step runs. Two
  // generations of the state lie there, and the state outlives the session. 0: only commit() commits, in place, but for
  // a state of two generations that is resumed: it keeps them.
  int commit_every = 0;
  // Commits may be rarer than commit_every says: commits then write at most a tenth of what the steps between them
  // write and visit of frozen words, but there is one at least every 50 steps. Where storage has no room for two
  // generations, commit_every counts as 0.
  bool commit_auto = false;
  // Go on with the state that a session with such commits left in `storage`, which is verified first. Budgets, engine
  // and update threads may differ; model, precision and `run` may not. Where the budgets need other chunks than the
  // state has, it is copied into them first.
  bool resume = false;
  bool go_back = false;              // to the generation before, where the newest cannot be read
  std::string run;                   // JSON object of the client's, in the store too: what has to be equal to go on
  std::string remembered;            // of a new run, as Session::remember(): with its first commit
  bool fresh = false;                // what an earlier session left in `storage` is removed
  bool train = true;                 // false: evaluate(), next_logits() and export alone
  bool fewer_micro_batches = false;  // as many as the budgets hold, micro_batches at most
  // Keys and values that host_memory holds, and where it cannot and nothing is trained storage. Empty: a generation's
  // lie in RAM beside the budget.
  CacheShape cache;
  std::uint64_t workspace = 0;  // bytes of the device that a stage takes beside what measuring it shows
  // 0: from the host budget. Of a state to go on with: what find_left_store() says of it, for choose_placement(); the
  // session looks for itself.
  std::uint64_t chunk_elements = 0;
  // Whether a step fetches and updates of an untied embedding only the parts that its tokens use, the others later with
  // the same bits; with `storage` alone. None: where the step's tokens are few (rows_pay()). Of a state to go on with
  // it is what the state was made with: as with chunk_elements, find_left_store() says so for choose_placement().
  std::optional<bool> rows_on_demand;
  std::uint64_t chaos_seed = 0;  // CPU device: delays and poison, for tests
  bool record = false;           // record when each task ran: see take_timeline()
};

// Micro-batches that stages take at once which compute several (StageSpec::together): as many as make products of full
// size, no more, because memory grows with them. Shapes alone decide.
inline constexpr std::int64_t kTokensTogether = 16384;
inline int micro_batches_together(const SessionOptions& options) {
  if (!options.train) return 1;
  const std::int64_t tokens = options.micro_batch * options.sequence_length, all = options.micro_batches;
  const std::int64_t most = std::clamp<std::int64_t>(kTokensTogether / std::max<std::int64_t>(tokens, 1), 1, all),
                     groups = (all + most - 1) / most;
  return static_cast<int>((all + groups - 1) / groups);
}

}  // namespace tierflow
