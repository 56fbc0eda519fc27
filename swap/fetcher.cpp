#include "swap/fetcher.h"

namespace tierflow::swap {

Fetcher::Fetcher(const Layout& layout, const Arrangement& arrangement, TaskEmitter& emitter)
    : layout_(layout),
      arrangement_(arrangement),
      emitter_(emitter),
      ring_(arrangement.weight_ring),
      owed_(layout.units().size(), Owed::nothing) {}

bool Fetcher::fetch(Visit& visit, bool forced) {
  const StageShape& stage = layout_.stages()[visit.stage];
  visit.weights.assign(stage.units.size(), kNowhere);
  visit.gradients.assign(stage.units.size(), kNowhere);
  visit.fresh_gradient.assign(stage.units.size(), false);
  if (visit.pass == Pass::backward && !stage.backward_needs_weights) return true;

  std::vector<int> missing;
  for (const int unit : stage.units) {
    if (owes(unit)) ring_.invalidate(unit);
    if (!ring_.hold(unit)) missing.push_back(unit);
  }
  std::uint64_t begin = missing.empty() ? 0 : ring_.allocate(bytes_of(missing));
  if (begin == kNowhere) {
    release(visit.stage);
    if (!forced) return false;
    // What is cached stands in the way: give it up and fetch the whole stage into an empty ring.
    ring_.clear();
    missing = stage.units;
    begin = ring_.allocate(bytes_of(missing));
  }
  emitter_.serve(visit.pass, visit.stage);
  for (const int unit : missing) {
    ring_.add(unit, begin, 2 * layout_.unit_elements(unit));
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = chunk.id;
      const bool owed = owes(unit) && arrangement_.deferred[id], on_device = owed && arrangement_.on_device[id];
      const HostRef words = emitter_.read(ExtentKind::hi, id);
      if (owed && !on_device) emitter_.update(id, words, emitter_.read_gradient(id, owed_[unit] == Owed::sum));
      const std::uint64_t to = begin + 2 * chunk.first;
      emitter_.upload(ExtentKind::hi, id, words, to);
      if (on_device) emitter_.update_on_device(id, to, kNowhere, words);
    }
    owed_[unit] = Owed::nothing;
    begin += 2 * layout_.unit_elements(unit);
  }
  for (std::size_t i = 0; i < stage.units.size(); ++i) visit.weights[i] = ring_.find(stage.units[i]);
  return true;
}

void Fetcher::release(int stage, int holds) {
  for (const int unit : layout_.stages()[stage].units) ring_.release(unit, holds);
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
  for (const int unit : units) bytes += 2 * layout_.unit_elements(unit);
  return bytes;
}

}  // namespace tierflow::swap
