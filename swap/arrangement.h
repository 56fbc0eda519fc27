#pragma once
// The arrangement: where everything lives and how many buffers there are. Budgets decide it, and it changes no result.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "swap/layout.h"
#include "swap/plan.h"

namespace tierflow::swap {

// The place in RAM of an extent that is resident; not of activations.
inline HostRef resident_place(ExtentKind kind, int chunk) {
  constexpr HostRef::Where kPlaces[] = {HostRef::Where::resident_hi, HostRef::Where::resident_state,
                                        HostRef::Where::resident_gradient, HostRef::Where::resident_gradient_low};
  return {kPlaces[static_cast<int>(kind)], chunk};
}

struct HostBuffer {
  HostRef place;
  std::uint64_t bytes = 0;
};

// Device memory in which a chunk is updated. A slot holds its bf16 gradient first, then its state, then the client's
// scratch.
struct UpdateSlots {
  int count = 0;
  std::uint64_t state = 0, scratch = 0, bytes = 0;  // offsets within a slot, and its size

  bool operator==(const UpdateSlots&) const = default;
};

constexpr int kGradientSlots = 2;  // one is filled while the other is copied from

// What the forward of a stage leaves for its backward: one item for each computation of the forward. What leaves the
// device for an item moves in one piece: first the stage's input, then the activations. The piece is made once and read
// once in a step. Nothing may write to it in between: the checker refuses such a plan (check.h).
struct Item {
  Computation made_by, read_by;
  Activations activations = Activations::recompute;
  std::uint64_t input_bytes = 0;       // of the stage's input; 0: it stays on the device, or there is none
  std::uint64_t activation_bytes = 0;  // of swapped activations; 0: none are swapped
  bool on_storage = false;             // the piece goes on from the host to storage

  bool operator==(const Item&) const = default;
  // Bytes of the piece; 0 if nothing leaves the device.
  std::uint64_t bytes() const { return round_up(input_bytes, kSector) + round_up(activation_bytes, kSector); }
};

struct Arrangement {
  std::vector<bool> hi_resident, state_resident, gradient_resident;  // by chunk
  std::vector<bool> gradient_low_resident;                           // by chunk; empty if no sums are kept
  bool staged = true;  // gradients wait until the global norm is known: all updates are deferred
  // By chunk: its gradient waits on the host or on storage, and its update runs ahead of its unit's next forward
  // instead of in the backward. True for trainable chunks only.
  std::vector<bool> deferred;
  int micro_batches = 1;
  int word_buffers = 0, state_buffers = 0;
  int cached_units = 0;  // so many units on demand have a place in RAM at a time; the visits decide which
  // Bytes of the device arena, in this order; the last two are those of units on demand.
  std::uint64_t weight_ring = 0, gradient_ring = 0, held_gradients = 0, needed_ring = 0, needed_gradients = 0;
  // By unit: where in the weight ring its words stay once they have come, or kNowhere: they pass through what is before
  // all these places, and stay until their room is needed. Empty: all units pass.
  std::vector<std::uint64_t> word_places;
  // The items of a stage follow one another, in the order of its computations.
  std::vector<Item> items;
  int slots = 0;  // of the device; what leaves it for an item passes through them
  std::uint64_t slot_bytes = 0;
  int activation_buffers = 0;  // of the host, each as large as a slot; what goes to storage passes through them

  std::vector<bool> on_device;  // by chunk: it is updated on the device
  UpdateSlots update_slots;     // behind what passes through `slots`
  // Bytes of each of the kGradientSlots, which lie behind the update slots. In them gradients are rounded on their way
  // to the host. 0: there are no such slots, and gradients are rounded as they are copied.
  std::uint64_t gradient_slot = 0;
  // Bytes at the end of each gradient slot for what measuring the gradient there finds. They are copied with the
  // gradient, to a host buffer of each slot. 0: the host measures.
  std::uint64_t measured_bytes = 0;
  // By chunk: where in the arena its optimizer state stays for the whole run, and where its gradient waits, as bf16, if
  // its update is deferred. Such a chunk is updated on the device. kNowhere: not on the device. Empty: no chunk is.
  std::vector<std::uint64_t> device_state, device_gradient;
  std::uint64_t device_resident = 0;  // bytes of both, at the end of the arena

