#include "runtime/planning/session_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/planning/loading.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/planning/update_scratch.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/token_tables.h"
#include "runtime/spec/unit_list.h"

namespace tierflow {
namespace {

// By chunk, whether it holds what is trained of a window, which the next one sets to zero.
std::vector<bool> chunks_with_window_factors(const ModelSpec& spec, const SessionPlan& plan, bool windows) {
  std::vector<bool> found(plan.layout->chunks().size(), false);
  if (!windows) return found;
  for (const swap::Chunk& chunk : plan.layout->chunks())
    for (const TensorPiece& piece : pieces_of(plan.packed, chunk)) {
      const TensorSpec& of = spec.units[chunk.unit].tensors[piece.tensor->tensor];
      if (of.trainable && of.rewritten != Rewritten::never) found[chunk.id] = true;
    }
  return found;
}

WriteCost count_writes(const SessionPlan& plan, const SessionOptions& options,
                       const std::vector<bool>& holds_window_factor) {
  WriteCost writes;
  const swap::Arrangement& at = plan.arrangement;
  const std::uint64_t sparse = plan.layout->sparse_chunks().size();
  for (std::size_t id = 0; id < plan.layout->chunks().size(); ++id) {
    const swap::Chunk& chunk = plan.layout->chunks()[id];
    const bool trained = options.train && chunk.trainable;
    // In a step: of sparse chunks those that it uses, and those that wait from the step before or catch up.
    const auto in_step = [&](std::uint64_t bytes, std::uint64_t times) {
      return chunk.sparse ? bytes * std::min<std::uint64_t>(times * plan.sparse_used, sparse) / sparse : bytes;
    };
    const auto extent = [&](bool resident, std::uint64_t bytes, bool updated) {
      // Frozen words are committed once, before the first step, where commits come beside the steps.
      (resident && (trained || plan.commit_every == 0) ? writes.commit : writes.load) += bytes;
      if (resident || !updated) return;
      writes.update += in_step(bytes, 2);
      if (at.deferred[id]) writes.deferred += in_step(bytes, 1);
      if (chunk.sparse) writes.sparse += bytes;
    };
    extent(at.hi_resident[id], chunk.word_bytes(), trained);
    if (options.train && chunk.rewritten) {
      if (chunk.state_bytes != 0) extent(at.state_resident[id], chunk.state_bytes, false);
      const bool commits = plan.commit_every != 0;
      if (commits || !at.hi_resident[id]) writes.window += chunk.word_bytes();
      if (commits || !at.state_resident[id]) writes.window += chunk.state_bytes;
    }
    if (!trained) continue;
    if (holds_window_factor[id] && !at.hi_resident[id]) writes.window += chunk.word_bytes();
    if (holds_window_factor[id] && !at.stays(swap::ExtentKind::state, chunk.id)) writes.window += chunk.state_bytes;
    extent(at.stays(swap::ExtentKind::state, chunk.id), chunk.state_bytes, true);
    if (at.deferred[id] && !at.stays(swap::ExtentKind::gradient, chunk.id))
      writes.gradients += in_step(chunk.word_bytes(), 1);
  }
  for (const std::uint64_t bytes : at.stored_activations()) writes.activations += bytes;
  if (!options.keep_store && plan.commit_every == 0) writes.commit = 0;
  return writes;
}

// With what the client wants for itself.
ComputeNeeds with_workspace(ComputeNeeds needs, const SessionOptions& options) {
  needs.stage_peak += options.workspace;
  return needs;
}

// An evaluation has what a step sets aside for saved inputs and kept activations: each further micro-batch there saves
// a pass over the weights.
constexpr int kMostEvaluated = 32;  // more hide nothing that these do not
int evaluated_at_once(const SessionOptions& options, const swap::Arrangement& at, const ComputeNeeds& needs) {
  const std::uint64_t taken = at.device_bytes() + needs.device_fixed + needs.workspace(0);
  const std::uint64_t room = options.device_memory - std::min(options.device_memory, taken);
  const std::uint64_t fit =
      std::min<std::uint64_t>(kMostEvaluated, room / std::max<std::uint64_t>(1, needs.micro_batch_bytes));
  return std::max(options.micro_batches, static_cast<int>(fit));
}

std::uint64_t tokens_in_step(const SessionOptions& options) {
  return static_cast<std::uint64_t>(options.micro_batch * options.micro_batches * options.sequence_length);
}

// Steps, as SessionOptions::commit_auto says.
int commit_interval(const WriteCost& writes, const swap::Layout& layout, const swap::Arrangement& at) {
  constexpr int kMost = 50;
  constexpr std::uint64_t kMemory = 3;  // times as fast as storage, at least
  std::uint64_t step = writes.step();
  for (std::size_t id = 0; id < layout.chunks().size(); ++id) {
    const swap::Chunk& chunk = layout.chunks()[id];
    // Frozen words are visited forward and backward.
    if (!chunk.trainable) step += 2 * chunk.word_bytes() / (at.hi_resident[id] ? kMemory : 1);
  }
  if (writes.commit > step * kMost / 10) return kMost;
  return static_cast<int>(std::max<std::uint64_t>(1, step == 0 ? 1 : (10 * writes.commit + step - 1) / step));
}

}  // namespace

std::uint64_t ComputeNeeds::workspace(int micro_batches) const {
  return stage_peak + stage_peak / 8 + micro_batches * micro_batch_bytes + (std::uint64_t{4} << 20);
}

std::uint64_t ComputeNeeds::swap_workspace() const {
  const std::uint64_t more = keeping_peak - std::min(keeping_peak, stage_peak);
  return more + more / 8;
}

std::uint64_t ComputeNeeds::expected(const swap::Arrangement& arrangement) const {
  const bool swaps = arrangement.count(swap::Activations::swap) != 0;
  return std::max({held_peak, stage_peak, swaps ? keeping_peak : 0}) +
         (arrangement.micro_batches - 1) * micro_batch_bytes;
}

std::uint64_t embedding_part_for(const ModelSpec& spec, const SessionOptions& options) {
  constexpr std::uint64_t kElementsForToken = 131072, kMostParts = 70'000;
  if (!options.train || options.storage.empty() || !spec.adapter_config_json.empty()) return 0;
  std::uint64_t elements = 0, columns = 0;
  for (const TokenTable& table : token_tables(spec)) {
    elements += static_cast<std::uint64_t>(table.rows * table.columns);
    columns = static_cast<std::uint64_t>(table.columns);
  }
  if (tokens_in_step(options) >= elements / kElementsForToken) return 0;
  std::uint64_t part = std::max(columns / swap::kSparseQuantum * swap::kSparseQuantum, swap::kSparseQuantum);
  while (part < swap::kChunkQuantum && elements / part > kMostParts) part += swap::kSparseQuantum;
  return std::min(part, swap::kChunkQuantum);
}

static_assert(swap::kSparseQuantum % optim::kNormSegment == 0, "the norm has the same bits however a table is cut");

swap::SparseChunks expected_sparse_chunks(const SessionPlan& plan, int step, bool pending) {
  const std::vector<int>& sparse = plan.layout->sparse_chunks();
  if (sparse.empty()) return {};
  const std::vector<bool> none(plan.layout->chunks().size(), false);
  swap::SparseChunks chunks{.used = none, .missed = none, .waiting = none};
  const std::size_t turns = std::max<std::size_t>(1, sparse.size() / std::max<std::size_t>(1, plan.sparse_used)),
                    turn = static_cast<std::size_t>(step) % turns;
  for (std::size_t i = 0; i < sparse.size(); ++i) {
    chunks.used[sparse[i]] = i % turns == turn;
    chunks.waiting[sparse[i]] = pending && plan.arrangement.deferred[sparse[i]] && (i + 1) % turns == turn % turns;
    chunks.missed[sparse[i]] = turns > 1 && step > 0 && chunks.used[sparse[i]];
  }
  return chunks;
}

namespace {

SessionPlan arrange_again(const SessionPlan& other, const ModelSpec& spec, const SessionOptions& options,
                          const ComputeNeeds& measured);

// The session without its keys and values.
SessionPlan arrange_first(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs) {
  SessionPlan plan{
      .packed = pack(spec, options.precision, options.embedding_part.value_or(embedding_part_for(spec, options))),
      .workspace = with_workspace(needs, options).workspace(options.micro_batches),
      .loading = options.resume ? 0 : loading_bytes(spec)};  // a state that is there needs no first values
  const bool windows = options.train && window_steps(spec) != 0;
  if (windows || (options.train && !options.resume)) plan.workspace += gradient_bytes(spec);
  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : plan.packed.units) shapes.push_back(unit.shape);
  std::vector<swap::StageShape> stages = plan.packed.stages;
  for (std::size_t stage = 1; stage < stages.size(); ++stage)
    if (spec.stages[stage].backward_needs_input) stages[stage].carry_bytes = needs.carry_bytes.at(stage);
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    if (spec.stages[stage].together) stages[stage].together = micro_batches_together(options);
  plan.layout = std::make_shared<swap::Layout>(std::move(shapes), std::move(stages),
                                               options.chunk_elements != 0
                                                   ? options.chunk_elements
                                                   : chunk_elements_for(options.host_memory - needs.host_fixed));
  if (windows) plan.loading = std::max(plan.loading, window_bytes(spec, *plan.layout));
  return arrange_again(plan, spec, options, needs);
}

SessionPlan arrange_again(const SessionPlan& other, const ModelSpec& spec, const SessionOptions& options,
                          const ComputeNeeds& measured) {
  const ComputeNeeds needs = with_workspace(measured, options);
  SessionPlan plan{
      .packed = other.packed, .layout = other.layout, .workspace = other.workspace, .loading = other.loading};
  // Beside the steps; where there is no room it waits for the end of one.
  const bool can_wait = options.train && !options.storage.empty() && options.commit_every != 0 &&
                        spec.adapter_config_json.empty() && spec.base_format == WeightFormat::bf16;
  plan.exporting = can_wait ? 2 * plan.layout->max_word_bytes() : turned_factor_bytes(spec, 1);
  const bool uses_spare_device_memory = options.uses_spare_device_memory.value_or(options.device == "cuda");
  swap::ArrangeRequest request{
      .host_budget = options.host_memory,
      .host_workspace = needs.host_fixed + std::max(plan.loading, plan.exporting),
      .device_budget = options.device_memory,
      .workspace = plan.workspace + needs.device_fixed,
      .evaluation_workspace = static_cast<std::uint64_t>(std::max(0, kMostEvaluated - options.micro_batches)) *
                              (options.train ? needs.micro_batch_bytes : 0),
      .activation_bytes = needs.activation_bytes,
      .swapped_bytes = needs.swapped_bytes,
      .swap_workspace = needs.swap_workspace(),
      .swap_to_host = options.swap_to_host,
      .swap_to_storage = options.swap_to_storage,
      .micro_batches = options.micro_batches,
      .staged = options.clip.has_value(),
      .deferred_share = options.deferred_share,
      .device_update_share = options.device_update_share,
      .update_scratch = update_scratch_bytes(plan.packed, *plan.layout),
      .gradient_slots = uses_spare_device_memory,
      .measured_bytes = measured_bytes(*plan.layout),
      .state_on_device = uses_spare_device_memory,
      .storage = !options.storage.empty(),
      .train = options.train};
  auto arranged = swap::arrange(*plan.layout, request);
  if (!arranged.ok() && can_wait && plan.exporting > plan.loading) {
    plan.exporting = 0;
    request.host_workspace = needs.host_fixed + plan.loading;
    arranged = swap::arrange(*plan.layout, request);
  }
  plan.arrangement = value_or_throw(std::move(arranged));
  const std::vector<int>& sparse = plan.layout->sparse_chunks();
  if (!sparse.empty()) {  // some rows lie in two chunks
    const std::uint64_t tokens = tokens_in_step(options), part = plan.layout->sparse_elements(),
                        columns = static_cast<std::uint64_t>(token_tables(spec).front().columns);
    plan.sparse_used = std::min<std::uint64_t>(sparse.size(), tokens + tokens * columns / part);
  }
  plan.evaluated_at_once = evaluated_at_once(options, plan.arrangement, needs);
  plan.head_scores_first = options.loss.pairs();
  plan.references_too = options.train && options.loss.computes_reference();
  plan.commit_every = options.storage.empty() || !options.train ? 0 : options.commit_every;
  const bool windows = options.train && window_steps(spec) != 0;
  plan.writes = count_writes(plan, options, chunks_with_window_factors(spec, plan, windows));
  if (plan.commit_every != 0 && options.commit_auto)
    plan.commit_every = commit_interval(plan.writes, *plan.layout, plan.arrangement);
  plan.speculates = options.speculation != Speculation::never && plan.arrangement.staged && plan.commit_every != 0 &&
                    !windows && !begins_with_gradient(spec);
  for (const swap::Chunk& chunk : plan.layout->chunks()) {
    const std::uint64_t parameters = parameters_in(plan.packed, chunk);
    if (plan.arrangement.deferred[chunk.id]) plan.deferred_parameters += parameters;
    if (plan.arrangement.on_device[chunk.id]) plan.device_updated_parameters += parameters;
    if (plan.arrangement.device_place(swap::ExtentKind::state, chunk.id) != swap::kNowhere)
      plan.device_state_parameters += parameters;
  }
  plan.stored =
      plan.writes.load + plan.writes.activations != 0 || options.keep_store || plan.commit_every != 0 || options.resume;
  return plan;
}

// What `plan` makes of these needs, with room for these keys and values.
template <class Plan>
SessionPlan beside(const CachePlacement& cache, const SessionOptions& options, ComputeNeeds needs, const Plan& plan) {
  if (cache.host != 0 && cache.host >= options.host_memory)
    fail_usage("--host-memory " + human_bytes(options.host_memory) + " is too small: keys and values of " +
               std::to_string(options.cache.sequences) + " sequences take " + human_bytes(cache.host) +
               " of it, and the weights on their way need room too");
  needs.host_fixed = cache.host;
  try {
    SessionPlan made = plan(needs);
    made.cache = cache;
    return made;
  } catch (const Exception& error) {
    if (cache.host == 0 || error.error().kind != io::ErrorKind::usage) throw;
    fail_with_more(error.error(), "keys and values take " + human_bytes(cache.host) + " of it");
  }
}

}  // namespace

