// Budgets into places, and what a step then moves: no tensor is made here.
#include "runtime/stream/streamer_plan.h"

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/stream/durable_store.h"

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

// Throws Exception (kind usage).
void check_stages(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages) {
  if (units.empty()) fail_usage("the module has no parameters: there is nothing that could stream");
  std::vector<bool> used(units.size(), false);
  for (const std::vector<int>& stage : stages)
    for (const int unit : stage) {
      if (unit < 0 || unit >= static_cast<int>(units.size()))
        fail_usage("a stage has unit " + std::to_string(unit) + ", and units are 0 to " +
                   std::to_string(units.size() - 1));
      used[unit] = true;
    }
  for (std::size_t unit = 0; unit < units.size(); ++unit)
    if (!used[unit]) fail_usage("unit " + std::to_string(unit) + " (" + units[unit].name + ") is in no stage");
}

}  // namespace

StreamerPlan::StreamerPlan(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages,
                           const StreamerOptions& options) {
  check_stages(units, stages);
  ModelSpec spec;
  spec.units = units;
  for (const std::vector<int>& stage : stages) spec.stages.push_back({.kind = StageKind::block, .units = stage});
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
  fail_usage(text);
}

bool StreamerPlan::fits(const StreamerOptions& options) {
  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : packed.units) shapes.push_back(unit.shape);
  const bool trains = packed.trainable_parameters != 0;
  layout = std::make_unique<swap::Layout>(
      std::move(shapes), packed.stages,
      options.chunk_elements != 0 ? options.chunk_elements : chunk_elements_for(options.host_memory));
  exporting = options.durable && trains ? 2 * layout->max_word_bytes() : 0;
  swap::ArrangeRequest request{
      .host_budget = options.host_memory,
      .host_workspace = std::max(loading, exporting),
      .device_budget = options.device_memory,
      .workspace = static_cast<std::uint64_t>(options.workspace_share * static_cast<double>(options.device_memory)),
      .gradient_slots = options.device == "cuda",
      .storage = !options.storage.empty(),
      .train = trains,
      .sums = trains};
  auto arranged = swap::arrange(*layout, request);
  if (!arranged.ok() && exporting > loading) {
    exporting = 0;
    request.host_workspace = loading;
    arranged = swap::arrange(*layout, request);
  }
  if (!arranged.ok()) return false;
  arrangement = std::move(arranged).value();
  return true;
}

bool StreamerPlan::needs_store(const StreamerOptions& options) const {
  if (options.durable) return true;
  for (std::size_t id = 0; id < layout->chunks().size(); ++id)
    if (!arrangement.hi_resident[id] || (layout->chunks()[id].trainable && !arrangement.state_resident[id]))
      return true;
  return false;
}

swap::StoreOptions StreamerPlan::store_options(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                               const std::string& identity) const {
  return {.volume = volume_in(options, options.engine),
          .generations = options.durable ? 2 : 1,
          .scratch = {.gradients = arrangement.staged, .gradient_sums = !arrangement.gradient_low_resident.empty()},
          .identity = !options.durable   ? "{}"
                      : identity.empty() ? durable_identity(units, options)
                                         : identity,
          .check_beside = [storage = options.storage](std::uint64_t generation, const std::string& progress) {
            return check_beside(storage, generation, progress);
          }};
}

StreamerBytes streamer_bytes(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages,
                             const StreamerOptions& options, int micro_batches) {
  const StreamerPlan plan(units, stages, options);
  const swap::Layout& layout = *plan.layout;
  const swap::Arrangement& at = plan.arrangement;
  StreamerBytes bytes;
  for (const UnitSpec& unit : units) bytes.parameters += static_cast<std::uint64_t>(unit.parameters());
  bytes.trainable_parameters = plan.packed.trainable_parameters;
  bytes.device_bytes = at.device_bytes();
  bytes.host_bytes = plan.host_bytes();
  bytes.storage_bytes =
      plan.needs_store(options) ? swap::Store::bytes_needed(plan.store_options(units, options), layout) : 0;
  const auto passes = static_cast<std::uint64_t>(micro_batches);
  std::uint64_t hi = 0, state = 0, gradients = 0, resident_hi = 0, resident_state = 0, resident_gradient = 0;
  for (std::size_t id = 0; id < layout.chunks().size(); ++id) {
    const swap::Chunk& chunk = layout.chunks()[id];
    const std::uint64_t words = chunk.word_bytes(), users = static_cast<std::uint64_t>(layout.users_of(chunk.unit));
    const std::uint64_t stored_hi = at.hi_resident[id] ? 0 : words;
    hi += words;
    resident_hi += words - stored_hi;
    bytes.layer_major_read += 2 * users * stored_hi;
    bytes.loop_read += 2 * users * passes * stored_hi;
    bytes.layer_major_link += 2 * users * words;
    bytes.loop_link += 2 * users * passes * words;
    if (!chunk.trainable) continue;
    const std::uint64_t stored_state = at.state_resident[id] ? 0 : chunk.state_bytes;
    const std::uint64_t high = at.gradient_resident[id] ? 0 : words, low = at.gradient_low_resident[id] ? 0 : words;
    state += chunk.state_bytes;
    gradients += words;
    resident_state += chunk.state_bytes - stored_state;
    resident_gradient += words - high;
    bytes.layer_major_read += stored_state + high;
    bytes.layer_major_write += stored_hi + stored_state + high;
    // The first pass leaves bf16; each further one reads the sum and writes it back in fp32.
    bytes.loop_read += stored_state + high * passes + (passes > 1 ? low * (passes - 1) : 0);
    bytes.loop_write += stored_hi + stored_state + high * passes + low * (passes - 1);
    bytes.layer_major_link += words;
    bytes.loop_link += words * passes;
  }
  const auto share = [](std::uint64_t part, std::uint64_t all) {
    return all == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(all);
  };
  bytes.state_bytes = hi + state;
  bytes.gradient_bytes = gradients;
  bytes.hi_resident = share(resident_hi, hi);
  bytes.state_resident = share(resident_state, state);
  bytes.gradient_resident = share(resident_gradient, gradients);
  return bytes;
}

std::string Streamer::describe() const {
  const MemoryUse use = memory();
  const auto mib = [](std::uint64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; };
  return "device: " + mib(use.device_peak) + " of " + mib(use.device_budget) + "; host: " + mib(use.host_used) +
         " of " + mib(use.host_budget) + "; storage: " + mib(use.storage_bytes);
}

}  // namespace tierflow
