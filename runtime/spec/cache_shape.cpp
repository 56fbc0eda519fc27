#include "runtime/spec/cache_shape.h"

#include "runtime/spec/generation_shape.h"

namespace tierflow {

CacheShape CacheShape::of(const ModelSpec& spec, const std::vector<std::int64_t>& capacities,
                          std::int64_t longest_span) {
  const ModelConfig& c = spec.config;
  constexpr std::int64_t kWord = 2;
  CacheShape shape{.sequences = std::ssize(capacities),
                   .slabs = static_cast<std::uint64_t>(2 * c.kv_heads),
                   .in_ram = std::vector<std::uint64_t>(spec.stages.size()),
                   .of_slab = std::vector<std::uint64_t>(spec.stages.size())};
  for (std::size_t stage = 0; stage < spec.stages.size(); ++stage) {
    if (!has_keys_and_values(spec, static_cast<int>(stage))) continue;
    const std::int64_t reach = c.layer(spec.stages[stage].block).reach();
    for (const std::int64_t capacity : capacities) {
      const auto head = static_cast<std::uint64_t>(kept_tokens(capacity, reach, longest_span) * c.head_dim * kWord);
      shape.in_ram[stage] += shape.slabs * head;
      shape.of_slab[stage] =
          std::max(shape.of_slab[stage], (head + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment);
    }
  }
  return shape;
}

CachePlacement CachePlacement::in_ram(const CacheShape& shape) {
  return {.stored = std::vector<bool>(shape.in_ram.size(), false), .host = shape.bytes()};
}

CachePlacement CachePlacement::with_storage(const CacheShape& shape, std::int64_t layers, std::int64_t buffers) {
  CachePlacement placement = in_ram(shape);
  placement.buffers = buffers;
  for (std::size_t stage = shape.in_ram.size(); stage-- > 0 && layers > 0;) {
    if (shape.in_ram[stage] == 0) continue;
    --layers;
    placement.stored[stage] = true;
    placement.of_buffer = std::max(placement.of_buffer, shape.piece(stage));
    placement.host -= shape.in_ram[stage];
    placement.storage += static_cast<std::uint64_t>(shape.sequences) * shape.piece(stage);
  }
  placement.host += static_cast<std::uint64_t>(buffers) * placement.of_buffer;
  return placement;
}

std::int64_t cached_layers(const CacheShape& shape) {
  return std::ranges::count_if(shape.in_ram, [](std::uint64_t bytes) { return bytes != 0; });
}

CachePlacement smallest_placement(const CacheShape& shape) {
  return CachePlacement::with_storage(shape, cached_layers(shape), kLeastCacheBuffers);
}

}  // namespace tierflow