// Keys and values come before weights: a byte of either in RAM saves about a byte of reading in a pass. As few layers'
// as possible lie on storage, with buffers for two layers of all sequences, or fewer.
SessionPlan plan_session(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs) {
  const CacheShape& shape = options.cache;
  const auto with = [&](const CachePlacement& cache) {
    return beside(cache, options, needs,
                  [&](const ComputeNeeds& with_cache) { return arrange_first(spec, options, with_cache); });
  };
  const std::int64_t layers = cached_layers(shape);
  if (layers == 0 || options.storage.empty()) return with(CachePlacement::in_ram(shape));
  const auto try_with = [&](const CachePlacement& cache) -> std::optional<SessionPlan> {
    try {
      return with(cache);
    } catch (const Exception& error) {
      if (error.error().kind != io::ErrorKind::usage) throw;
      return std::nullopt;
    }
  };
  if (std::optional<SessionPlan> all = try_with(CachePlacement::in_ram(shape))) return *std::move(all);
  for (std::int64_t buffers = 2 * shape.sequences;; buffers = std::max(kLeastCacheBuffers, buffers / 2)) {
    std::optional<SessionPlan> best = try_with(CachePlacement::with_storage(shape, layers, buffers));
    if (!best) {
      if (buffers <= kLeastCacheBuffers) return with(smallest_placement(shape));  // says what is too small
      continue;
    }
    for (std::int64_t too_few = 0, enough = layers; enough - too_few > 1;) {
      const std::int64_t middle = (too_few + enough) / 2;
      std::optional<SessionPlan> found = try_with(CachePlacement::with_storage(shape, middle, buffers));
      (found ? enough : too_few) = middle;
      if (found) best = std::move(found);
    }
    return *std::move(best);
  }
}

