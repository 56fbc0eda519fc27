// Budgets into an arrangement: first what must be there, then what makes the pipeline overlap, then residency with the
// rest.
#include <algorithm>
#include <numeric>

#include "swap/plan.h"

namespace tierflow::swap {
namespace {

constexpr int kSlots = 2;  // one at work, one on its way
constexpr int kActivationBuffers = 4, kFewestActivationBuffers = 1;

struct DeviceNeeds {
  std::uint64_t weights = 0;  // of the most demanding stage
  std::uint64_t all_weights = 0;
  std::uint64_t block_weights = 0;  // of the largest unit that is neither first nor last
  std::uint64_t gradient = 0;       // of the unit with most, tied ones apart
  std::uint64_t block_gradient = 0;
  std::uint64_t held = 0;     // of tied units
  std::uint64_t carries = 0;  // saved inputs of all stages that save, all micro-batches
  std::uint64_t largest_carry = 0;
};

// sums: no gradient stays on the device beyond its visit, and a visit's gradients lie there together.
DeviceNeeds device_needs(const Layout& layout, int micro_batches, bool train, bool sums) {
  DeviceNeeds needs;
  const int stages = static_cast<int>(layout.stages().size());
  for (int index = 0; index < stages; ++index) {
    const StageShape& stage = layout.stages()[index];
    std::uint64_t weights = 0, gradients = 0;
    for (int unit : stage.units) {
      weights += 2 * layout.unit_elements(unit);
      if (layout.units()[unit].trainable) gradients += 4 * layout.unit_elements(unit);
    }
    if (sums) needs.gradient = std::max(needs.gradient, gradients);
    needs.weights = std::max(needs.weights, weights);
    if (index > 0 && index + 1 < stages) {
      needs.block_weights = std::max(needs.block_weights, weights);
      needs.carries += stage.carry_bytes * micro_batches;
      needs.largest_carry = std::max(needs.largest_carry, round_up(stage.carry_bytes, kSector));
    }
  }
  for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
    const std::uint64_t gradient = 4 * layout.unit_elements(unit);
    needs.all_weights += 2 * layout.unit_elements(unit);
    if (!layout.units()[unit].trainable) continue;
    if (layout.users_of(unit) > 1 && !sums) {
      needs.held += gradient;
      continue;
    }
    needs.gradient = std::max(needs.gradient, gradient);
    if (unit > 0 && unit + 1 < static_cast<int>(layout.units().size()))
      needs.block_gradient = std::max(needs.block_gradient, gradient);
  }
  if (!train) needs.gradient = needs.held = needs.block_gradient = needs.carries = 0;
  return needs;
}

// A share of the trainable elements by whole chunks, spread evenly: each unit then leaves as much for its next forward
// as any other, so that neither pass has the lanes idle while the other waits for them.
std::vector<bool> deferred_chunks(const Layout& layout, double share) {
  std::vector<bool> deferred(layout.chunks().size(), false);
  double owed = 0;
  for (std::size_t id = deferred.size(); id-- > 0;) {
    const Chunk& chunk = layout.chunks()[id];
    if (!chunk.trainable) continue;
    const auto elements = static_cast<double>(chunk.elements);
    owed += share * elements;
    deferred[id] = share >= 1 || (share > 0 && 2 * owed >= elements);
    if (deferred[id]) owed -= elements;
  }
  return deferred;
}

// Whole units, spread evenly, as far as their chunks have words on the device when they are updated.
std::vector<bool> chunks_on_device(const Layout& layout, const std::vector<bool>& deferred, double share) {
  std::vector<bool> on_device(layout.chunks().size(), false);
  double owed = 0;
  for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
    if (!layout.units()[unit].trainable) continue;
    const auto elements = static_cast<double>(layout.unit_elements(unit));
    owed += share * elements;
    if (share <= 0 || (share < 1 && 2 * owed < elements)) continue;
    owed -= elements;
    const auto last_visited =
        std::find_if(layout.stages().begin(), layout.stages().end(), [unit](const StageShape& stage) {
          return std::find(stage.units.begin(), stage.units.end(), unit) != stage.units.end();
        });
    for (const Chunk& chunk : layout.chunks_of(unit)) {
      const int id = layout.first_chunk(unit) + chunk.index;
      on_device[id] = deferred[id] || last_visited->backward_needs_weights;
    }
  }
  return on_device;
}

