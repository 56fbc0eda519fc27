#include "swap/fetcher.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {
namespace {

// A unit that leaves the device takes one part of so many from what is known of others.
constexpr std::uint64_t kForgets = 16;

}  // namespace

Fetcher::Fetcher(const Layout& layout, const Arrangement& arrangement, TaskEmitter& emitter)
    : layout_(layout),
      arrangement_(arrangement),
      emitter_(emitter),
      ring_(0, arrangement.passing_ring()),
      needed_ring_(arrangement.needed_begin(), arrangement.needed_ring),
      use_(layout),
      cache_(layout, arrangement),
      owed_(layout.units().size(), Owed::nothing) {}

bool Fetcher::fetch(Visit& visit, bool forced) {
  const StageShape& stage = layout_.stages()[visit.stage];
  const bool on_demand = !visit.needed.empty();
  const std::vector<int>& units = on_demand ? visit.needed : stage.units;
  WeightRing& ring = on_demand ? needed_ring_ : ring_;
  const std::size_t first = on_demand ? stage.units.size() : 0;
  visit.weights.resize(first);
  visit.weights.resize(first + units.size(), kNowhere);
  visit.gradients.resize(first);
  visit.gradients.resize(first + units.size(), kNowhere);
  visit.fresh_gradient.resize(first);
  visit.fresh_gradient.resize(first + units.size(), false);
  if (!on_demand && visit.pass == Pass::backward && !stage.backward_needs_weights) return true;

  for (const int unit : units)
    if (owes(unit) && !updates_in_place(unit)) ring.invalidate(unit);
  // Units with a place of their own need no room.
  const auto hold = [&] {
    std::vector<int> passing;
    for (const int unit : units)
      if (!ring.hold(unit) && arrangement_.word_place(unit) == kNowhere) passing.push_back(unit);
    return passing;
  };
  std::vector<int> passing = hold();
  std::uint64_t begin = passing.empty() ? 0
                        : on_demand     ? allocate_needed(bytes_of(passing))
                                        : ring.allocate(bytes_of(passing));
  if (begin == kNowhere) {
    release(units);
    if (!forced) return false;
    // What is cached stands in the way: give it up and fetch all that pass into an empty ring.
    ring.clear();
    passing = hold();
    begin = ring.allocate(bytes_of(passing));
  }
  emitter_.serve(visit.pass, visit.stage);
  for (const int unit : units) {
    std::uint64_t at = ring.find(unit);
    const bool there = at != kNowhere;
    if (there && !owes(unit)) continue;
    if (!there) {
      at = arrangement_.word_place(unit);
      if (at == kNowhere) at = std::exchange(begin, begin + layout_.unit_word_bytes(unit));
      ring.add(unit, at, layout_.unit_word_bytes(unit));
    }
    const Slot slot = there ? Slot{} : slot_of(unit);
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = chunk.id;
      const bool owed = owes(unit) && arrangement_.deferred[id] && sparse_.owes(chunk),
                 on_device = owed && arrangement_.on_device[id], missed = sparse_.catches_up(chunk),
                 comes = !there && sparse_.uses(chunk);
      if (!comes && !owed && !missed) continue;
      const HostRef words = there ? emitter_.place(ExtentKind::hi, id) : bring(chunk, slot);
      if (owed && !on_device) emitter_.update(id, words, emitter_.read_gradient(id, owed_[unit] == Owed::sum));
      if (missed) emitter_.catch_up(id, words);
      const std::uint64_t to = at + chunk.word_place();
      if (comes) emitter_.upload(ExtentKind::hi, id, words, to);
      if (on_device) emitter_.update_on_device(id, to, kNowhere, words);
    }
    owed_[unit] = Owed::nothing;
  }
  for (std::size_t i = 0; i < units.size(); ++i) visit.weights[first + i] = ring.find(units[i]);
  return true;
}

std::uint64_t Fetcher::allocate_needed(std::uint64_t bytes) {
  std::vector<int> gone;
  const std::uint64_t begin = needed_ring_.allocate(bytes, use_, gone);
  for (const int unit : gone) leaving_ = std::max(leaving_ - leaving_ / kForgets, use_.of(unit));
  return begin;
}

Fetcher::Slot Fetcher::slot_of(int unit) {
  if (!layout_.on_demand(unit) || arrangement_.cached_units == 0) return {};
  if (const int slot = cache_.find(unit); slot != -1) return {.index = slot, .has_words = true};
  return {.index = cache_.admit(unit, [this](int other) { return worth_in_ram(other); })};
}

HostRef Fetcher::bring(const Chunk& chunk, Slot slot) {
  if (slot.index == -1) return emitter_.read(ExtentKind::hi, chunk.id);
  const HostRef place = arrangement_.cached_place(layout_, slot.index, chunk.index);
  return slot.has_words ? place : emitter_.read_into(ExtentKind::hi, chunk.id, place);
}

// What is used so much that it stays on the device need not be in RAM too.
std::uint64_t Fetcher::worth_in_ram(int unit) const {
  return needed_ring_.find(unit) != kNowhere && use_.of(unit) > leaving_ ? 0 : use_.of(unit);
}

bool Fetcher::updates_in_place(int unit) const {
  return std::ranges::all_of(layout_.chunks_of(unit), [&](const Chunk& chunk) {
    return !arrangement_.deferred[chunk.id] || arrangement_.on_device[chunk.id];
  });
}

// Whether some of what the unit owes can be applied on the device alone.
bool Fetcher::updates_there(int unit) const {
  return std::ranges::any_of(layout_.chunks_of(unit), [&](const Chunk& chunk) {
    return arrangement_.deferred[chunk.id] && arrangement_.device_place(ExtentKind::state, chunk.id) != kNowhere;
  });
}

void Fetcher::release(const std::vector<int>& units, int holds) {
  for (const int unit : units) ring_of(unit).release(unit, holds);
}

void Fetcher::apply_owed(int unit) {
  if (!owes(unit)) return;
  const int user = layout_.first_user(unit);
  if (updates_there(unit)) {
    Visit visit{.stage = user};
    fetch(visit, /*forced=*/true);
    return release(layout_.stages()[user].units);
  }
  invalidate(unit);
  for (const Chunk& chunk : layout_.chunks_of(unit)) {
    if (!arrangement_.deferred[chunk.id] || !sparse_.owes(chunk)) continue;
    const HostRef words = emitter_.read(ExtentKind::hi, chunk.id);
    emitter_.update(chunk.id, words, emitter_.read_gradient(chunk.id, owed_[unit] == Owed::sum));
  }
  owed_[unit] = Owed::nothing;
}

void Fetcher::catch_up() {
  for (const int id : layout_.sparse_chunks()) {
    const Chunk& chunk = layout_.chunks()[id];
    if (sparse_.catches_up(chunk)) emitter_.catch_up(id, emitter_.read(ExtentKind::hi, id));
  }
}

void Fetcher::set_sparse(SparseChunks sparse) {
  const bool whole = sparse_.used.empty() && sparse_.missed.empty() && sparse.used.empty() && sparse.missed.empty();
  sparse_ = std::move(sparse);
  if (whole) return;
  for (const int id : layout_.sparse_chunks()) invalidate(layout_.chunks()[id].unit);
}

std::uint64_t Fetcher::bytes_of(const std::vector<int>& units) const {
  std::uint64_t bytes = 0;
  for (const int unit : units) bytes += layout_.unit_word_bytes(unit);
  return bytes;
}

}  // namespace tierflow::swap