SessionPlan plan_again(const SessionPlan& other, const ModelSpec& spec, const SessionOptions& options,
                       const ComputeNeeds& measured) {
  return beside(other.cache, options, measured,
                [&](const ComputeNeeds& with_cache) { return arrange_again(other, spec, options, with_cache); });
}

SessionPlan plan_that_fits(const ModelSpec& spec, const SessionOptions& options, const ComputeNeeds& needs) {
  try {
    return plan_session(spec, options, needs);
  } catch (const Exception&) {
    SessionOptions plain = options;
    plain.swap_to_host = plain.swap_to_storage = 0;
    plain.deferred_share = plain.device_update_share = 0;
    return plan_session(spec, plain, needs);
  }
}

std::string store_identity(const ModelSpec& spec, const SessionOptions& options, std::uint64_t embedding_part) {
  nlohmann::json identity{{"config", spec.config_json},
                          {"precision", precision_name(options.precision)},
                          {"tiling", {spec.tiling.vocabulary_elements, spec.tiling.block_elements}},
                          {"run", options.run}};
  if (spec.config.experts.count > 0 && spec.tiling.experts_apart) identity["tiling"].push_back("experts apart");
  if (!spec.read_as.empty()) identity["as"] = spec.read_as;
  if (!spec.adapter_config_json.empty()) identity["adapter"] = spec.adapter_config_json;
  if (!spec.trainable_json.empty()) identity["trainable"] = spec.trainable_json;
  if (spec.base_format != WeightFormat::bf16) identity["base"] = weight_format_name(spec.base_format);
  if (!spec.base_plain.empty()) identity["base_plain"] = spec.base_plain;
  if (embedding_part != 0) identity["rows"] = embedding_part;
  // Layers of one's own have no config.json.
  if (spec.config_json == "{}") identity["units"] = unit_list(spec.units);
  return identity.dump();
}

io::VolumeOptions storage_volume(const SessionOptions& options) {
  io::VolumeOptions volume = volume_in(options, options.engine);
  volume.measure_speeds = options.storage.size() > 1;
  volume.write_limit = options.write_limit;
  volume.on_notice = options.on_notice;
  return volume;
}

swap::StoreOptions store_options(const ModelSpec& spec, const SessionOptions& options, const SessionPlan& plan) {
  std::vector<bool> stored_gradients = plan.arrangement.deferred;
  for (std::size_t id = 0; id < stored_gradients.size(); ++id)
    if (plan.arrangement.stays(swap::ExtentKind::gradient, static_cast<int>(id))) stored_gradients[id] = false;
  return {.volume = storage_volume(options),
          .generations = plan.commit_every != 0 ? 2 : 1,
          .scratch = {.gradients =
                          std::find(stored_gradients.begin(), stored_gradients.end(), true) != stored_gradients.end(),
                      .gradient_chunks = stored_gradients,
                      .activation_bytes = plan.arrangement.stored_activations()},
          .identity = store_identity(spec, options, plan.layout->sparse_elements()),
          .go_back = options.go_back};
}

}  // namespace tierflow