UpdateSlots update_slots(const Layout& layout, const std::vector<bool>& on_device, std::uint64_t scratch) {
  UpdateSlots slots;
  std::uint64_t state = 0;
  for (std::size_t id = 0; id < on_device.size(); ++id) {
    if (!on_device[id]) continue;
    slots.count = 3;  // one comes, one is updated, one goes
    slots.state = std::max(slots.state, round_up(layout.chunks()[id].word_bytes(), kSector));
    state = std::max(state, round_up(layout.chunks()[id].state_bytes, kSector));
  }
  slots.scratch = slots.state + state;
  slots.bytes = slots.scratch + round_up(scratch, kSector);
  return slots;
}

// Rounded up, so that the number given back as an option works.
std::string size_text(std::uint64_t bytes) {
  if (bytes < std::uint64_t{16} << 20) return std::to_string((bytes + 1023) >> 10) + "KiB";
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + "MiB";
}

io::Error too_small(const char* option, std::uint64_t given, std::uint64_t needed, const std::string& remedy) {
  return {.kind = io::ErrorKind::usage,
          .detail = std::string(option) + " " + size_text(given) + " is too small: the smallest that works is " +
                    size_text(needed) + "; " + remedy};
}

// How often an item's activations leave the device, of those that do not stay: to the host first, then to storage.
void choose_swaps(const ArrangeRequest& request, Arrangement& result) {
  int to_host = request.swap_to_host, to_storage = request.storage ? request.swap_to_storage : 0;
  for (int item = result.items(); item-- > request.micro_batches;) {
    if (result.activations[item] == Activations::keep || result.swapped_bytes[item / request.micro_batches] == 0)
      continue;
    if (to_host <= 0 && to_storage <= 0) return;
    result.activations[item] = Activations::swap;
    result.saved_on_storage[item] = to_host <= 0;
    --(to_host > 0 ? to_host : to_storage);
  }
}

