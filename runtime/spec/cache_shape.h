#pragma once
// Keys and values of the sequences that are generated at once: how much memory they take, and where those of each layer
// lie. No torch here, because plans count them.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// On storage a sequence has a piece in each layer: for each head its keys, then for each head its values. Each of these
// is a slab, whose bytes are a multiple of kSlabAlignment.
inline constexpr std::uint64_t kSlabAlignment = 4096;

struct CacheShape {
  std::int64_t sequences = 0;          // sequences at once; 0: nothing is generated
  std::uint64_t slabs = 0;             // slabs of a piece
  std::vector<std::uint64_t> in_ram;   // by stage: bytes of all sequences; 0: the stage has no attention
  std::vector<std::uint64_t> of_slab;  // by stage: bytes on storage, of the longest sequence

  // capacities: tokens of the sequences that may exist at once and take most, the longest first.
  static CacheShape of(const ModelSpec& spec, const std::vector<std::int64_t>& capacities, std::int64_t longest_span);
  std::uint64_t bytes() const { return std::accumulate(in_ram.begin(), in_ram.end(), std::uint64_t{0}); }
  std::uint64_t piece(std::size_t stage) const { return slabs * of_slab[stage]; }
};

// Where keys and values lie. Those of the first layers are in RAM. Those of the other layers are on storage, and are
// read into buffers in RAM for a visit.
struct CachePlacement {
  std::vector<bool> stored;  // by stage
  std::int64_t buffers = 0;  // each of one sequence in one layer
  std::uint64_t of_buffer = 0;
  std::uint64_t host = 0;     // bytes of RAM, buffers included
  std::uint64_t storage = 0;  // bytes

  static CachePlacement in_ram(const CacheShape& shape);
  // A placement with the last `layers` layers with attention on storage.
  static CachePlacement with_storage(const CacheShape& shape, std::int64_t layers, std::int64_t buffers);
  std::int64_t stored_layers() const { return std::ranges::count(stored, true); }
};

// One buffer for the computation, one for reading or writing.
inline constexpr std::int64_t kLeastCacheBuffers = 2;

// The placement that takes the least RAM, with storage.
CachePlacement smallest_placement(const CacheShape& shape);
// The number of layers with attention.
std::int64_t cached_layers(const CacheShape& shape);

}  // namespace tierflow
