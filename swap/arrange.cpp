// Budgets into an arrangement: first what must be there, then what makes the pipeline overlap, then residency with the
// rest.
#include "swap/arrange.h"

#include <algorithm>
#include <numeric>

#include "swap/arrange_device.h"

namespace tierflow::swap {
namespace {

constexpr int kStateBuffers = 2;  // of state that stays on the device, on its way to and from a commit
constexpr int kActivationBuffers = 4, kFewestActivationBuffers = 1;

// A share of the trainable elements by whole chunks, spread evenly: each unit then leaves as much for its next forward
// as any other, so that neither pass has the lanes idle while the other waits for them.
std::vector<bool> deferred_chunks(const Layout& layout, double share) {
  std::vector<bool> deferred(layout.chunks().size(), false);
  double rest = 0;
  for (std::size_t id = deferred.size(); id-- > 0;) {
    const Chunk& chunk = layout.chunks()[id];
    if (!chunk.trainable) continue;
    const auto elements = static_cast<double>(chunk.elements);
    rest += share * elements;
    deferred[id] = share >= 1 || (share > 0 && 2 * rest >= elements);
    if (deferred[id]) rest -= elements;
  }
  return deferred;
}

bool any_on_storage(const Arrangement& arrangement) {
  return std::ranges::any_of(arrangement.items, &Item::on_storage);
}

// Where `budget` has no room for what is saved beside `buffers`, the first stages' goes on to storage, through buffers
// of its own.
void move_to_storage(std::uint64_t budget, std::uint64_t buffers, Arrangement& result) {
  std::uint64_t saved = result.saved_on_host();
  const auto fits = [&](int through) { return buffers + saved + through * result.slot_bytes <= budget; };
  result.activation_buffers = any_on_storage(result) ? kActivationBuffers : 0;
  if (fits(result.activation_buffers) || (!any_on_storage(result) && saved <= result.slot_bytes)) return;
  result.activation_buffers = kFewestActivationBuffers;
  for (Item& item : result.items) {
    if (fits(result.activation_buffers)) break;
    if (item.on_storage || item.bytes() == 0) continue;
    item.on_storage = true;
    saved -= item.bytes();
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
  const std::uint64_t aside = request.host_workspace + kGradientSlots * result.measured_buffer_bytes(),
                      host_budget = request.host_budget - std::min(request.host_budget, aside);
  const auto on_device = [&](ExtentKind kind, const Chunk& chunk) {
    return result.device_place(kind, chunk.id) != kNowhere;
  };

  // Host: the fewest buffers that work, host carries; then residency of everything, or a pipeline's worth of buffers
  // and residency.
  const std::uint64_t word = layout.max_word_bytes(), state = round_up(layout.max_state_bytes(), kSector);
  std::uint64_t everything = result.saved_on_host();
  if (any_on_storage(result)) everything += kActivationBuffers * result.slot_bytes;
  for (const Chunk& chunk : layout.chunks()) {
    everything += chunk.word_bytes();
    if (!request.train) continue;
    if (!on_device(ExtentKind::state, chunk)) everything += chunk.state_bytes;
    everything += (request.sums && chunk.trainable ? chunk.word_bytes() : 0);
  }
  for (const Chunk& chunk : layout.chunks())
    if (result.deferred[chunk.id] && !on_device(ExtentKind::gradient, chunk)) everything += chunk.word_bytes();
  const int through = result.device_resident == 0 ? 0 : kStateBuffers;
  everything += through * state;
  const int immediate_words = request.train && (!defers_all || request.sums) ? 2 : 0;
  everything += immediate_words * word;
  if (everything <= host_budget) {
    for (std::size_t id = 0; id < chunks; ++id) {
      const Chunk& chunk = layout.chunks()[id];
      const bool trained = chunk.trainable && request.train;
      result.hi_resident[id] = true;
      result.state_resident[id] =
          (trained || (request.train && chunk.state_bytes != 0)) && !on_device(ExtentKind::state, chunk);
      result.gradient_resident[id] = result.deferred[id] && !on_device(ExtentKind::gradient, chunk);
      if (request.sums) result.gradient_low_resident[id] = trained;
    }
    result.word_buffers = immediate_words;
    result.state_buffers = through;
    if (any_on_storage(result)) result.activation_buffers = kActivationBuffers;
    if (request.train && !defers_all && everything + 2 * word <= host_budget) result.word_buffers += 2;
    return result;
  }
  if (!request.storage && !request.staged && request.deferred_share > 0) {
    ArrangeRequest at_once = request;
    at_once.deferred_share = 0;
    return arrange(layout, at_once);
  }
  if (!request.storage)
    return too_small("--host-memory", request.host_budget, everything + aside,
                     "or name a --storage folder to keep the state there");
  const int words_least = request.sums ? 4 : request.train ? 2 : 1, states_least = request.train ? 1 : 0;
  const std::uint64_t buffers = words_least * word + states_least * state;
  move_to_storage(host_budget, buffers, result);
  const std::uint64_t least = buffers + result.saved_on_host() + result.activation_buffers * result.slot_bytes;
  if (least > host_budget)
    return too_small("--host-memory", request.host_budget, least + aside,
                     "a smaller --micro-batch moves smaller activations through it");
  std::uint64_t host_left = host_budget - least;
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
  // the rest of the state read and written once. Frozen words come last: they are read twice, and a drive that only
  // reads does not wear.
  // Units on demand and sparse chunks come behind all others: they are read only when they are needed. Words that stay
  // on the device, and are not trained, come last: they are read once.
  enum class Turn : std::uint8_t { always_read, on_demand, read_once };
  Turn turn = Turn::always_read;
  const auto turn_of = [&](const Chunk& chunk) {
    if (layout.on_demand(chunk.unit) || chunk.sparse) return Turn::on_demand;
    return !request.train && result.word_place(chunk.unit) != kNowhere ? Turn::read_once : Turn::always_read;
  };
  const auto keep = [&](std::vector<bool>& resident, bool trainable, auto bytes_of) {
    for (std::size_t id = 0; id < chunks; ++id) {
      const Chunk& chunk = layout.chunks()[id];
      if (turn_of(chunk) != turn) continue;
      const std::uint64_t bytes = chunk.trainable == trainable ? bytes_of(chunk) : 0;
      if (bytes == 0 || bytes > host_left) continue;
      resident[id] = true;
      host_left -= bytes;
    }
  };
  const auto words = [](const Chunk& chunk) { return chunk.word_bytes(); };
  // But where nothing is trained, units on demand share slots: those that are used most have them.
  const bool in_slots = !request.train && !layout.on_demand_bytes().empty();
  for (const Turn next : {Turn::always_read, Turn::on_demand, Turn::read_once}) {
    turn = next;
    if (turn == Turn::on_demand && in_slots) {
      result.cached_units = 1;
      const std::uint64_t slot = result.cached_bytes(layout);
      std::uint64_t all = 0;
      for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) all += layout.on_demand(unit) ? 1 : 0;
      result.cached_units = static_cast<int>(std::min(host_left / slot, all));
      host_left -= static_cast<std::uint64_t>(result.cached_units) * slot;
      continue;
    }
    keep(result.hi_resident, true, words);
    keep(result.gradient_resident, true, [&](const Chunk& chunk) {
      return result.deferred[chunk.id] && !on_device(ExtentKind::gradient, chunk) ? chunk.word_bytes() : 0;
    });
    if (request.sums) keep(result.gradient_low_resident, true, words);
    if (request.train)
      keep(result.state_resident, true,
           [&](const Chunk& chunk) { return on_device(ExtentKind::state, chunk) ? 0 : chunk.state_bytes; });
    keep(result.hi_resident, false, words);
  }
  return result;
}

}  // namespace tierflow::swap