// Device: one stage's weights, one unit's gradient, the tied ones; slots, where something leaves; then carries and
// activations, as many as fit; then more weights.
io::Error arrange_device(const Layout& layout, const ArrangeRequest& request, Arrangement& result) {
  const std::size_t stages = layout.stages().size();
  const DeviceNeeds needs = device_needs(layout, request.micro_batches, request.train, request.sums);
  result.weight_ring = needs.weights;
  result.gradient_ring = needs.gradient;
  result.held_gradients = needs.held;
  result.input_leaves.assign(stages, false);
  result.activations.assign(stages * request.micro_batches, Activations::recompute);
  result.saved_on_storage.assign(stages * request.micro_batches, false);
  result.swapped_bytes = request.swapped_bytes;
  result.swapped_bytes.resize(stages, 0);
  const std::uint64_t fixed = needs.weights + needs.gradient + needs.held + request.workspace;
  const std::uint64_t slots = needs.carries == 0 ? 0 : kSlots * needs.largest_carry;
  const std::uint64_t smallest = fixed + std::min(slots, needs.carries);
  if (request.device_budget < smallest)
    return too_small("--device-memory", request.device_budget, smallest,
                     "a smaller --micro-batch or --sequence-length needs less");
  std::uint64_t left = request.device_budget - fixed;
  result.on_device = chunks_on_device(layout, result.deferred, request.train ? request.device_update_share : 0.0);
  const UpdateSlots updates = update_slots(layout, result.on_device, request.update_scratch);
  const std::uint64_t update_bytes = static_cast<std::uint64_t>(updates.count) * updates.bytes + kSector;
  if (updates.count == 0 || update_bytes > request.device_budget - smallest) {
    result.on_device.assign(layout.chunks().size(), false);
  } else {
    result.update_slots = updates;
    left -= update_bytes;
  }
  std::uint64_t swapped = 0;  // the largest piece that a swap may move
  for (std::size_t stage = 1; stage + 1 < stages; ++stage)
    swapped = std::max(swapped, round_up(layout.stages()[stage].carry_bytes, kSector) +
                                    round_up(result.swapped_bytes[stage], kSector));
  const bool swaps = request.train && request.swap_to_host + request.swap_to_storage > 0 &&
                     kSlots * swapped + request.swap_workspace <= left;
  if (swaps || needs.carries > left) {
    result.slots = kSlots;
    result.slot_bytes = swaps ? swapped : needs.largest_carry;
    left -= kSlots * result.slot_bytes + (swaps ? request.swap_workspace : 0);
  }
  // The last stages' inputs are the first to be read again: they stay.
  const bool all_stay = needs.carries <= left;
  for (std::size_t stage = stages - 1; stage-- > 1;) {
    const std::uint64_t bytes = layout.stages()[stage].carry_bytes * request.micro_batches;
    if (needs.carries == 0) break;
    if (all_stay || bytes <= left)
      left -= bytes;
    else
      result.input_leaves[stage] = true;
  }
  const auto grow = [&left](std::uint64_t& pool, std::uint64_t by) {
    if (by == 0 || by > left) return false;
    pool += by;
    left -= by;
    return true;
  };
  grow(result.weight_ring, needs.block_weights);
  grow(result.gradient_ring, needs.block_gradient);
  grow(result.weight_ring, needs.block_weights);
  // Activations before more weights: a weight fetched again passes beside the computation, an activation made again is
  // computation. The last items' first, as for inputs.
  const int micro_batches = request.micro_batches;
  for (int item = result.items(); request.train && item-- > micro_batches;) {
    const std::size_t stage = item / micro_batches;
    if (stage >= request.activation_bytes.size() || result.input_leaves[stage]) continue;
    std::uint64_t bytes = request.activation_bytes[stage];
    bytes += bytes / 8;  // for blocks that are reused although a little too large
    if (bytes == 0 || bytes > left) continue;
    result.activations[item] = Activations::keep;
    left -= bytes;
  }
  if (swaps) {
    choose_swaps(request, result);
    if (std::count(result.activations.begin(), result.activations.end(), Activations::swap) == 0) {
      ArrangeRequest without = request;
      without.swap_to_host = without.swap_to_storage = 0;
      result.slots = 0;
      result.slot_bytes = 0;
      return arrange_device(layout, without, result);
    }
  }
  if (result.weight_ring < needs.all_weights + needs.block_weights)
    grow(result.weight_ring, std::min(left, needs.all_weights + needs.block_weights - result.weight_ring));
  result.weight_ring = round_up(result.weight_ring, kSector);
  return {};
}

}  // namespace

std::uint64_t Arrangement::saved_bytes(const Layout& layout, int item) const {
  const int stage = item / micro_batches;
  return round_up(input_leaves[stage] ? layout.stages()[stage].carry_bytes : 0, kSector) +
         (activations[item] == Activations::swap ? round_up(swapped_bytes[stage], kSector) : 0);
}

std::vector<std::uint64_t> Arrangement::stored_activations(const Layout& layout) const {
  std::vector<std::uint64_t> bytes;
  for (int item = 0; item < items(); ++item) bytes.push_back(saved_on_storage[item] ? saved_bytes(layout, item) : 0);
  return bytes;
}

std::uint64_t Arrangement::buffer_bytes(const Layout& layout) const {
  return word_buffers * layout.max_word_bytes() + state_buffers * round_up(layout.max_state_bytes(), kSector) +
         activation_buffers * slot_bytes;
}

std::uint64_t Arrangement::resident_bytes(const Layout& layout) const {
  std::uint64_t bytes = 0;
  for (std::size_t id = 0; id < layout.chunks().size(); ++id) {
    const Chunk& chunk = layout.chunks()[id];
    bytes += (hi_resident[id] ? chunk.word_bytes() : 0) + (state_resident[id] ? chunk.state_bytes : 0) +
             (gradient_resident[id] ? chunk.word_bytes() : 0) +
             (!gradient_low_resident.empty() && gradient_low_resident[id] ? chunk.word_bytes() : 0);
  }
  return bytes;
}

