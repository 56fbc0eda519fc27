#include "swap/device_rings.h"

#include <algorithm>

namespace tierflow::swap {

std::vector<WeightRing::Region>::iterator WeightRing::region_of(int unit) {
  return std::ranges::find(regions_, unit, &Region::unit);
}

std::uint64_t WeightRing::find(int unit) const {
  const auto found = std::ranges::find(regions_, unit, &Region::unit);
  return found == regions_.end() ? kNowhere : found->begin;
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
    std::erase_if(regions_, overlaps);
    position_ = begin + bytes;
    return begin;
  }
  return kNowhere;
}

void WeightRing::add(int unit, std::uint64_t begin, std::uint64_t bytes) {
  regions_.push_back({.unit = unit, .begin = begin, .end = begin + bytes, .holds = 1});
}

void WeightRing::invalidate(int unit) {
  std::erase_if(regions_, [&](const Region& region) { return region.unit == unit; });
}

void WeightRing::clear() {
  regions_.clear();
  position_ = begin_;
}

}  // namespace tierflow::swap
