#pragma once
// Accesses of tasks, as planners declare them.
#include "swap/plan.h"

namespace tierflow::swap {

inline Access device_access(std::uint64_t begin, std::uint64_t bytes, bool writes) {
  return {Space::device, begin, begin + bytes, writes};
}
inline Access cell_access(Space space, int index, bool writes) {
  return {space, static_cast<std::uint64_t>(index), static_cast<std::uint64_t>(index) + 1, writes};
}
inline Access host_access(HostRef ref, bool writes) {
  return cell_access(static_cast<Space>(ref.where), ref.index, writes);
}

}  // namespace tierflow::swap
