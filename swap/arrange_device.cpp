#include "swap/arrange_device.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {
namespace {

constexpr int kSlots = 2;  // one at work, one on its way
constexpr int kAhead = 2;  // blocks whose weights come while one is computed with

struct DeviceNeeds {
  std::uint64_t weights = 0;  // of the most demanding stage
  std::uint64_t all_weights = 0;
  std::uint64_t block_weights = 0;  // of the largest unit that is neither first nor last
  std::uint64_t gradient = 0;       // of the unit with most, tied ones apart
  std::uint64_t block_gradient = 0;
  std::uint64_t needed_weights = 0, needed_gradient = 0;  // of the largest unit on demand
  std::uint64_t all_needed = 0;                           // weights of all units on demand
  std::uint64_t held = 0;                                 // of tied units
  std::uint64_t carries = 0;                              // saved inputs of all stages that save, all micro-batches
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
      weights += layout.unit_word_bytes(unit);
      gradients += layout.gradient_bytes(unit);
    }
    if (sums) needs.gradient = std::max(needs.gradient, gradients);
    needs.weights = std::max(needs.weights, weights);
    if (index > 0 && index + 1 < stages) {
      needs.block_weights = std::max(needs.block_weights, weights);
      needs.carries += stage.carry_bytes * stage.computations(micro_batches);
      needs.largest_carry = std::max(needs.largest_carry, round_up(stage.carry_bytes, kSector));
    }
  }
  for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
    const std::uint64_t gradient = layout.gradient_bytes(unit), weights = layout.unit_word_bytes(unit);
    if (layout.on_demand(unit)) {
      needs.needed_weights = std::max(needs.needed_weights, weights);
      needs.all_needed += weights;
      needs.needed_gradient = std::max(needs.needed_gradient, gradient);
      continue;
    }
    needs.all_weights += weights;
    if (gradient == 0) continue;
    if (layout.users_of(unit) > 1 && !sums) {
      needs.held += gradient;
      continue;
    }
    needs.gradient = std::max(needs.gradient, gradient);
    if (unit > 0 && unit + 1 < static_cast<int>(layout.units().size()))
      needs.block_gradient = std::max(needs.block_gradient, gradient);
  }
  if (!train) needs.gradient = needs.held = needs.block_gradient = needs.carries = needs.needed_gradient = 0;
  return needs;
}

// Whole units, spread evenly, as far as their chunks have words on the device when they are updated.
std::vector<bool> chunks_on_device(const Layout& layout, const std::vector<bool>& deferred, double share) {
  std::vector<bool> on_device(layout.chunks().size(), false);
  double rest = 0;
  for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
    if (layout.gradient_bytes(unit) == 0) continue;
    const auto elements = static_cast<double>(layout.gradient_bytes(unit)) / 4;
    rest += share * elements;
    if (share <= 0 || (share < 1 && 2 * rest < elements)) continue;
    rest -= elements;
    const auto last_visited =
        std::find_if(layout.stages().begin(), layout.stages().end(), [unit](const StageShape& stage) {
          return std::find(stage.units.begin(), stage.units.end(), unit) != stage.units.end();
        });
    for (const Chunk& chunk : layout.trainable_chunks_of(unit)) {
      const int id = layout.first_chunk(unit) + chunk.index;
      on_device[id] = !chunk.sparse && (deferred[id] || last_visited->backward_needs_weights);
    }
  }
  return on_device;
}

// Where state and gradient of a chunk stay on the device, its slot is for scratch alone.
UpdateSlots update_slots(const Layout& layout, const Arrangement& result, std::uint64_t scratch) {
  UpdateSlots slots;
  std::uint64_t state = 0;
  for (const Chunk& chunk : layout.chunks()) {
    if (!result.on_device[chunk.id]) continue;
    slots.count = 3;  // one comes, one is updated, one goes
    if (result.device_place(ExtentKind::gradient, chunk.id) == kNowhere)
      slots.state = std::max(slots.state, round_up(chunk.word_bytes(), kSector));
    if (result.device_place(ExtentKind::state, chunk.id) == kNowhere)
      state = std::max(state, round_up(chunk.state_bytes, kSector));
  }
  slots.scratch = slots.state + state;
  slots.bytes = std::max(kSector, slots.scratch + round_up(scratch, kSector));
  return slots;
}

std::uint64_t bytes_of(const UpdateSlots& slots) {
  return slots.count == 0 ? 0 : static_cast<std::uint64_t>(slots.count) * slots.bytes + kSector;
}

