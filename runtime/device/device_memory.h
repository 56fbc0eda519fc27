#pragma once
// FRONT DOOR of device. torch's allocator under a cap, which enforces the device budget. On the CPU device it is
// Tierflow's own allocator, whose cap is exact. On CUDA it is torch's caching allocator, which is told its share of the
// card.
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace tierflow {

struct DeviceMemoryStats {
  std::uint64_t used = 0;       // by live tensors
  std::uint64_t held = 0;       // used and kept for reuse: what counts against the cap
  std::uint64_t peak_used = 0;  // since reset_peak()
  std::uint64_t peak_held = 0;
  // Since the program began, on CUDA: allocations that the cap refused at first, and that succeeded or failed after all
  // that was kept for reuse had been given back. Each waits for the device.
  std::uint64_t retries = 0;
};

class DeviceMemory {
 public:
  // Installs the allocator for all CPU tensors made from now on. Call it once in a process, before torch is used. Large
  // blocks are kept for reuse inside the cap, and given back to the system before an allocation is refused with
  // c10::OutOfMemoryError.
  static DeviceMemory& install();
  // Bytes of live CPU tensors that the installed allocator has mapped, so that malloc does not count them. 0 if it is
  // not installed.
  static std::uint64_t mapped_bytes();
  // The memory of CUDA. Loads torch's CUDA library; throws Exception (kind environment) if it cannot be loaded.
  static DeviceMemory& cuda();

  // A share of the memory. The cap is the sum of all shares that were set; without any, torch has no cap.
  class Share {
   public:
    explicit Share(DeviceMemory& memory);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    void set(std::uint64_t bytes);  // kNoCap: torch has no cap as long as this share is there

   private:
    friend class DeviceMemory;
    DeviceMemory& memory_;
    std::optional<std::uint64_t> bytes_;
  };

  static constexpr std::uint64_t kNoCap = ~std::uint64_t{0} / 2;
  virtual ~DeviceMemory() = default;
  virtual void set_cap(std::uint64_t bytes) = 0;
  virtual void release_kept() = 0;
  virtual void reset_peak() = 0;
  virtual DeviceMemoryStats stats() const = 0;
  // Bytes that the use of a CUDA device takes besides tensors: context, kernels and handles of libraries, measured once
  // (0 if the driver's library does not say), cuBLAS's workspace and kBounceBytes (swap/pinning.h). 0 on the CPU.
  virtual std::uint64_t fixed() const { return 0; }

 private:
  void cap_by_shares();  // shares_mutex_ is held
  std::mutex shares_mutex_;
  std::vector<const Share*> shares_;
};

// Whether torch ran out of device memory.
bool is_out_of_memory(const c10::Error& error);

// Throws Exception if the calling thread does not compute on torch's default stream of the card, because uploads and
// downloads wait only for that stream.
void expect_default_stream(c10::Device device);

}  // namespace tierflow
