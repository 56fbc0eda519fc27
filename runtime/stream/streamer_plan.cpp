// Budgets into places, and what a step then moves: no tensor is made here.
#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/planning/left_store.h"
#include "runtime/stream/durable_store.h"
#include "runtime/stream/streamer_shapes.h"

namespace tierflow {

namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 50;

// Sizes as options write them: whole KiB below 16 MiB, whole MiB from there.
std::uint64_t unit_of(std::uint64_t bytes) {
  return bytes < std::uint64_t{16} << 20 ? 1 << 10 : 1 << 20;
}
std::string text_of(std::uint64_t bytes) {
  const std::uint64_t unit = unit_of(bytes);
  return std::to_string((bytes + unit - 1) / unit) + (unit == 1 << 10 ? "KiB" : "MiB");
}

// The smallest size above `given`, which does not work, that does; whole units.
template <class Works>
std::uint64_t smallest(std::uint64_t given, const Works& works) {
  std::uint64_t below = given, at = std::max<std::uint64_t>(given, 1 << 10);
  while (at < kPlenty && !works(at)) {
    below = at;
    at *= 2;
  }
  while (at - below > unit_of(at)) {
    const std::uint64_t middle = below + (at - below) / 2;
    (works(middle) ? at : below) = middle;
  }
  at = (at + unit_of(at) - 1) / unit_of(at) * unit_of(at);
  while (at < kPlenty && !works(at)) at += unit_of(at);
  return at;
}

}  // namespace

StreamShapes::StreamShapes(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& turns,
                           const StreamerOptions& options) {
  ModelSpec spec;
  spec.units = units;
  for (const std::vector<int>& turn : turns) spec.stages.push_back({.kind = StageKind::block, .units = turn});
  packed = pack(spec, options.precision);
  for (const UnitSpec& unit : units)
    for (const TensorSpec& tensor : unit.tensors)
      loading = std::max(loading, quantising_bytes(tensor.format, tensor.shape));
  if (fits(options)) return;
  // Both budgets at once, so that the numbers given back work.
  const auto with = [&](std::uint64_t device, std::uint64_t host) {
    StreamerOptions tried = options;
    tried.device_memory = device;
    tried.host_memory = host;
    return fits(tried);
  };
  std::string text;
  std::uint64_t device = options.device_memory, host = options.host_memory;
  const auto says = [&](const char* option, std::uint64_t given, std::uint64_t needed) {
    text += (text.empty() ? "" : "; and ") + std::string(option) + " " + text_of(given) +
            " is too small: the smallest that works is " + text_of(needed);
  };
  if (!with(device, kPlenty)) {
    device = smallest(device, [&](std::uint64_t bytes) { return with(bytes, kPlenty); });
    says("--device-memory", options.device_memory, device);
  }
  if (!with(device, host)) {
    host = smallest(host, [&](std::uint64_t bytes) { return with(device, bytes); });
    says("--host-memory", options.host_memory, host);
    if (options.storage.empty()) text += "; or name a --storage folder to keep the state there";
  }
  throw Exception(io::ErrorKind::usage, text);
}

bool StreamShapes::fits(const StreamerOptions& options) {
  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : packed.units) shapes.push_back(unit.shape);
  const bool trains = packed.trainable_parameters != 0;
  layout = std::make_unique<swap::Layout>(
      std::move(shapes), packed.stages,
      options.chunk_elements != 0 ? options.chunk_elements : chunk_elements_for(options.host_memory));
  auto arranged = swap::arrange(
      *layout,
      {.host_budget = options.host_memory,
       .host_workspace = loading,
       .device_budget = options.device_memory,
       .workspace = static_cast<std::uint64_t>(options.workspace_share * static_cast<double>(options.device_memory)),
       .storage = !options.storage.empty(),
       .train = trains,
       .sums = trains});
  if (!arranged.ok()) return false;
  arrangement = std::move(arranged).value();
  return true;
}

bool StreamShapes::needs_store(const StreamerOptions& options) const {
  if (options.durable) return true;
  for (std::size_t id = 0; id < layout->chunks().size(); ++id)
    if (!arrangement.hi_resident[id] || (layout->chunks()[id].trainable && !arrangement.state_resident[id]))
      return true;
  return false;
}