std::vector<HostBuffer> Arrangement::host_buffers(const Layout& layout) const {
  using Where = HostRef::Where;
  std::vector<HostBuffer> all;
  const auto add = [&](Where where, int index, std::uint64_t bytes) { all.push_back({{where, index}, bytes}); };
  for (int i = 0; i < word_buffers; ++i) add(Where::word_buffer, i, layout.max_word_bytes());
  for (int i = 0; i < state_buffers; ++i) add(Where::state_buffer, i, round_up(layout.max_state_bytes(), kSector));
  for (int i = 0; i < activation_buffers; ++i) add(Where::activation_buffer, i, slot_bytes);
  for (int id = 0; id < static_cast<int>(layout.chunks().size()); ++id) {
    const Chunk& chunk = layout.chunks()[id];
    if (hi_resident[id]) add(Where::resident_hi, id, chunk.word_bytes());
    if (state_resident[id]) add(Where::resident_state, id, chunk.state_bytes);
    if (gradient_resident[id]) add(Where::resident_gradient, id, chunk.word_bytes());
    if (!gradient_low_resident.empty() && gradient_low_resident[id])
      add(Where::resident_gradient_low, id, chunk.word_bytes());
  }
  for (int item = 0; item < items(); ++item)
    if (const std::uint64_t bytes = saved_bytes(layout, item); bytes != 0 && !saved_on_storage[item])
      add(Where::activations, item, bytes);
  return all;
}

std::uint64_t Arrangement::saved_on_host(const Layout& layout) const {
  std::uint64_t bytes = 0;
  for (int item = 0; item < items(); ++item)
    if (!saved_on_storage[item]) bytes += saved_bytes(layout, item);
  return bytes;
}

namespace {

bool any_on_storage(const Arrangement& arrangement) {
  const auto& on_storage = arrangement.saved_on_storage;
  return std::find(on_storage.begin(), on_storage.end(), true) != on_storage.end();
}

// Where `budget` has no room for what is saved beside `buffers`, the first stages' goes on to storage, through buffers
// of its own.
void move_to_storage(const Layout& layout, std::uint64_t budget, std::uint64_t buffers, Arrangement& result) {
  std::uint64_t saved = result.saved_on_host(layout);
  const auto fits = [&](int through) { return buffers + saved + through * result.slot_bytes <= budget; };
  result.activation_buffers = any_on_storage(result) ? kActivationBuffers : 0;
  if (fits(result.activation_buffers) || (!any_on_storage(result) && saved <= result.slot_bytes)) return;
  result.activation_buffers = kFewestActivationBuffers;
  for (int item = 0; item < result.items() && !fits(result.activation_buffers); ++item) {
    const std::uint64_t bytes = result.saved_bytes(layout, item);
    if (result.saved_on_storage[item] || bytes == 0) continue;
    result.saved_on_storage[item] = true;
    saved -= bytes;
  }
  if (fits(kActivationBuffers)) result.activation_buffers = kActivationBuffers;
}

}  // namespace

