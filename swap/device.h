#pragma once
// The device tier: memory, streams and events. There is one implementation for the CPU (real asynchronous streams, each
// a thread with a queue), and one for CUDA or a stub for it. Nothing else in swap knows which one it uses.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "io/buffer.h"
#include "io/error.h"

namespace tierflow::swap {

// round: where gradients are rounded before they are copied to the host.
enum class StreamId : std::uint8_t { upload = 0, download = 1, compute = 2, update = 3, round = 4 };

// Where the client's own work is done: the index of a CUDA device and its cudaStream_t. kHost: at once, on the calling
// thread, in memory that the host can read.
struct DeviceQueue {
  static constexpr int kHost = -1;
  int device = kHost;
  void* stream = nullptr;
};

// A point in a stream. Copyable; outlives what it marks.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<void> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }
  void* state() const { return state_.get(); }

 private:
  std::shared_ptr<void> state_;
};

// How a gradient is rounded when it leaves a device: to the nearest bf16, ties to even; NaN stays NaN.
inline std::uint16_t gradient_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;

  // One allocation, which lives as long as the run: the arena that slots are cut from.
  virtual io::Result<io::Buffer> allocate(std::size_t bytes) = 0;
  // Pins consecutive pieces of host memory, beginning with the first, so that copies are fast. Each piece is one
  // registration of at most kRegistration bytes (pinning.h). If the system refuses, that is no error: copies of the
  // rest are slower, and the returned text says so (empty: everything is pinned). Only one slab may be pinned at a
  // time. unpin() waits for copies in flight; after it the memory may be freed.
  virtual std::string pin(std::span<const std::span<std::byte>> pieces) = 0;
  virtual void unpin(std::span<std::byte> memory) noexcept = 0;

  // Enqueue on a stream and return. Each stream but `compute` is driven by one thread at a time.
  virtual void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void copy_to_host(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  // fp32 on the device to bf16 on the host, by gradient_to_bf16. On a GPU this occupies a part of its processors as
  // long as the copy over the link takes; round_gradient() followed by copy_to_host() does not.
  virtual void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) = 0;
  // The same rounding from device to device.
  virtual void round_gradient(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) = 0;
  // The client's own work, in the stream's order. The CPU device calls it when its turn comes. CUDA calls it at once,
  // and it enqueues kernels on the queue. It must not throw.
  virtual void enqueue(StreamId stream, std::function<void(const DeviceQueue& queue)> work) = 0;

  virtual Event record(StreamId stream) = 0;
  // The same with a time: seconds_between() gives the seconds between two such events by the device's own clock, or
  // nothing if one of them has not happened or could not be made.
  virtual Event record_timed(StreamId stream) = 0;
  virtual std::optional<double> seconds_between(const Event& from, const Event& to) = 0;
  // Work enqueued on `stream` after this call starts after the event. If `stream` is the compute stream and that is the
  // calling thread (no CpuDeviceOptions::async_compute), this call blocks.
  virtual void wait(StreamId stream, const Event& event) = 0;
  // Blocks, sleeping, until the event has happened. An error if work before it failed.
  virtual io::Error synchronize(const Event& event) = 0;
};

struct CpuDeviceOptions {
  // Non-zero: the device delays each copy by a random time and fills targets with NaN before copying, so that a missing
  // wait shows.
  std::uint64_t chaos_seed = 0;
  // The compute stream has a queue and a thread like the others: what is enqueued there runs while its caller goes on,
  // as on a GPU. Without this option the compute stream is the calling thread.
  bool async_compute = false;
};
std::unique_ptr<Device> open_cpu_device(const CpuDeviceOptions& options = {});

// The CUDA device `index`; an error of kind environment if there is none or the build has no CUDA.
io::Result<std::unique_ptr<Device>> open_cuda_device(int index);
bool cuda_available();

struct CudaDeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  std::uint64_t bytes = 0;   // of memory
  std::string pci_bus;       // "0000:65:00.0"
};
// Makes no context on the device.
io::Result<CudaDeviceInfo> cuda_device_info(int index);
// Free bytes of the device after this call has made a context on it; 0 if that cannot be known.
std::uint64_t cuda_bytes_free(int index);

}  // namespace tierflow::swap