io::VolumeOptions stream_volume(const StreamerOptions& options) {
  return {.folders = options.storage,
          .engine = options.engine,
          .allow_buffered = options.allow_buffered,
          .allow_any_filesystem = options.allow_any_filesystem};
}

swap::StoreOptions StreamShapes::store_options(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                               const std::string& identity) const {
  return {
      .volume = stream_volume(options),
      .generations = options.durable ? 2 : 1,
      .scratch = {.staged_gradients = arrangement.staged, .gradient_sums = !arrangement.gradient_low_resident.empty()},
      .identity = !options.durable   ? "{}"
                  : identity.empty() ? durable_identity(units, options)
                                     : identity,
      .check_beside = [storage = options.storage](std::uint64_t generation, const std::string& progress) {
        return check_beside(storage, generation, progress);
      }};
}

StreamPlan plan_stream(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& turns,
                       const StreamerOptions& options, int micro_batches) {
  const StreamShapes shapes(units, turns, options);
  const swap::Layout& layout = *shapes.layout;
  const swap::Arrangement& at = shapes.arrangement;
  StreamPlan plan;
  for (const UnitSpec& unit : units) plan.parameters += static_cast<std::uint64_t>(unit.parameters());
  plan.trainable_parameters = shapes.packed.trainable_parameters;
  plan.device_bytes = at.device_bytes();
  plan.host_bytes = at.host_bytes(layout) + shapes.loading;
  plan.storage_bytes =
      shapes.needs_store(options) ? swap::Store::bytes_needed(shapes.store_options(units, options), layout) : 0;
  const auto passes = static_cast<std::uint64_t>(micro_batches);
  std::uint64_t hi = 0, state = 0, gradients = 0, hi_kept = 0, state_kept = 0, gradient_kept = 0;
  for (std::size_t id = 0; id < layout.chunks().size(); ++id) {
    const swap::Chunk& chunk = layout.chunks()[id];
    const std::uint64_t words = chunk.word_bytes(), users = static_cast<std::uint64_t>(layout.users_of(chunk.unit));
    const std::uint64_t stored_hi = at.hi_resident[id] ? 0 : words;
    hi += words;
    hi_kept += words - stored_hi;
    plan.layer_major_read += 2 * users * stored_hi;
    plan.loop_read += 2 * users * passes * stored_hi;
    plan.layer_major_link += 2 * users * words;
    plan.loop_link += 2 * users * passes * words;
    if (!chunk.trainable) continue;
    const std::uint64_t stored_state = at.state_resident[id] ? 0 : chunk.state_bytes;
    const std::uint64_t high = at.gradient_resident[id] ? 0 : words, low = at.gradient_low_resident[id] ? 0 : words;
    state += chunk.state_bytes;
    gradients += words;
    state_kept += chunk.state_bytes - stored_state;
    gradient_kept += words - high;
    plan.layer_major_read += stored_state + high;
    plan.layer_major_write += stored_hi + stored_state + high;
    // The first pass leaves bf16; each further one reads the sum and writes it back in fp32.
    plan.loop_read += stored_state + high * passes + (passes > 1 ? low * (passes - 1) : 0);
    plan.loop_write += stored_hi + stored_state + high * passes + low * (passes - 1);
    plan.layer_major_link += words;
    plan.loop_link += words * passes;
  }
  const auto share = [](std::uint64_t part, std::uint64_t all) {
    return all == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(all);
  };
  plan.state_bytes = hi + state;
  plan.gradient_bytes = gradients;
  plan.hi_resident = share(hi_kept, hi);
  plan.state_resident = share(state_kept, state);
  plan.gradient_resident = share(gradient_kept, gradients);
  return plan;
}

std::string Streamer::describe() const {
  const MemoryUse use = memory();
  const auto mib = [](std::uint64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; };
  return "device: " + mib(use.device_peak) + " of " + mib(use.device_budget) + "; host: " + mib(use.host_used) +
         " of " + mib(use.host_budget) + "; storage: " + mib(use.storage_bytes);
}

}  // namespace tierflow
