#pragma once
// torch's CPU allocator with a cap: on the CPU device it is what makes the device budget hard. Large blocks are kept for reuse inside
// the cap and given back to the system before an allocation is refused.
#include <cstddef>
#include <cstdint>

namespace tierflow {

struct DeviceMemoryStats {
  std::uint64_t used = 0;       // by live tensors
  std::uint64_t held = 0;       // used and kept for reuse: what counts against the cap
  std::uint64_t peak_used = 0;  // since reset_peak()
  std::uint64_t peak_held = 0;
};

// Installs the allocator for all CPU tensors made from now on; once a process, before torch is used. An allocation beyond the cap
// raises c10::OutOfMemoryError.
class DeviceMemory {
 public:
  static DeviceMemory& install();
  void set_cap(std::uint64_t bytes);
  void release_kept();
  void reset_peak();
  DeviceMemoryStats stats() const;

 private:
  DeviceMemory() = default;
};

}  // namespace tierflow
