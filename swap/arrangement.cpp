#include "swap/arrangement.h"

#include <algorithm>
#include <numeric>

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

std::uint64_t Arrangement::device_place(ExtentKind kind, int chunk) const {
  if (device_resident == 0 || (kind != ExtentKind::state && kind != ExtentKind::gradient)) return kNowhere;
  return (kind == ExtentKind::state ? device_state : device_gradient)[chunk];
}

std::vector<std::uint64_t> Arrangement::stored_activations() const {
  std::vector<std::uint64_t> bytes;
  for (const Item& item : items) bytes.push_back(item.on_storage ? item.bytes() : 0);
  return bytes;
}

std::uint64_t Arrangement::buffer_bytes(const Layout& layout) const {
  return word_buffers * layout.max_word_bytes() + state_buffers * round_up(layout.max_state_bytes(), kSector) +
         activation_buffers * slot_bytes + kGradientSlots * measured_buffer_bytes();
}

std::uint64_t Arrangement::resident_bytes(const Layout& layout) const {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks())
    for (const ExtentKind kind : kChunkExtents)
      if (resident(kind, chunk.id)) bytes += chunk.bytes(kind);
  return bytes;
}

std::uint64_t Arrangement::cached_bytes(const Layout& layout) const {
  const std::vector<std::uint64_t>& parts = layout.on_demand_bytes();
  return cached_units * std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
}

std::vector<HostBuffer> Arrangement::host_buffers(const Layout& layout) const {
  using Where = HostRef::Where;
  std::vector<HostBuffer> all;
  const auto add = [&](Where where, int index, std::uint64_t bytes) { all.push_back({{where, index}, bytes}); };
  for (int i = 0; i < word_buffers; ++i) add(Where::word_buffer, i, layout.max_word_bytes());
  for (int i = 0; i < state_buffers; ++i) add(Where::state_buffer, i, round_up(layout.max_state_bytes(), kSector));
  for (int i = 0; i < activation_buffers; ++i) add(Where::activation_buffer, i, slot_bytes);
  for (int i = 0; measured_bytes != 0 && i < kGradientSlots; ++i)
    add(Where::measured_buffer, i, measured_buffer_bytes());
  for (const Chunk& chunk : layout.chunks())
    for (const ExtentKind kind : kChunkExtents)
      if (resident(kind, chunk.id)) all.push_back({resident_place(kind, chunk.id), chunk.bytes(kind)});
  const int parts = static_cast<int>(layout.on_demand_bytes().size());
  for (int slot = 0; slot < cached_units; ++slot)
    for (int part = 0; part < parts; ++part)
      all.push_back({cached_place(layout, slot, part), layout.on_demand_bytes()[part]});
  for (std::size_t i = 0; i < items.size(); ++i)
    if (items[i].bytes() != 0 && !items[i].on_storage) add(Where::activations, static_cast<int>(i), items[i].bytes());
  return all;
}

std::uint64_t Arrangement::saved_on_host() const {
  std::uint64_t bytes = 0;
  for (const Item& item : items)
    if (!item.on_storage) bytes += item.bytes();
  return bytes;
}

std::ptrdiff_t Arrangement::count(Activations activations) const {
  return std::ranges::count(items, activations, &Item::activations);
}

int Arrangement::inputs_that_leave() const {
  return static_cast<int>(std::ranges::count_if(
      items, [](const Item& item) { return item.made_by.micro_batch == 0 && item.input_bytes != 0; }));
}

}  // namespace tierflow::swap
