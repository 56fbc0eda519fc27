#include "runtime/planning/cut_extents.h"

#include <algorithm>
#include <vector>

namespace tierflow {
namespace {

// `count` elements from the unit's element `first` on, of one chunk's extent into another's.
void copy_elements(const std::vector<StatePart>& parts, const swap::Chunk& from, const std::byte* source,
                   const swap::Chunk& to, std::byte* target, std::uint64_t first, std::uint64_t count) {
  for (const StatePart& part : parts) {
    std::copy_n(source + part.size(first - from.first), part.size(count), target + part.size(first - to.first));
    source += part.size(from.elements);
    target += part.size(to.elements);
  }
}

}  // namespace

std::optional<io::Buffer> CutExtents::extent(swap::ExtentKind kind, int id) {
  const swap::Chunk& wanted = to_.chunks()[id];
  const std::uint64_t end = wanted.first + wanted.elements;
  const auto parts = kind == swap::ExtentKind::hi ? std::vector{kWordPart}
                                                  : state_parts(from_.packed.units[wanted.unit].formats[wanted.group]);
  std::optional<io::Buffer> made;
  const auto chunks = from_.layout->chunks_of(wanted.unit);
  for (auto at = std::ranges::partition_point(
           chunks, [&](const swap::Chunk& chunk) { return chunk.first + chunk.elements <= wanted.first; });
       at != chunks.end() && at->first < end; ++at) {
    if (!from_.store->holds(kind, at->id)) continue;
    if (at->first == wanted.first && at->elements == wanted.elements) return fetch(kind, at->id);
    if (last_chunk_ != at->id || last_kind_ != kind) {
      last_ = fetch(kind, at->id);
      last_kind_ = kind;
      last_chunk_ = at->id;
    }
    if (!made) {
      made = io::allocate_buffer(wanted.bytes(kind));  // zeroed
      if (!*made) throw Exception(io::ErrorKind::memory, "no memory for a chunk of the state");
    }
    const std::uint64_t first = std::max(at->first, wanted.first);
    const std::uint64_t count = std::min(at->first + at->elements, end) - first;
    copy_elements(parts, *at, last_.data(), wanted, made->data(), first, count);
  }
  return made;
}

}  // namespace tierflow
