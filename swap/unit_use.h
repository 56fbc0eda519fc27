#pragma once
// How much the units on demand are used, and which of them have a place in RAM because of it. The same visits and needs
// always give the same decisions. They change what is moved, never what is computed.
#include <cstdint>
#include <vector>

#include "swap/arrangement.h"
#include "swap/layout.h"

namespace tierflow::swap {

// A visit that needs a unit adds a fixed amount to its use. Each visit of its stage first takes away a part of the use,
// so that what was long ago counts little.
class UnitUse {
 public:
  explicit UnitUse(const Layout& layout) : layout_(layout), use_(layout.units().size(), 0) {}

  // A visit of the stage needs these of its units on demand.
  void count(int stage, const std::vector<int>& needed);
  std::uint64_t of(int unit) const { return use_[unit]; }

 private:
  const Layout& layout_;
  std::vector<std::uint64_t> use_;  // by unit
};

// Which units on demand have a slot in RAM (Arrangement::cached_units).
class UnitCache {
 public:
  UnitCache(const Layout& layout, const Arrangement& arrangement)
      : units_(arrangement.cached_units, -1), slots_(layout.units().size(), -1) {}

  // The slot with the unit's words; -1: there is none.
  int find(int unit) const { return slots_[unit]; }
  // A slot for the words of a unit that has none, if one is empty, or if a unit that has one is worth less. That unit
  // then loses it. -1: all that have one are worth as much.
  template <class Worth>
  int admit(int unit, const Worth& worth);
  void drop(int unit) {
    if (const int slot = slots_[unit]; slot != -1) units_[slot] = slots_[unit] = -1;
  }

 private:
  std::vector<int> units_;  // by slot; -1: it is empty
  std::vector<int> slots_;  // by unit
};

template <class Worth>
int UnitCache::admit(int unit, const Worth& worth) {
  int slot = -1;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    if (units_[i] == -1) {
      slot = i;
      break;
    }
    const auto less = [&](int a, int b) { return worth(a) != worth(b) ? worth(a) < worth(b) : a > b; };
    if (slot == -1 || less(units_[i], units_[slot])) slot = i;
  }
  if (slot == -1 || (units_[slot] != -1 && worth(units_[slot]) >= worth(unit))) return -1;
  if (units_[slot] != -1) slots_[units_[slot]] = -1;
  units_[slot] = unit;
  slots_[unit] = slot;
  return slot;
}

}  // namespace tierflow::swap