// Whole units, the first ones first: their updates are the last of a backward, and the first that the next forward
// waits for. Those whose words are not on the device in the backward stay with the host. `left` pays for the places and
// for what the update slots grow by.
void keep_state(const Layout& layout, const ArrangeRequest& request, Arrangement& result, std::uint64_t& left) {
  for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
    const int user = layout.first_user(unit);
    const auto chunks = layout.trainable_chunks_of(unit);
    if (chunks.empty() || !layout.stages()[user].backward_needs_weights || std::ranges::any_of(chunks, &Chunk::sparse))
      continue;
    Arrangement with = result;
    with.device_state.resize(layout.chunks().size(), kNowhere);
    with.device_gradient.resize(layout.chunks().size(), kNowhere);
    const auto place = [&](std::uint64_t bytes) {
      return std::exchange(with.device_resident, with.device_resident + round_up(bytes, kSector));
    };
    for (const Chunk& chunk : chunks) {
      with.on_device[chunk.id] = true;
      with.device_state[chunk.id] = place(chunk.state_bytes);
      if (with.deferred[chunk.id]) with.device_gradient[chunk.id] = place(chunk.word_bytes());
    }
    with.update_slots = update_slots(layout, with, request.update_scratch);
    const auto taken = [](const Arrangement& of) {
      return of.device_resident == 0 ? bytes_of(of.update_slots)
                                     : of.device_resident + kSector + bytes_of(of.update_slots);
    };
    if (taken(with) > taken(result) + left) continue;
    left -= taken(with) - taken(result);
    result = std::move(with);
  }
  for (std::vector<std::uint64_t>* places : {&result.device_state, &result.device_gradient})
    for (std::uint64_t& at : *places)
      if (at != kNowhere) at += result.device_resident_begin();
}

// Bytes of the weight ring with which these units can stay: theirs, and a ring for the others. It holds what a stage
// needs, and the next blocks come meanwhile.
std::uint64_t ring_with(const Layout& layout, const std::vector<bool>& stays) {
  std::uint64_t staying = 0, of_stage = 0, of_block = 0;
  for (int unit = 0; unit < static_cast<int>(stays.size()); ++unit)
    if (stays[unit]) staying += layout.unit_word_bytes(unit);
  for (std::size_t stage = 0; stage < layout.stages().size(); ++stage) {
    std::uint64_t passing = 0;
    for (const int unit : layout.stages()[stage].units)
      if (!stays[unit]) passing += layout.unit_word_bytes(unit);
    of_stage = std::max(of_stage, passing);
    if (stage > 0 && stage + 1 < layout.stages().size()) of_block = std::max(of_block, passing);
  }
  return staying + of_stage + kAhead * of_block;
}

// Which units stay on the device if nothing is trained. Each pass then visits the stages in the same order. A ring that
// holds less than all would hold none of the units that come next. Those of the first and the last stage, which are
// often the largest, stay if they can: the ring for the others is smaller then. Of the others as many as possible stay,
// spread evenly, so that the link has work while any of them is computed with.
std::vector<bool> staying_units(const Layout& layout, std::uint64_t ring) {
  const int units = static_cast<int>(layout.units().size());
  std::vector<bool> stays(units, false), at_an_end(units, false);
  for (const StageShape* stage : {&layout.stages().front(), &layout.stages().back()})
    for (const int unit : stage->units) {
      at_an_end[unit] = stays[unit] = true;
      if (ring_with(layout, stays) > ring) stays[unit] = false;
    }
  std::vector<int> others;
  for (int unit = 0; unit < units; ++unit)
    if (!at_an_end[unit] && !layout.on_demand(unit)) others.push_back(unit);
  const auto with = [&](std::size_t count) {
    std::vector<bool> chosen = stays;
    for (std::size_t i = 0; i < others.size(); ++i)
      chosen[others[i]] = (i + 1) * count / others.size() > i * count / others.size();
    return chosen;
  };
  std::size_t fits = 0, too_many = others.size() + 1;
  while (fits + 1 < too_many) {
    const std::size_t middle = (fits + too_many) / 2;
    (ring_with(layout, with(middle)) <= ring ? fits : too_many) = middle;
  }
  return with(fits);
}

