// The CUDA device: copies on streams of their own, events with timing where a lane is timed, host memory registered in
// pieces of at most 1 GiB. The compute stream is the legacy default stream, on which torch runs unless it
// is told otherwise; the copy streams do not synchronise with it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "swap/device.h"
#include "swap/pinning.h"

namespace tierflow::swap {
namespace {

constexpr std::size_t kBounceElements = kBounceBytes / 2;

io::Error cuda_error(const char* operation, cudaError_t status, std::uint64_t length = 0) {
  const bool memory = status == cudaErrorMemoryAllocation;
  return {.kind = memory ? io::ErrorKind::memory : io::ErrorKind::io,
          .operation = operation,
          .path = "the CUDA device",
          .length = length,
          .detail = std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status)};
}

// Nearest even, NaN kept: the same bits as the CPU device and as torch's cast.
__device__ std::uint16_t bf16_nearest_even(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Eight elements a thread and turn: 32 bytes read on the device, 16 bytes written, over the bus where `to` is mapped
// host memory. A part of a gradient may begin at any element.
__global__ void gradient_to_bf16(std::uint16_t* to, const float* from, std::size_t elements) {
  const std::size_t stride = std::size_t{8} * gridDim.x * blockDim.x;
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) & 15U) == 0;
  for (std::size_t first = 8 * (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x); first < elements;
       first += stride) {
    if (aligned && first + 8 <= elements) {
      const float4 a = *reinterpret_cast<const float4*>(from + first),
                   b = *reinterpret_cast<const float4*>(from + first + 4);
      const auto pair = [](float low, float high) {
        return bf16_nearest_even(low) | static_cast<std::uint32_t>(bf16_nearest_even(high)) << 16;
      };
      *reinterpret_cast<uint4*>(to + first) =
          make_uint4(pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w));
    } else {
#pragma unroll 1  // rare, and unrolled it would take registers from the other branch
      for (std::size_t i = first; i < first + 8 && i < elements; ++i) to[i] = bf16_nearest_even(from[i]);
    }
  }
}

