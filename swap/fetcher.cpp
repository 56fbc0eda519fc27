#include "swap/fetcher.h"

namespace tierflow::swap {

Fetcher::Fetcher(const Layout& layout, const Arrangement& arrangement, TaskEmitter& emitter)
    : layout_(layout),
      arrangement_(arrangement),
      emitter_(emitter),
      ring_(0, arrangement.weight_ring),
      needed_ring_(arrangement.needed_begin(), arrangement.needed_ring),
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

  std::vector<int> missing;
  for (const int unit : units) {
    if (owes(unit)) ring.invalidate(unit);
    if (!ring.hold(unit)) missing.push_back(unit);
  }
  std::uint64_t begin = missing.empty() ? 0 : ring.allocate(bytes_of(missing));
  if (begin == kNowhere) {
    release(units);
    if (!forced) return false;
    // What is cached stands in the way: give it up and fetch all of them into an empty ring.
    ring.clear();
    missing = units;
    begin = ring.allocate(bytes_of(missing));
  }
  emitter_.serve(visit.pass, visit.stage);
  for (const int unit : missing) {
    ring.add(unit, begin, layout_.unit_word_bytes(unit));
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = chunk.id;
      const bool owed = owes(unit) && arrangement_.deferred[id], on_device = owed && arrangement_.on_device[id];
      const HostRef words = emitter_.read(ExtentKind::hi, id);
      if (owed && !on_device) emitter_.update(id, words, emitter_.read_gradient(id, owed_[unit] == Owed::sum));
      const std::uint64_t to = begin + chunk.word_place();
      emitter_.upload(ExtentKind::hi, id, words, to);
      if (on_device) emitter_.update_on_device(id, to, kNowhere, words);
    }
    owed_[unit] = Owed::nothing;
    begin += layout_.unit_word_bytes(unit);
  }
  for (std::size_t i = 0; i < units.size(); ++i) visit.weights[first + i] = ring.find(units[i]);
  return true;
}

void Fetcher::release(const std::vector<int>& units, int holds) {
  for (const int unit : units) ring_of(unit).release(unit, holds);
}

void Fetcher::settle(int unit) {
  invalidate(unit);
  for (const Chunk& chunk : layout_.chunks_of(unit)) {
    if (!arrangement_.deferred[chunk.id]) continue;
    const HostRef words = emitter_.read(ExtentKind::hi, chunk.id);
    emitter_.update(chunk.id, words, emitter_.read_gradient(chunk.id, owed_[unit] == Owed::sum));
  }
  owed_[unit] = Owed::nothing;
}

std::uint64_t Fetcher::bytes_of(const std::vector<int>& units) const {
  std::uint64_t bytes = 0;
  for (const int unit : units) bytes += layout_.unit_word_bytes(unit);
  return bytes;
}

}  // namespace tierflow::swap
