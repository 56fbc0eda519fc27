#pragma once
// What the update of one chunk on the device leaves for the host to read: a report for each piece of a tensor, partial
// sums of the gradient's squares, and whether all of the gradient was finite.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "optim/adamw.h"
#include "optim/adamw_device.h"
#include "runtime/spec/packing.h"
#include "swap/device.h"

namespace tierflow {

struct UpdateScratch {
  UpdateScratch(std::size_t pieces, std::uint64_t elements)
      : segments((elements + optim::kNormSegment - 1) / optim::kNormSegment),
        sums(pieces * sizeof(optim::DeviceReport)),
        not_finite(sums + segments * sizeof(double)),
        bytes(not_finite + sizeof(std::uint64_t)) {}

  // Reports lie at the beginning.
  optim::DeviceReport* reports_at(std::byte* scratch) const { return reinterpret_cast<optim::DeviceReport*>(scratch); }
  double* sums_at(std::byte* scratch) const { return reinterpret_cast<double*>(scratch + sums); }
  std::uint32_t* not_finite_at(std::byte* scratch) const {
    return reinterpret_cast<std::uint32_t*>(scratch + not_finite);
  }

  std::size_t segments, sums, not_finite, bytes;
};

// The layout of what measuring a chunk's gradient finds: its sums and whether it is finite, without reports.
inline UpdateScratch measured_of(std::uint64_t elements) {
  return {0, elements};
}
// Measures a gradient of bf16 words where the queue computes: leaves its sums, and whether it is not finite, in
// `found`, which `at` describes. On a GPU this enqueues. Throws what optim throws.
inline void measure_gradient(const swap::DeviceQueue& queue, const std::uint16_t* gradient, std::uint64_t elements,
                             const UpdateScratch& at, std::byte* found) {
  if (queue.device == swap::DeviceQueue::kHost)
    *at.not_finite_at(found) = optim::gradient_norm_squared(gradient, elements, at.sums_at(found)) ? 0 : 1;
  else
    optim::gradient_norm_squared_on_device(gradient, elements, at.sums_at(found), at.not_finite_at(found),
                                           {.device = queue.device, .stream = queue.stream});
}
inline std::uint64_t measured_bytes(const swap::Layout& layout) {
  std::uint64_t most = 0;
  for (const swap::Chunk& chunk : layout.chunks())
    if (chunk.trainable) most = std::max<std::uint64_t>(most, measured_of(chunk.elements).bytes);
  return most;
}

// What the most demanding chunk needs.
inline std::uint64_t update_scratch_bytes(const PackedModel& model, const swap::Layout& layout) {
  std::uint64_t most = 0;
  for (const swap::Chunk& chunk : layout.chunks())
    most = std::max<std::uint64_t>(most, UpdateScratch(pieces_of(model, chunk).size(), chunk.elements).bytes);
  return most;
}

}  // namespace tierflow