class CudaDevice final : public Device {
 public:
  static io::Result<std::unique_ptr<Device>> open(int index) {
    std::unique_ptr<CudaDevice> device(new CudaDevice(index));
    if (const cudaError_t status = cudaSetDevice(index); status != cudaSuccess) return cuda_error("open", status);
    cudaDeviceProp properties{};
    if (const cudaError_t status = cudaGetDeviceProperties(&properties, index); status != cudaSuccess)
      return cuda_error("open", status);
    device->name_ = properties.name;
    device->processors_ = static_cast<unsigned>(properties.multiProcessorCount);
    int least = 0, greatest = 0;
    if (const cudaError_t status = cudaDeviceGetStreamPriorityRange(&least, &greatest); status != cudaSuccess)
      return cuda_error("make a stream", status);
    // Small kernels beside a matrix product that fills the device: with its priority each would wait for a wave of it.
    for (cudaStream_t* stream : {&device->upload_, &device->download_, &device->update_, &device->round_}) {
      const bool kernels = stream == &device->update_ || stream == &device->round_;
      const cudaError_t status =
          cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, kernels ? greatest : least);
      if (status != cudaSuccess) return cuda_error("make a stream", status);
    }
    return std::unique_ptr<Device>(std::move(device));
  }
  ~CudaDevice() override {
    cudaSetDevice(index_);
    if (upload_ != nullptr) cudaStreamDestroy(upload_);
    if (download_ != nullptr) cudaStreamDestroy(download_);
    if (update_ != nullptr) cudaStreamDestroy(update_);
    if (round_ != nullptr) cudaStreamDestroy(round_);
    if (bounce_ != nullptr) cudaFree(bounce_);
  }

  std::string name() const override { return name_; }

  io::Result<io::Buffer> allocate(std::size_t bytes) override {
    if (bytes == 0) return io::Buffer();
    cudaSetDevice(index_);
    void* data = nullptr;
    if (const cudaError_t status = cudaMalloc(&data, bytes); status != cudaSuccess) {
      io::Error error = cuda_error("allocate device memory", status, bytes);
      std::size_t free = 0, total = 0;
      if (status == cudaErrorMemoryAllocation && cudaMemGetInfo(&free, &total) == cudaSuccess)
        error.detail += "; " + std::to_string(free) + " bytes are free: give a smaller device budget";
      cudaGetLastError();  // or the next launch on this thread would be taken for failed
      return error;
    }
    return io::Buffer(
        static_cast<std::byte*>(data), bytes, [](std::byte* memory, std::size_t, void*) noexcept { cudaFree(memory); },
        nullptr);
  }

  std::string pin(std::span<const std::span<std::byte>> pieces) override {
    cudaSetDevice(index_);
    return pinned_.pin(pieces, [](std::span<std::byte> piece) -> std::string {
      populate(piece);
      const cudaError_t status =
          cudaHostRegister(piece.data(), piece.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (status == cudaSuccess) return {};
      cudaGetLastError();  // a refusal is no failure of the device
      return cudaGetErrorString(status);
    });
  }
  void unpin(std::span<std::byte> memory) noexcept override {
    if (pinned_.begin() != memory.data()) return;
    // After an error nobody has waited for what is under way, and the memory goes when this returns.
    for (const StreamId stream :
         {StreamId::upload, StreamId::download, StreamId::compute, StreamId::update, StreamId::round})
      cudaStreamSynchronize(of(stream));
    pinned_.unpin([](std::span<std::byte> piece) { cudaHostUnregister(piece.data()); });
  }

  void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    const cudaStream_t on = of(stream);
    pinned_.split(from, bytes, [&](std::size_t offset, std::size_t part) {
      note(cudaMemcpyAsync(to + offset, from + offset, part, cudaMemcpyHostToDevice, on));
    });
  }
  void copy_to_host(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    const cudaStream_t on = of(stream);
    pinned_.split(to, bytes, [&](std::size_t offset, std::size_t part) {
      note(cudaMemcpyAsync(to + offset, from + offset, part, cudaMemcpyDeviceToHost, on));
    });
  }
  void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    const cudaStream_t on = of(stream);
    if (pinned_.covers(reinterpret_cast<const std::byte*>(to), 2 * elements)) {
      void* mapped = nullptr;
      note(cudaHostGetDevicePointer(&mapped, to, 0));
      if (mapped != nullptr) launch(static_cast<std::uint16_t*>(mapped), from, elements, kLinkBlocks, on);
      return;
    }
    if (bounce_ == nullptr) note(cudaMalloc(&bounce_, kBounceBytes));
    for (std::size_t begin = 0; begin < elements && bounce_ != nullptr; begin += kBounceElements) {
      const std::size_t count = std::min(kBounceElements, elements - begin);
      launch(static_cast<std::uint16_t*>(bounce_), from + begin, count, device_blocks(), on);
      copy_to_host(stream, reinterpret_cast<std::byte*>(to + begin), static_cast<const std::byte*>(bounce_), 2 * count);
    }
  }

  void round_gradient(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    const cudaStream_t on = of(stream);
    launch(to, from, elements, device_blocks(), on);
  }
  void enqueue(StreamId stream, std::function<void(const DeviceQueue&)> work) override {
    const cudaStream_t on = of(stream);
    work({.device = index_, .stream = on});
  }

  Event record(StreamId stream) override { return record_with(stream, cudaEventDisableTiming | cudaEventBlockingSync); }
  Event record_timed(StreamId stream) override { return record_with(stream, cudaEventBlockingSync); }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    float milliseconds = 0;
    if (!from || !to ||
        cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from.state()),
                             static_cast<cudaEvent_t>(to.state())) != cudaSuccess) {
      cudaGetLastError();
      return std::nullopt;
    }
    return milliseconds / 1e3;
  }
  void wait(StreamId stream, const Event& event) override {
    const cudaStream_t on = of(stream);
    if (event) note(cudaStreamWaitEvent(on, static_cast<cudaEvent_t>(event.state()), 0));
  }
  io::Error synchronize(const Event& event) override {
    cudaSetDevice(index_);
    if (event) note(cudaEventSynchronize(static_cast<cudaEvent_t>(event.state())));
    std::lock_guard lock(mutex_);
    return first_ == cudaSuccess ? io::Error{} : cuda_error("copy", first_);
  }

 private:
  explicit CudaDevice(int index) : index_(index) {}

  Event record_with(StreamId stream, unsigned flags) {
    const cudaStream_t on = of(stream);
    cudaEvent_t event = nullptr;
    note(cudaEventCreateWithFlags(&event, flags));
    if (event == nullptr) return {};
    note(cudaEventRecord(event, on));
    return Event(std::shared_ptr<void>(event, [](void* state) { cudaEventDestroy(static_cast<cudaEvent_t>(state)); }));
  }
  // Lanes have threads of their own, each of which must name the device.
  cudaStream_t of(StreamId stream) {
    cudaSetDevice(index_);
    switch (stream) {
      case StreamId::upload:
        return upload_;
      case StreamId::download:
        return download_;
      case StreamId::update:
        return update_;
      case StreamId::round:
        return round_;
      default:
        return cudaStreamLegacy;
    }
  }
  // Blocks of a kernel that writes over the link: enough to fill it, few enough to leave the device to its work.
  static constexpr unsigned kLinkBlocks = 64;
  // Of one that stays on the device: as many as it holds.
  unsigned device_blocks() const { return 8 * processors_; }
  void launch(std::uint16_t* to, const float* from, std::size_t elements, unsigned most, cudaStream_t stream) {
    constexpr unsigned kThreads = 256;
    const auto blocks =
        static_cast<unsigned>(std::min<std::size_t>(most, (elements + 8 * kThreads - 1) / (8 * kThreads)));
    if (elements == 0) return;
    void* arguments[] = {&to, &from, &elements};
    note(cudaLaunchKernel(&gradient_to_bf16, blocks, kThreads, arguments, 0, stream));
  }
  // The first failure stays and is what synchronize() gives.
  void note(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::lock_guard lock(mutex_);
    if (first_ == cudaSuccess) first_ = status;
  }

  const int index_;
  std::string name_;
  unsigned processors_ = 1;
  cudaStream_t upload_ = nullptr, download_ = nullptr, update_ = nullptr, round_ = nullptr;
  void* bounce_ = nullptr;  // device memory for hosts that cannot be mapped; the download stream's alone
  PinnedPieces pinned_;
  std::mutex mutex_;
  cudaError_t first_ = cudaSuccess;
};

}  // namespace

