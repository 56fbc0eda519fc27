#include "swap/device_rings.h"

#include <algorithm>

namespace tierflow::swap {

std::vector<WeightRing::Region>::iterator WeightRing::region_of(int unit) {
  return find(unit) == kNowhere ? regions_.end() : std::ranges::lower_bound(regions_, find(unit), {}, &Region::begin);
}

template <class Which>
void WeightRing::forget(const Which& which) {
  std::erase_if(regions_, [&](const Region& region) {
    if (!which(region)) return false;
    places_[region.unit] = kNowhere;
    return true;
  });
}

std::uint64_t WeightRing::find(int unit) const {
  return static_cast<std::size_t>(unit) < places_.size() ? places_[unit] : kNowhere;
}

bool WeightRing::hold(int unit) {
  const auto found = region_of(unit);
  if (found != regions_.end()) ++found->holds;
  return found != regions_.end();
}

void WeightRing::release(int unit, int holds) {
  if (const auto found = region_of(unit); found != regions_.end()) found->holds = std::max(0, found->holds - holds);
}

std::uint64_t WeightRing::allocate(std::uint64_t bytes) {
  for (const std::uint64_t begin : {position_, begin_}) {
    if (begin + bytes > end_) continue;
    const auto overlaps = [&](const Region& region) { return region.begin < begin + bytes && begin < region.end; };
    if (std::ranges::any_of(regions_, [&](const Region& region) { return region.holds > 0 && overlaps(region); }))
      continue;
    forget(overlaps);
    position_ = begin + bytes;
    return begin;
  }
  return kNowhere;
}

std::uint64_t WeightRing::allocate(std::uint64_t bytes, const UnitUse& use, std::vector<int>& gone) {
  std::uint64_t begin = least_used(bytes, use, newest_);
  if (begin == kNowhere) begin = least_used(bytes, use, -1);
  if (begin == kNowhere) return kNowhere;
  forget([&](const Region& region) {
    const bool overlaps = region.begin < begin + bytes && begin < region.end;
    if (overlaps) gone.push_back(region.unit);
    return overlaps;
  });
  return begin;
}

// Rooms begin where the ring does, or where something begins or ends.
std::uint64_t WeightRing::least_used(std::uint64_t bytes, const UnitUse& use, int stays) const {
  std::uint64_t best = kNowhere, least = 0;
  int last = -1;  // the highest number of a unit in the best room
  const auto look_at = [&](std::uint64_t begin, std::size_t first) {
    if (begin + bytes > end_) return;
    std::uint64_t used = 0;
    int highest = -1;
    for (std::size_t i = first; i < regions_.size() && regions_[i].begin < begin + bytes; ++i) {
      const Region& region = regions_[i];
      if (region.end <= begin) continue;
      if (region.holds > 0 || region.unit == stays) return;
      used += use.of(region.unit) + 1;
      highest = std::max(highest, region.unit);
    }
    if (best != kNowhere && (used > least || (used == least && highest <= last))) return;
    best = begin;
    least = used;
    last = highest;
  };
  look_at(begin_, 0);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    look_at(regions_[i].begin, i);
    look_at(regions_[i].end, i + 1);
  }
  return best;
}

void WeightRing::add(int unit, std::uint64_t begin, std::uint64_t bytes) {
  const auto behind = std::ranges::upper_bound(regions_, begin, {}, &Region::begin);
  regions_.insert(behind, {.unit = unit, .begin = begin, .end = begin + bytes, .holds = 1});
  newest_ = unit;
  places_.resize(std::max<std::size_t>(places_.size(), unit + 1), kNowhere);
  places_[unit] = begin;
}

void WeightRing::invalidate(int unit) {
  forget([&](const Region& region) { return region.unit == unit; });
}

void WeightRing::clear() {
  forget([this](const Region& region) { return region.begin < end_; });
  position_ = begin_;
}

}  // namespace tierflow::swap
