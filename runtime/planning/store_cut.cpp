#include "runtime/planning/store_cut.h"

#include <algorithm>

namespace tierflow {

bool suits(const swap::Layout& layout, std::uint64_t host_budget) {
  constexpr std::uint64_t kFar = 8;
  const std::uint64_t near = chunk_elements_for(host_budget);
  std::size_t groups = 0;
  for (const swap::UnitShape& unit : layout.units())
    groups += static_cast<std::size_t>(std::ranges::count_if(
        unit.groups, [](const swap::GroupShape& group) { return group.elements != 0 && group.sparse_elements == 0; }));
  // Larger chunks would be fewer, but for sparse ones.
  const bool cuts = layout.chunks().size() - layout.sparse_chunks().size() > groups;
  const std::uint64_t largest = std::max(layout.max_word_bytes() / swap::word_bytes(1),
                                         std::min(layout.max_state_bytes() / 4, layout.chunk_elements()));
  return largest <= kFar * near && (!cuts || kFar * layout.chunk_elements() >= near);
}

bool stays_as_it_is(const io::Error& why) {
  return why.kind != io::ErrorKind::cancelled && why.kind != io::ErrorKind::locked;
}

}  // namespace tierflow
