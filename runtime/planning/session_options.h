#pragma once
// The options of a session. No torch here: `tierflow plan` uses the same options without it.
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

// Whether steps of a session that clips and commits are speculative (speculation.h): they run their updates beside
// their backward, before the norm is known, and are undone if it clips. likely: if a step will probably not clip.
// always: whenever it is possible, for tests.
enum class Speculation : std::uint8_t { never, likely, always };

struct SessionOptions {
  std::string device = "cpu";                  // "cpu", "cuda"
  std::uint64_t device_memory = 0;             // bytes: weights, gradients, activations and workspace
  std::uint64_t host_memory = 0;               // bytes: streaming buffers and residency
  std::vector<std::filesystem::path> storage;  // empty: everything must fit the host budget
  io::EngineKind engine = io::EngineKind::automatic;
  bool allow_buffered = false, allow_any_filesystem = false;
  // The most bytes that a session may write to storage; 0: any number. If loading and the first step would exceed the
  // limit, it is refused. After that the client checks Session::bytes_written_after_next_step().
  std::uint64_t write_limit = 0;
  std::function<void(const io::Notice&)>
      on_notice;  // hears what the drives report; called on a thread of theirs, must not block
  Precision precision = Precision::fp32_master_adam8;
  std::optional<double> clip = 1.0;  // global gradient norm; none: updates run beside the backward
  // Changes no bit; choose_placement() says whether it is faster.
  Speculation speculation = Speculation::never;
  // Without clip: the share of the updates that is deferred, each to run ahead of its own layer's next forward. Changes
  // no bit; choose_placement() finds the fastest.
  double deferred_share = 0;
  // The share of the units whose updates run on the device, as far as it has room. It also changes no bit.
  double device_update_share = 0;
  // Whether device memory that is left is used as on a GPU: gradients are rounded and measured there on their way to
  // the host, and optimizer state stays there. Absent: if the device is a GPU. Changes no bit.
  std::optional<bool> uses_spare_device_memory;
  LossRule loss;  // of step()
  // How many of each position's most likely tokens an evaluation hands on (HeadScores).
  std::int64_t top = 0;
  std::int64_t micro_batch = 1;  // sequences in a micro-batch; an even number for pairs
  int micro_batches = 1;         // in a step
  std::int64_t sequence_length = 512;
  std::uint64_t seed = 0;  // of dropout and stochastic rounding
  // How many items swap their activations to the host, and how many to storage, instead of computing them again.
  // Changes no bit; choose_placement() finds the fastest.
  int swap_to_host = 0, swap_to_storage = 0;
  int update_threads = 0;   // 0: as many as torch uses
  bool keep_store = false;  // make a store even if everything is resident: see commit() and export_store()
  // Steps from one commit to the next. A commit makes the state durable in `storage`, while the next step runs. Storage
  // then has two generations of the state, and the state outlives the session. 0: only commit() commits. It overwrites
  // the one generation; but a resumed state of two generations keeps both.
  int commit_every = 0;
  // Commits may be rarer than commit_every says. They then write at most a tenth of what the steps between them write
  // and of the frozen words that these steps read, but there is one at least every 50 steps. If storage has no room for
  // two generations, commit_every counts as 0.
  bool commit_auto = false;
  // Resume from the state that a session with commits left in `storage`, and verify it first. Budgets, engine and
  // update threads may differ; model, precision and `run` may not. If the budgets need another chunk size than the
  // state has, the state is first copied into such chunks.
  bool resume = false;
  bool go_back = false;              // resume from the generation before if the newest cannot be read
  std::string run;                   // the client's JSON object, kept in the store: it must be equal to resume
  std::string remembered;            // for a new run: goes with its first commit, as Session::remember()
  bool fresh = false;                // remove what an earlier session left in `storage`
  bool train = true;                 // false: only evaluate(), next_logits() and export
  bool fewer_micro_batches = false;  // as many micro-batches as the budgets hold, at most `micro_batches`
  // Keys and values that lie in host_memory, and, if that has no room, on storage. Empty: those of a generation lie in
  // RAM besides the budget.
  CacheShape cache;
  std::uint64_t workspace = 0;  // bytes of the device that a stage takes besides what measuring it shows
  // 0: chosen from the host budget. For a state to resume from, choose_placement() needs the state's own, which
  // find_left_store() tells; the session finds it out itself.
  std::uint64_t chunk_elements = 0;
  // Above 0: a step fetches and updates only those parts of an untied embedding that its tokens use, and the others
  // later, with the same bits. Each has so many elements, a multiple of swap::kSparseQuantum. Only with `storage`.
  // nullopt: embedding_part_for(). A resumed state keeps what it was made with; choose_placement() needs to be told
  // that, as with chunk_elements.
  std::optional<std::uint64_t> embedding_part;
  std::uint64_t chaos_seed = 0;  // CPU device: delays and poison, for tests
  bool record = false;           // record when each task ran: see take_timeline()
};

// How many micro-batches a stage with StageSpec::together takes at once: as many as make products of full size, and no
// more, because memory grows with them. Only shapes decide.
inline constexpr std::int64_t kTokensTogether = 16384;
inline int micro_batches_together(const SessionOptions& options) {
  if (!options.train) return 1;
  const std::int64_t tokens = options.micro_batch * options.sequence_length, all = options.micro_batches;
  const std::int64_t most = std::clamp<std::int64_t>(kTokensTogether / std::max<std::int64_t>(tokens, 1), 1, all),
                     groups = (all + most - 1) / most;
  return static_cast<int>((all + groups - 1) / groups);
}

}  // namespace tierflow
