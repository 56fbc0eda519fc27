#pragma once
// The device tier: memory, streams and events. One implementation is linked for the CPU (real asynchronous streams: a
// thread with a queue each) and one for CUDA or its stub; nothing else in swap knows which it drives.
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

enum class StreamId : std::uint8_t { upload = 0, download = 1, compute = 2, update = 3 };

// Where work that a client brings is done: the index of a CUDA device and its cudaStream_t. kHost: here and now, on
// memory that the host can read.
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

// How a gradient leaves a device: to the nearest, ties to even; NaN stays NaN.
inline std::uint16_t gradient_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;

  // One allocation, held to the end: the arena that slots are cut from.
  virtual io::Result<io::Buffer> allocate(std::size_t bytes) = 0;
  // Pins consecutive pieces of host memory, from the first one, so that copies are fast. Each piece is one registration
  // of at most kRegistration bytes (pinning.h). A refusal is no error: copies of the rest are slower, and the text says
  // so (empty: all is pinned). One memory at a time. unpin() waits for what is under way: the memory may go after it.
  virtual std::string pin(std::span<const std::span<std::byte>> pieces) = 0;
  virtual void unpin(std::span<std::byte> memory) noexcept = 0;

  // Enqueue on a stream and return. `upload`, `download` and `update` are driven by one thread at a time, each.
  virtual void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void copy_to_host(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  // fp32 on the device to bf16 on the host, by gradient_to_bf16.
  virtual void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) = 0;
  // The same from device to device.
  virtual void round_gradient(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) = 0;
  // The client's own work, in the stream's order. The CPU device calls it when its turn comes. CUDA calls it at once,
  // and it enqueues kernels on the queue. It must not throw.
  virtual void enqueue(StreamId stream, std::function<void(const DeviceQueue& queue)> work) = 0;

  virtual Event record(StreamId stream) = 0;
  // The same, for seconds_between(): the seconds between two such events by the device's own clock, once both have
  // happened. It gives nothing where the compute stream is the calling thread, whose clock is as good.
  virtual Event record_timed(StreamId stream) { return record(stream); }
  virtual std::optional<double> seconds_between(const Event&, const Event&) { return std::nullopt; }
  // Work enqueued on `stream` after this call starts after the event. For the CPU device's compute stream, which is the
  // calling thread, this blocks.
  virtual void wait(StreamId stream, const Event& event) = 0;
  // Blocks, sleeping, until the event has happened; an error where work before it failed.
  virtual io::Error synchronize(const Event& event) = 0;
};

struct CpuDeviceOptions {
  // Non-zero: the device delays each copy by a random time and fills targets with NaN before copying, so that a missing
  // wait shows.
  std::uint64_t chaos_seed = 0;
};
std::unique_ptr<Device> open_cpu_device(const CpuDeviceOptions& options = {});

// The CUDA device `index`; an error of kind environment where there is none or the build has no CUDA.
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
// Free bytes of the device after this call has made a context on it; 0 where that cannot be known.
std::uint64_t cuda_bytes_free(int index);

}  // namespace tierflow::swap
