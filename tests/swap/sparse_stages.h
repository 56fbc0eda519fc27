#pragma once
#include "swap/layout.h"

namespace tierflow::swap {

// Two stages with a unit of two chunks each, and sparse chunks beside those of the first.
inline Layout sparse_stages() {
  const GroupShape dense{.elements = 80 * 1024, .state_bytes_element = 4, .precision = "a"};
  GroupShape sparse = dense;
  sparse.elements = 2 * kSparseQuantum;
  sparse.sparse_elements = kSparseQuantum;
  return {{{.name = "first", .groups = {dense, sparse}}, {.name = "last", .groups = {dense}}},
          {{.units = {0}}, {.units = {1}, .carry_bytes = kSector}},
          kChunkQuantum};
}

}  // namespace tierflow::swap
