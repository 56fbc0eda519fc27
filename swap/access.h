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
inline Space space_of(HostRef::Where where) {
  switch (where) {
    case HostRef::Where::word_buffer:
      return Space::word_buffer;
    case HostRef::Where::state_buffer:
      return Space::state_buffer;
    case HostRef::Where::resident_hi:
      return Space::resident_hi;
    case HostRef::Where::resident_state:
      return Space::resident_state;
    case HostRef::Where::resident_gradient:
      return Space::resident_gradient;
    case HostRef::Where::resident_gradient_low:
      return Space::resident_gradient_low;
    case HostRef::Where::activation_buffer:
      return Space::activation_buffer;
    case HostRef::Where::cached:
      return Space::cached;
    default:
      return Space::activations;
  }
}
inline Access host_access(HostRef ref, bool writes) {
  return cell_access(space_of(ref.where), ref.index, writes);
}

}  // namespace tierflow::swap