  bool operator==(const Arrangement&) const = default;
  std::uint64_t device_bytes() const {
    return device_resident == 0 ? gradient_slots_end() : device_resident_begin() + device_resident;
  }
  std::uint64_t device_resident_begin() const { return round_up(gradient_slots_end(), kSector); }
  std::uint64_t gradient_slots_end() const {
    return gradient_slot == 0 ? update_slots_end() : gradient_slots_begin() + kGradientSlots * gradient_slot;
  }
  std::uint64_t gradient_slots_begin() const { return round_up(update_slots_end(), kSector); }
  std::uint64_t update_slots_end() const {
    return update_slots.count == 0
               ? slot_offset(slots)
               : update_slots_begin() + static_cast<std::uint64_t>(update_slots.count) * update_slots.bytes;
  }
  std::uint64_t update_slots_begin() const { return round_up(slot_offset(slots), kSector); }
  std::uint64_t needed_begin() const { return weight_ring + gradient_ring + held_gradients; }
  std::uint64_t slot_offset(int slot) const {
    return needed_begin() + needed_ring + needed_gradients + slot * slot_bytes;
  }
  // Whether the chunk's extent has a place in RAM for the whole run; not for activations.
  bool resident(ExtentKind kind, int chunk) const;
  // Where on the device the chunk's state, or its gradient that waits, has its place for the whole run, or kNowhere.
  std::uint64_t device_place(ExtentKind kind, int chunk) const;
  // Where the unit's words stay on the device once they have come, or kNowhere.
  std::uint64_t word_place(int unit) const { return word_places.empty() ? kNowhere : word_places[unit]; }
  // Bytes at the beginning of the weight ring through which the units without a place pass.
  std::uint64_t passing_ring() const {
    std::uint64_t bytes = weight_ring;
    for (const std::uint64_t place : word_places) bytes = std::min(bytes, place);
    return bytes;
  }
  // Whether the chunk's extent has a place in RAM or on the device for the whole run. All others are on storage.
  bool stays(ExtentKind kind, int chunk) const {
    return resident(kind, chunk) || device_place(kind, chunk) != kNowhere;
  }
  // Part of a slot for a unit on demand: the place of the chunk with that index in its unit.
  HostRef cached_place(const Layout& layout, int slot, int index) const {
    return {HostRef::Where::cached, slot * static_cast<int>(layout.on_demand_bytes().size()) + index};
  }
  std::uint64_t measured_buffer_bytes() const { return round_up(measured_bytes, kSector); }
  std::uint64_t buffer_bytes(const Layout& layout) const;
  std::uint64_t resident_bytes(const Layout& layout) const;
  std::uint64_t cached_bytes(const Layout& layout) const;
  std::uint64_t saved_on_host() const;
  // How many items do this with their activations.
  std::ptrdiff_t count(Activations activations) const;
  // Of how many stages the input leaves the device.
  int inputs_that_leave() const;
  // By item, as ScratchOptions::activation_bytes.
  std::vector<std::uint64_t> stored_activations() const;
  std::uint64_t host_bytes(const Layout& layout) const {
    return buffer_bytes(layout) + resident_bytes(layout) + cached_bytes(layout) + saved_on_host();
  }
  // All host memory that a run takes, buffer by buffer in the order in which it lies there: host_bytes() in sum. Sizes
  // are multiples of kSector. Streaming buffers come first, each kind in the order of their indices.
  std::vector<HostBuffer> host_buffers(const Layout& layout) const;
};

}  // namespace tierflow::swap
