#pragma once
// Which bytes of the device arena hold weights, which are cached until their room is needed, and which hold gradients.
// Offsets are from the beginning of the arena. Nothing here waits: tasks that reuse bytes depend on those that used
// them before.
#include <cstdint>
#include <vector>

#include "swap/plan.h"
#include "swap/unit_use.h"

namespace tierflow::swap {

// `bytes` of the arena from `begin`. A unit lies there in one piece. Units that are held stay where they are. Units
// with a place behind these bytes are known here too; only invalidate() forgets them.
class WeightRing {
 public:
  WeightRing(std::uint64_t begin, std::uint64_t bytes) : begin_(begin), end_(begin + bytes), position_(begin) {}

  // kNowhere: the unit is not there.
  std::uint64_t find(int unit) const;
  // Adds a hold on a unit; false if the unit is not there.
  bool hold(int unit);
  // Ends this many holds on a unit, or all it has if these are fewer. Does nothing for a unit that is not there.
  void release(int unit, int holds = 1);
  // Finds room beside everything that is held, and forgets what lay there. kNowhere: there is none.
  std::uint64_t allocate(std::uint64_t bytes);
  // As above, but what lies there is of little use: among all rooms beside what is held, the one whose units are used
  // least. The unit that came last stays if it can, so that two can come by turns where one is computed with. `gone`:
  // the units that are forgotten.
  std::uint64_t allocate(std::uint64_t bytes, const UnitUse& use, std::vector<int>& gone);
  // The unit lies in allocated room from now on, with one hold.
  void add(int unit, std::uint64_t begin, std::uint64_t bytes);
  // Forgets the unit, held or not: its words there are stale.
  void invalidate(int unit);
  // Forgets everything in these bytes.
  void clear();

 private:
  struct Region {
    int unit = -1;
    std::uint64_t begin = 0, end = 0;
    int holds = 0;
  };
  std::vector<Region>::iterator region_of(int unit);
  template <class Which>
  void forget(const Which& which);
  std::uint64_t least_used(std::uint64_t bytes, const UnitUse& use, int stays) const;

  std::uint64_t begin_ = 0, end_ = 0, position_ = 0;
  std::vector<Region> regions_;        // from the first byte on
  int newest_ = -1;                    // the unit that came last
  std::vector<std::uint64_t> places_;  // by unit, as far as units came: where it lies, or kNowhere
};

// `bytes` of the arena from `begin`, given out in turn. A gradient stays there until the ring comes round to it.
class GradientRing {
 public:
  GradientRing(std::uint64_t begin, std::uint64_t bytes) : begin_(begin), bytes_(bytes) {}

  std::uint64_t allocate(std::uint64_t bytes) {
    if (position_ + bytes > bytes_) position_ = 0;
    position_ += bytes;
    return begin_ + position_ - bytes;
  }

 private:
  std::uint64_t begin_ = 0, bytes_ = 0, position_ = 0;
};

}  // namespace tierflow::swap