io::Result<Arrangement> arrange(const Layout& layout, const ArrangeRequest& request) {
  Arrangement result;
  result.staged = request.staged && request.train;
  result.micro_batches = request.micro_batches;
  const std::size_t chunks = layout.chunks().size();
  result.hi_resident.assign(chunks, false);
  result.state_resident.assign(chunks, false);
  result.gradient_resident.assign(chunks, false);
  result.deferred = deferred_chunks(layout, request.train ? (request.staged ? 1.0 : request.deferred_share) : 0.0);
  const bool defers_all = request.staged || request.deferred_share >= 1;
  if (request.sums) result.gradient_low_resident.assign(chunks, false);
  if (io::Error error = arrange_device(layout, request, result)) return error;

  // Host: the fewest buffers that work, host carries; then residency of everything, or a pipeline's worth of buffers
  // and residency.
  const std::uint64_t word = layout.max_word_bytes(), state = round_up(layout.max_state_bytes(), kSector);
  std::uint64_t everything = result.saved_on_host(layout);
  if (any_on_storage(result)) everything += kActivationBuffers * result.slot_bytes;
  for (const Chunk& chunk : layout.chunks()) {
    everything += chunk.word_bytes();
    if (!chunk.trainable || !request.train) continue;
    everything += chunk.state_bytes + (request.sums ? chunk.word_bytes() : 0);
  }
  for (std::size_t id = 0; id < chunks; ++id)
    if (result.deferred[id]) everything += layout.chunks()[id].word_bytes();
  const int immediate_words = request.train && (!defers_all || request.sums) ? 2 : 0;
  everything += immediate_words * word;
  if (everything <= request.host_budget) {
    for (std::size_t id = 0; id < chunks; ++id) {
      const bool trained = layout.chunks()[id].trainable && request.train;
      result.hi_resident[id] = true;
      result.state_resident[id] = trained;
      result.gradient_resident[id] = result.deferred[id];
      if (request.sums) result.gradient_low_resident[id] = trained;
    }
    result.word_buffers = immediate_words;
    if (any_on_storage(result)) result.activation_buffers = kActivationBuffers;
    if (request.train && !defers_all && everything + 2 * word <= request.host_budget) result.word_buffers += 2;
    return result;
  }
  if (!request.storage && !request.staged && request.deferred_share > 0) {
    ArrangeRequest at_once = request;
    at_once.deferred_share = 0;
    return arrange(layout, at_once);
  }
  if (!request.storage)
    return too_small("--host-memory", request.host_budget, everything,
                     "or name a --storage folder to keep the state there");
  const int words_least = request.sums ? 4 : request.train ? 2 : 1, states_least = request.train ? 1 : 0;
  const std::uint64_t buffers = words_least * word + states_least * state;
  move_to_storage(layout, request.host_budget, buffers, result);
  const std::uint64_t least = buffers + result.saved_on_host(layout) + result.activation_buffers * result.slot_bytes;
  if (least > request.host_budget)
    return too_small("--host-memory", request.host_budget, least,
                     "a smaller --micro-batch moves smaller activations through it");
  std::uint64_t host_left = request.host_budget - least;
  result.word_buffers = words_least;
  result.state_buffers = states_least;
  // Buffers for overlap take at most half of what is left: two units' worth of words, four chunks of state.
  const std::uint64_t buffer_share = host_left / 2;
  std::uint64_t spent = 0;
  std::size_t unit_chunks = 1;
  for (std::size_t unit = 1; unit + 1 < layout.units().size(); ++unit)
    unit_chunks = std::max(unit_chunks, layout.chunks_of(static_cast<int>(unit)).size());
  const int words_most = static_cast<int>(std::min<std::size_t>(4 * unit_chunks + 4, 64)),
            states_most = request.train ? 6 : 0;
  for (bool grew = true; grew;) {
    grew = false;
    if (result.state_buffers < states_most && result.state_buffers * 3 <= result.word_buffers &&
        spent + state <= buffer_share) {
      ++result.state_buffers;
      spent += state;
      grew = true;
    }
    if (result.word_buffers < words_most && spent + word <= buffer_share) {
      ++result.word_buffers;
      spent += word;
      grew = true;
    }
  }
  host_left -= spent;
  // Residency by value a byte: hi words are read twice and written once a step, staged gradients written and read once,
  // the rest of the state read and written once.
  const auto keep = [&](std::vector<bool>& resident, auto bytes_of) {
    for (std::size_t id = 0; id < chunks; ++id) {
      const std::uint64_t bytes = bytes_of(layout.chunks()[id], id);
      if (bytes == 0 || bytes > host_left) continue;
      resident[id] = true;
      host_left -= bytes;
    }
  };
  keep(result.hi_resident, [](const Chunk& chunk, std::size_t) { return chunk.word_bytes(); });
  keep(result.gradient_resident,
       [&](const Chunk& chunk, std::size_t id) { return result.deferred[id] ? chunk.word_bytes() : 0; });
  if (request.sums)
    keep(result.gradient_low_resident,
         [](const Chunk& chunk, std::size_t) { return chunk.trainable ? chunk.word_bytes() : 0; });
  if (request.train)
    keep(result.state_resident,
         [](const Chunk& chunk, std::size_t) { return chunk.trainable ? chunk.state_bytes : 0; });
  return result;
}

}  // namespace tierflow::swap