namespace {
io::Error absent_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && index < count) return {};
  return {.kind = io::ErrorKind::environment,
          .operation = "open the CUDA device",
          .detail = std::string(status != cudaSuccess ? cudaGetErrorString(status) : "there is none") +
                    "; use --device cpu, or install the NVIDIA driver"};
}
}  // namespace

io::Result<std::unique_ptr<Device>> open_cuda_device(int index) {
  if (io::Error absent = absent_device(index)) return absent;
  return CudaDevice::open(index);
}

io::Result<CudaDeviceInfo> cuda_device_info(int index) {
  if (io::Error absent = absent_device(index)) return absent;
  cudaDeviceProp properties{};
  char bus[32] = {};
  cudaError_t status = cudaGetDeviceProperties(&properties, index);
  if (status == cudaSuccess) status = cudaDeviceGetPCIBusId(bus, sizeof(bus), index);
  if (status != cudaSuccess) return cuda_error("look at", status);
  return CudaDeviceInfo{.name = properties.name,
                        .major = properties.major,
                        .minor = properties.minor,
                        .bytes = properties.totalGlobalMem,
                        .pci_bus = bus};
}

std::uint64_t cuda_bytes_free(int index) {
  std::size_t free = 0, total = 0;
  if (cudaSetDevice(index) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  return free;
}

bool cuda_available() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

}  // namespace tierflow::swap