// Units get places of their own in the weight ring: all, if it holds all of them.
void place_words(const Layout& layout, bool train, std::uint64_t all_weights, Arrangement& result) {
  const int units = static_cast<int>(layout.units().size());
  std::vector<bool> stays(units, false);
  if (result.weight_ring >= all_weights)
    for (int unit = 0; unit < units; ++unit) stays[unit] = !layout.on_demand(unit);
  else if (!train)
    stays = staying_units(layout, result.weight_ring);
  result.word_places.assign(units, kNowhere);
  std::uint64_t end = result.weight_ring;
  for (int unit = units; unit-- > 0;)
    if (stays[unit]) result.word_places[unit] = end -= layout.unit_word_bytes(unit);
}

// Bytes of the largest gradient that leaves the device: not of those that are used up there.
std::uint64_t gradient_slot(const Layout& layout, const Arrangement& result) {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks())
    if (chunk.trainable && (result.deferred[chunk.id] || !result.on_device[chunk.id]))
      bytes = std::max(bytes, round_up(chunk.word_bytes(), kSector));
  return bytes;
}

// Of one micro-batch's activations in a stage, where they are swapped.
std::uint64_t swapped_bytes(const ArrangeRequest& request, std::size_t stage) {
  return stage < request.swapped_bytes.size() ? request.swapped_bytes[stage] : 0;
}

// Every stage but the last leaves an item of each computation; the last one's forward and backward are one visit.
std::vector<Item> all_items(const std::vector<StageShape>& stages, int micro_batches) {
  std::vector<Item> items;
  for (int stage = 0; stage + 1 < static_cast<int>(stages.size()); ++stage)
    for (int micro_batch = 0; micro_batch < stages[stage].computations(micro_batches); ++micro_batch)
      items.push_back(
          {.made_by = {stage, Pass::forward, micro_batch}, .read_by = {stage, Pass::backward, micro_batch}});
  return items;
}

// How often an item's activations leave the device, of those that do not stay: to the host first, then to storage.
void choose_swaps(const ArrangeRequest& request, Arrangement& result) {
  int to_host = request.swap_to_host, to_storage = request.storage ? request.swap_to_storage : 0;
  for (std::size_t i = result.items.size(); i-- > 0;) {
    Item& item = result.items[i];
    const std::uint64_t bytes = swapped_bytes(request, item.made_by.stage);
    if (item.made_by.stage == 0 || item.activations == Activations::keep || bytes == 0) continue;
    if (to_host <= 0 && to_storage <= 0) return;
    item.activations = Activations::swap;
    item.activation_bytes = bytes;
    item.on_storage = to_host <= 0;
    --(to_host > 0 ? to_host : to_storage);
  }
}

// Rounded up, so that the number given back as an option works.
std::string size_text(std::uint64_t bytes) {
  if (bytes < std::uint64_t{16} << 20) return std::to_string((bytes + 1023) >> 10) + "KiB";
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + "MiB";
}

}  // namespace

io::Error too_small(const char* option, std::uint64_t given, std::uint64_t needed, const std::string& remedy) {
  return {.kind = io::ErrorKind::usage,
          .detail = std::string(option) + " " + size_text(given) + " is too small: the smallest that works is " +
                    size_text(needed) + "; " + remedy};
}

