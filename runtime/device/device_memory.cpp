#include "runtime/device/device_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr std::size_t kLarge = 256 * 1024;  // from here on blocks are mapped, and kept for reuse
constexpr std::size_t kPage = 4096;
// oneDNN, which LibTorch multiplies with on a CPU, keeps compiled code of a quarter of a MiB for each shape: of 1024
// shapes if nobody says otherwise, and LibTorch around it of 1024 more. In a mixture of experts nearly each product has
// a shape of its own.
constexpr const char* kKeptShapes = "128";

class CappedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    void* data = take(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  void set_cap(std::uint64_t bytes) {
    std::lock_guard lock(mutex_);
    cap_ = bytes;
  }
  void release_kept() {
    std::lock_guard lock(mutex_);
    release_kept_locked();
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    stats_.peak_used = stats_.used;
    stats_.peak_held = stats_.held;
  }
  DeviceMemoryStats stats() const {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  std::uint64_t mapped() const {
    std::lock_guard lock(mutex_);
    return mapped_;
  }
  static CappedAllocator& instance() {
    static auto* allocator = new CappedAllocator;  // outlives every tensor
    return *allocator;
  }

 private:
  static void release(void* data) { instance().give_back(data); }

  void* take(std::size_t bytes) {
    const bool large = bytes >= kLarge;
    const std::size_t size = large ? (bytes + kPage - 1) / kPage * kPage : bytes;
    std::lock_guard lock(mutex_);
    void* data = nullptr;
    std::size_t got = size;
    if (large) {
      const auto found = kept_.lower_bound(size);
      if (found != kept_.end() && found->first <= size + size / 8) {
        got = found->first;
        data = found->second;
        kept_.erase(found);
      }
    }
    if (data == nullptr) {
      if (stats_.held + size > cap_) release_kept_locked();
      TORCH_CHECK_WITH(OutOfMemoryError, stats_.held + size <= cap_, "the device budget leaves ", cap_ >> 20,
                       " MiB for computation, ", stats_.held >> 20, " MiB are in use and ", (size >> 20) + 1,
                       " MiB more were asked for");
      data = large ? map(size) : std::aligned_alloc(64, (size + 63) / 64 * 64);
      TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the system refused ", size >> 20, " MiB");
      stats_.held += size;
    }
    sizes_[data] = {.got = got, .asked = size};
    stats_.used += got;
    if (large) mapped_ += size;
    stats_.peak_used = std::max(stats_.peak_used, stats_.used);
    stats_.peak_held = std::max(stats_.peak_held, stats_.held);
    return data;
  }

  void give_back(void* data) {
    if (data == nullptr) return;
    std::lock_guard lock(mutex_);
    const auto found = sizes_.find(data);
    const auto [size, asked] = found->second;
    sizes_.erase(found);
    stats_.used -= size;
    if (size >= kLarge) {
      mapped_ -= asked;
      kept_.emplace(size, data);
      return;
    }
    stats_.held -= size;
    std::free(data);
  }

  static void* map(std::size_t size) {
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
  }
  void release_kept_locked() {
    for (const auto& [size, data] : kept_) {
      ::munmap(data, size);
      stats_.held -= size;
    }
    kept_.clear();
  }

  struct Block {
    std::size_t got = 0, asked = 0;  // what is kept for reuse may be larger
  };

  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> sizes_;
  std::multimap<std::size_t, void*> kept_;
  std::uint64_t cap_ = DeviceMemory::kNoCap;
  DeviceMemoryStats stats_;
  std::uint64_t mapped_ = 0;  // asked for, of what is used
};

}  // namespace

DeviceMemory& DeviceMemory::install() {
  // Read when the first product is computed.
  for (const char* name : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"})
    setenv(name, kKeptShapes, /*overwrite=*/0);
  class Installed final : public DeviceMemory {
   public:
    Installed() { c10::SetCPUAllocator(&CappedAllocator::instance(), /*priority=*/100); }
    void set_cap(std::uint64_t bytes) override { CappedAllocator::instance().set_cap(bytes); }
    void release_kept() override { CappedAllocator::instance().release_kept(); }
    void reset_peak() override { CappedAllocator::instance().reset_peak(); }
    DeviceMemoryStats stats() const override { return CappedAllocator::instance().stats(); }
  };
  static Installed memory;
  return memory;
}

DeviceMemory::Share::Share(DeviceMemory& memory) : memory_(memory) {
  const std::lock_guard lock(memory_.shares_mutex_);
  memory_.shares_.push_back(this);
}

DeviceMemory::Share::~Share() {
  const std::lock_guard lock(memory_.shares_mutex_);
  std::erase(memory_.shares_, this);
  if (!bytes_) return;
  try {
    memory_.cap_by_shares();
  } catch (const c10::Error&) {
    // The device is gone: nothing more is allocated there.
  }
}

void DeviceMemory::Share::set(std::uint64_t bytes) {
  const std::lock_guard lock(memory_.shares_mutex_);
  bytes_ = bytes;
  memory_.cap_by_shares();
}

void DeviceMemory::cap_by_shares() {
  std::optional<std::uint64_t> all;
  for (const Share* share : shares_)
    if (share->bytes_) all = std::min(kNoCap, all.value_or(0) + std::min(kNoCap, *share->bytes_));
  set_cap(all.value_or(kNoCap));
}

std::uint64_t DeviceMemory::mapped_bytes() {
  return CappedAllocator::instance().mapped();
}

// Libraries, and the driver where it loads a kernel, allocate past torch's allocator.
bool is_out_of_memory(const c10::Error& error) {
  const std::string_view said = error.what_without_backtrace();
  const auto says = [&](std::string_view part) { return said.find(part) != std::string_view::npos; };
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || says("CUBLAS_STATUS_ALLOC_FAILED") ||
         says("CUDNN_STATUS_ALLOC_FAILED") || says("CUDA error: out of memory");
}

void expect_default_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl torch(device.type());
  if (torch.getStream(device) != torch.getDefaultStream(device))
    fail_usage("a streamed model computes on torch's default stream: call it outside of torch.cuda.stream(...)");
}

}  // namespace tierflow
