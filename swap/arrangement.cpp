#include "swap/arrangement.h"

namespace tierflow::swap {

bool Arrangement::resident(ExtentKind kind, int chunk) const {
  switch (kind) {
    case ExtentKind::hi:
      return hi_resident[chunk];
    case ExtentKind::state:
      return state_resident[chunk];
    case ExtentKind::gradient:
      return gradient_resident[chunk];
    case ExtentKind::gradient_low:
      return !gradient_low_resident.empty() && gradient_low_resident[chunk];
    default:
      return false;
  }
}

std::uint64_t Arrangement::saved_bytes(const Layout& layout, int item) const {
  const int stage = item / micro_batches;
  return round_up(input_leaves[stage] ? layout.stages()[stage].carry_bytes : 0, kSector) +
         (activations[item] == Activations::swap ? round_up(swapped_bytes[stage], kSector) : 0);
}

std::vector<std::uint64_t> Arrangement::stored_activations(const Layout& layout) const {
  std::vector<std::uint64_t> bytes;
  for (int item = 0; item < items(); ++item) bytes.push_back(saved_on_storage[item] ? saved_bytes(layout, item) : 0);
  return bytes;
}

std::uint64_t Arrangement::buffer_bytes(const Layout& layout) const {
  return word_buffers * layout.max_word_bytes() + state_buffers * round_up(layout.max_state_bytes(), kSector) +
         activation_buffers * slot_bytes;
}

std::uint64_t Arrangement::resident_bytes(const Layout& layout) const {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks())
    for (const ExtentKind kind : kChunkExtents)
      if (resident(kind, chunk.id)) bytes += chunk.bytes(kind);
  return bytes;
}

std::vector<HostBuffer> Arrangement::host_buffers(const Layout& layout) const {
  using Where = HostRef::Where;
  std::vector<HostBuffer> all;
  const auto add = [&](Where where, int index, std::uint64_t bytes) { all.push_back({{where, index}, bytes}); };
  for (int i = 0; i < word_buffers; ++i) add(Where::word_buffer, i, layout.max_word_bytes());
  for (int i = 0; i < state_buffers; ++i) add(Where::state_buffer, i, round_up(layout.max_state_bytes(), kSector));
  for (int i = 0; i < activation_buffers; ++i) add(Where::activation_buffer, i, slot_bytes);
  for (const Chunk& chunk : layout.chunks())
    for (const ExtentKind kind : kChunkExtents)
      if (resident(kind, chunk.id)) all.push_back({resident_place(kind, chunk.id), chunk.bytes(kind)});
  for (int item = 0; item < items(); ++item)
    if (const std::uint64_t bytes = saved_bytes(layout, item); bytes != 0 && !saved_on_storage[item])
      add(Where::activations, item, bytes);
  return all;
}

std::uint64_t Arrangement::saved_on_host(const Layout& layout) const {
  std::uint64_t bytes = 0;
  for (int item = 0; item < items(); ++item)
    if (!saved_on_storage[item]) bytes += saved_bytes(layout, item);
  return bytes;
}

}  // namespace tierflow::swap
