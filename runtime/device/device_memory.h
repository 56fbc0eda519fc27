#pragma once
// FRONT DOOR of device. torch's allocator under a cap: it enforces the device budget. On the CPU device it is an
// allocator of ours, exact; on CUDA torch's caching allocator, told its share of the card.
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace tierflow {

struct DeviceMemoryStats {
  std::uint64_t used = 0;       // by live tensors
  std::uint64_t held = 0;       // used and kept for reuse: what counts against the cap
  std::uint64_t peak_used = 0;  // since reset_peak()
  std::uint64_t peak_held = 0;
};

class DeviceMemory {
 public:
  // Installs the allocator for all CPU tensors made from now on; once a process, before torch is used. Large blocks are
  // kept for reuse inside the cap and given back to the system before an allocation is refused with
  // c10::OutOfMemoryError.
  static DeviceMemory& install();
  // Of what live CPU tensors take, what that allocator has mapped: malloc does not count it. 0 where it is not
  // installed.
  static std::uint64_t mapped_bytes();
  // CUDA's. Loads torch's CUDA library; an Exception of kind environment where that cannot be.
  static DeviceMemory& cuda();

  virtual ~DeviceMemory() = default;
  virtual void set_cap(std::uint64_t bytes) = 0;
  virtual void release_kept() = 0;
  virtual void reset_peak() = 0;
  virtual DeviceMemoryStats stats() const = 0;
  // Bytes of the device that its use takes beside tensors: context, kernels and handles of libraries, measured once, or
  // nothing where the driver's library gives no answer; and the CUDA device's own kBounceBytes (swap/pinning.h). 0 on
  // the CPU.
  virtual std::uint64_t fixed() const { return 0; }
};

// Throws Exception where the calling thread does not compute on torch's default stream of the card: uploads and
// downloads wait only for that stream.
void expect_default_stream(c10::Device device);

}  // namespace tierflow
