// The calls of the stand-in, in the order of cuda_runtime.h.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/cuda/runtime.h"

using namespace tierflow::testing::cuda;

namespace {

constexpr std::size_t kAlignment = 512;
constexpr int kPoison = 0xff;

bool is_mapped(const void* memory, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::getpagesize());
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(memory) / page * page;
  const std::size_t length = reinterpret_cast<std::uintptr_t>(memory) + bytes - begin;
  std::vector<unsigned char> pages(length / page + 1);
  return ::mincore(reinterpret_cast<void*>(begin), length, pages.data()) == 0;
}

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorUnknown:
      return "cudaErrorUnknown";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error();
  last_error() = cudaSuccess;
  return error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  if (device < 0 || device >= kDevices) return fails(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  if (device < 0 || device >= kDevices) return fails(cudaErrorInvalidDevice);
  *properties = {
      .name = "stand-in", .totalGlobalMem = at.settings.device_bytes, .major = 9, .minor = 0, .multiProcessorCount = 2};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties{};
  const cudaError_t status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) return status;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int device) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02x:00.0", 0x65 + device);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  *free = *total = at.settings.device_bytes;
  for (const auto& [memory, allocation] : at.allocations)
    if (allocation.device == current_device()) *free -= allocation.bytes;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  if (memory == nullptr || bytes == 0) return fails(cudaErrorInvalidValue);
  if (at.overlaps_a_registration(memory, bytes)) {
    at.fault("memory was registered twice");
    return fails(cudaErrorHostMemoryAlreadyRegistered);
  }
  std::size_t pinned = bytes;
  for (const auto& [begin, registration] : at.registrations) pinned += registration.bytes;
  if (pinned > at.settings.pinned_bytes) return fails(cudaErrorMemoryAllocation);
  at.registrations[static_cast<std::byte*>(memory)] = {bytes, (flags & cudaHostRegisterMapped) != 0, {}};
  return cudaSuccess;
}
// Gives the memory back whatever it answers.
cudaError_t cudaHostUnregister(void* memory) {
  Runtime& at = runtime();
  std::vector<MarkerPtr> users;
  std::optional<cudaError_t> error;
  {
    std::lock_guard lock(at.mutex);
    error = at.refusal();
    const auto found = at.registrations.find(static_cast<std::byte*>(memory));
    if (found == at.registrations.end()) {
      at.fault("memory was unregistered that is not registered");
      return fails(cudaErrorHostMemoryNotRegistered);
    }
    if (!is_mapped(memory, found->second.bytes)) at.fault("registered memory was freed");
    users = std::move(found->second.users);
    at.registrations.erase(found);
    if (at.sticky == cudaSuccess && std::any_of(users.begin(), users.end(), [](const auto& u) { return !u->done(); }))
      at.fault("memory was unregistered while a copy or a kernel used it");
  }
  for (const MarkerPtr& user : users) user->wait();
  return error ? *error : cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  const auto found = holding(at.registrations, host, 1);
  if (found == at.registrations.end() || !found->second.mapped) return fails(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

// Frees it whatever it answers, after all that is enqueued.
cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  Runtime& at = runtime();
  at.wait_for_all();
  std::lock_guard lock(at.mutex);
  const auto error = at.refusal();
  const auto found = at.allocations.find(static_cast<std::byte*>(memory));
  if (found == at.allocations.end()) {
    at.fault("memory was freed that is no device memory");
    return fails(cudaErrorInvalidValue);
  }
  at.allocations.erase(found);
  std::free(memory);
  return error ? *error : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Runtime& at = runtime();
  std::unique_lock lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  if (on == nullptr) return fails(cudaErrorInvalidResourceHandle);
  const bool up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
  const void* host = up ? from : down ? to : nullptr;
  const auto registered = holding(at.registrations, host, bytes);
  const bool pinned = host != nullptr && registered != at.registrations.end();
  if (host != nullptr && !pinned && at.overlaps_a_registration(host, bytes)) return fails(cudaErrorInvalidValue);
  const auto devices_have_it = [&at, to, from, bytes, up, down] {
    return (up || holding(at.allocations, from, bytes) != at.allocations.end()) &&
           (down || holding(at.allocations, to, bytes) != at.allocations.end());
  };
  if (!devices_have_it()) {
    at.fault("a copy was given memory that no device has");
    return fails(cudaErrorInvalidValue);
  }
  const auto staged = std::make_shared<std::vector<std::byte>>();
  if (up && !pinned) {
    const auto* begin = static_cast<const std::byte*>(from);
    staged->assign(begin, begin + bytes);
  }
  const MarkerPtr end = at.enqueue_work(
      on,
      [&at, devices_have_it, pinned, host, bytes] {
        const bool there = devices_have_it() && (host == nullptr || !pinned || is_mapped(host, bytes));
        if (!there) at.fault("memory was freed while a copy waited for it");
        return there;
      },
      [on, to, from, bytes, staged, copies = up && !pinned] {
        if (on->queue.late()) {
          std::memset(to, kPoison, bytes);
          on->queue.dawdle();
        }
        std::memcpy(to, copies ? staged->data() : from, bytes);
      });
  if (pinned) registered->second.use(end);
  if (!down || pinned) return cudaSuccess;
  lock.unlock();
  end->wait();
  lock.lock();
  return fails(at.sticky);
}
// Of device memory alone.
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  if (on == nullptr) return fails(cudaErrorInvalidResourceHandle);
  const auto device_has_it = [&at, memory, bytes] {
    const bool there = holding(at.allocations, memory, bytes) != at.allocations.end();
    if (!there) at.fault("memory is set that no device has");
    return there;
  };
  if (!device_has_it()) return fails(cudaErrorInvalidValue);
  at.enqueue_work(on, device_has_it, [memory, value, bytes] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  *least = 0;
  *greatest = kGreatestPriority;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  const std::uint64_t seed = at.settings.seed == 0 ? 0 : at.settings.seed * 37 + at.streams.size() + 11;
  at.streams.push_back(std::make_unique<CUstream_st>(current_device(), (flags & cudaStreamNonBlocking) == 0, seed));
  *stream = at.streams.back().get();
  (*stream)->priority = std::clamp(priority, kGreatestPriority, 0);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  const CUstream_st* on = at.stream_of(stream);
  if (on == nullptr) return fails(cudaErrorInvalidResourceHandle);
  *priority = on->priority;
  return cudaSuccess;
}
// Its work goes on.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  const auto error = at.refusal();
  if (at.stream_of(stream) == nullptr) return fails(cudaErrorInvalidResourceHandle);
  at.destroyed.push_back(stream);
  return error ? *error : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Runtime& at = runtime();
  std::unique_lock lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  if (on == nullptr) return fails(cudaErrorInvalidResourceHandle);
  const MarkerPtr end = on->queue.last();
  lock.unlock();
  if (end != nullptr) end->wait();
  lock.lock();
  return fails(at.sticky);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  const CUevent_st* of = at.event_of(event);
  if (on == nullptr || of == nullptr) return fails(cudaErrorInvalidResourceHandle);
  at.enqueue(on, {}, of->recorded);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  at.events.push_back(
      std::make_unique<CUevent_st>(CUevent_st{current_device(), (flags & cudaEventDisableTiming) == 0, nullptr}));
  *event = at.events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  const auto error = at.refusal();
  if (at.event_of(event) == nullptr) return fails(cudaErrorInvalidResourceHandle);
  std::erase_if(at.events, [&](const auto& one) { return one.get() == event; });
  return error ? *error : cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  CUevent_st* of = at.event_of(event);
  if (on == nullptr || of == nullptr || of->device != on->device) return fails(cudaErrorInvalidResourceHandle);
  of->recorded = at.enqueue(on, {});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Runtime& at = runtime();
  std::unique_lock lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  const CUevent_st* of = at.event_of(event);
  if (of == nullptr) return fails(cudaErrorInvalidResourceHandle);
  const MarkerPtr recorded = of->recorded;
  lock.unlock();
  if (recorded != nullptr) recorded->wait();
  lock.lock();
  return fails(at.sticky);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  const CUevent_st *begin = at.event_of(from), *end = at.event_of(to);
  if (begin == nullptr || end == nullptr || !begin->timed || !end->timed || begin->recorded == nullptr ||
      end->recorded == nullptr)
    return fails(cudaErrorInvalidResourceHandle);
  if (!begin->recorded->done() || !end->recorded->done()) return fails(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->recorded->time() - begin->recorded->time()).count();
  return cudaSuccess;
}
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal(cudaErrorMemoryAllocation)) return *error;
  std::size_t used = bytes;
  for (const auto& [begin, allocation] : at.allocations)
    if (allocation.device == current_device()) used += allocation.bytes;
  void* given = used > at.settings.device_bytes
                    ? nullptr
                    : std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (given == nullptr) return fails(cudaErrorMemoryAllocation);
  std::memset(given, kPoison, bytes);
  at.allocations[static_cast<std::byte*>(given)] = {bytes, current_device()};
  *memory = given;
  return cudaSuccess;
}