io::Error arrange_device(const Layout& layout, const ArrangeRequest& request, Arrangement& result) {
  const std::size_t stages = layout.stages().size();
  const DeviceNeeds needs = device_needs(layout, request.micro_batches, request.train, request.sums);
  result.weight_ring = needs.weights;
  result.gradient_ring = needs.gradient;
  result.held_gradients = needs.held;
  result.needed_ring = round_up(request.units_per_need * needs.needed_weights, kSector);
  result.needed_gradients = request.units_per_need * needs.needed_gradient;
  if (result.needed_ring != 0 && request.train && !request.sums)
    return {.kind = io::ErrorKind::usage, .detail = "units on demand take plans of single visits"};
  result.items = all_items(layout.stages(), request.micro_batches);
  const std::uint64_t fixed =
      needs.weights + needs.gradient + needs.held + result.needed_ring + result.needed_gradients + request.workspace;
  const std::uint64_t slots = needs.carries == 0 ? 0 : kSlots * needs.largest_carry;
  const std::uint64_t smallest = fixed + std::min(slots, needs.carries);
  if (request.device_budget < smallest)
    return too_small("--device-memory", request.device_budget, smallest,
                     std::string(request.micro_batches > 1 ? "fewer --micro-batches, or " : "") +
                         "a smaller --micro-batch or --sequence-length needs less");
  std::uint64_t left = request.device_budget - fixed;
  result.on_device = chunks_on_device(layout, result.deferred, request.train ? request.device_update_share : 0.0);
  const UpdateSlots updates = update_slots(layout, result, request.update_scratch);
  if (updates.count == 0 || bytes_of(updates) > request.device_budget - smallest) {
    result.on_device.assign(layout.chunks().size(), false);
  } else {
    result.update_slots = updates;
    left -= bytes_of(updates);
  }
  if (const std::uint64_t words = request.gradient_slots && request.train ? gradient_slot(layout, result) : 0;
      words != 0) {
    const std::uint64_t slot = words + round_up(request.measured_bytes, kSector), all = kGradientSlots * slot + kSector;
    if (all <= left - (smallest - fixed)) {
      result.gradient_slot = slot;
      result.measured_bytes = request.measured_bytes;
      left -= all;
    }
  }
  std::uint64_t swapped = 0;  // the largest piece that a swap may move
  for (std::size_t stage = 1; stage + 1 < stages; ++stage)
    swapped = std::max(swapped, round_up(layout.stages()[stage].carry_bytes, kSector) +
                                    round_up(swapped_bytes(request, stage), kSector));
  const bool swaps = request.train && request.swap_to_host + request.swap_to_storage > 0 &&
                     kSlots * swapped + request.swap_workspace <= left;
  if (swaps || needs.carries > left) {
    result.slots = kSlots;
    result.slot_bytes = swaps ? swapped : needs.largest_carry;
    left -= kSlots * result.slot_bytes + (swaps ? request.swap_workspace : 0);
  }
  // The last stages' inputs are the first to be read again: they stay.
  const bool all_stay = needs.carries <= left;
  std::vector<bool> input_leaves(stages, false);
  std::uint64_t of_step = 0;  // free while there is none
  for (std::size_t stage = stages - 1; stage-- > 1;) {
    const std::uint64_t bytes =
        layout.stages()[stage].carry_bytes * layout.stages()[stage].computations(request.micro_batches);
    if (needs.carries == 0) break;
    if (all_stay || bytes <= left) {
      left -= bytes;
      of_step += bytes;
    } else {
      input_leaves[stage] = true;
    }
  }
  for (Item& item : result.items)
    if (input_leaves[item.made_by.stage]) item.input_bytes = layout.stages()[item.made_by.stage].carry_bytes;
  const auto grow = [&left](std::uint64_t& pool, std::uint64_t by) {
    if (by == 0 || by > left) return false;
    pool += by;
    left -= by;
    return true;
  };
  grow(result.weight_ring, needs.block_weights);
  grow(result.gradient_ring, needs.block_gradient);
  grow(result.weight_ring, needs.block_weights);
  // The next unit on demand comes while one is computed with.
  if (!request.train) grow(result.needed_ring, round_up(needs.needed_weights, kSector));
  // Activations before more weights: a weight fetched again passes beside the computation, an activation made again is
  // computation. The last items' first, as for inputs.
  for (std::size_t i = result.items.size(); request.train && i-- > 0;) {
    const std::size_t stage = result.items[i].made_by.stage;
    if (stage == 0 || stage >= request.activation_bytes.size() || input_leaves[stage]) continue;
    std::uint64_t bytes = request.activation_bytes[stage];
    bytes += bytes / 8;  // for blocks that are reused although a little too large
    if (bytes == 0 || bytes > left) continue;
    result.items[i].activations = Activations::keep;
    left -= bytes;
    of_step += bytes;
  }
  if (swaps) {
    choose_swaps(request, result);
    if (result.count(Activations::swap) == 0) {
      ArrangeRequest without = request;
      without.swap_to_host = without.swap_to_storage = 0;
      result.slots = 0;
      result.slot_bytes = 0;
      return arrange_device(layout, without, result);
    }
  }
  if (const std::uint64_t all = needs.all_weights + needs.block_weights; result.weight_ring < all) {
    if (all - result.weight_ring > left)
      left -= std::min(left / 2, request.evaluation_workspace - std::min(request.evaluation_workspace, of_step));
    grow(result.weight_ring, std::min(left / kSector * kSector, all - result.weight_ring));
  }
  place_words(layout, request.train, needs.all_weights, result);
  if (request.state_on_device && request.train && result.weight_ring >= needs.all_weights)
    keep_state(layout, request, result, left);
  // Units on demand stay as long as their room is not needed: those that are needed again are not fetched again.
  if (const std::uint64_t all = round_up(needs.all_needed, kSector); !request.train && result.needed_ring < all)
    grow(result.needed_ring, std::min(left / kSector * kSector, all - result.needed_ring));
  return {};
}

}  // namespace tierflow::swap
