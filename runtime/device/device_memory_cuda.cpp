// torch's CUDA allocator. Nothing here links against CUDA: torch's library is loaded when asked for, and the allocator
// found in it by name. The cap is a call of its own interface; the setting of the same name in torch's configuration
// counts only when the allocator is made.
#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"
#include "runtime/device/gpu_monitor.h"
#include "swap/executor.h"
#include "swap/pinning.h"

namespace tierflow {
namespace {

using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr const char* kAllocator = "_ZN3c104cuda20CUDACachingAllocator9allocatorE";

// From beside torch's other libraries, by its whole path: a name alone is looked for where the caller's runpath says,
// and in a tail call from an initialiser the caller is libc.
void* load_torch_cuda() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  const link_map* at = nullptr;
  if (torch == nullptr || dlinfo(torch, RTLD_DI_LINKMAP, &at) != 0) return nullptr;
  const std::string path = std::filesystem::path(at->l_name).replace_filename("libtorch_cuda.so");
  dlclose(torch);
  return dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
}

// ATen asks for CUDA's hooks once, at the first torch::manual_seed for one, and goes without them for good where the
// library is not there by then: where a card exists it is loaded before main().
[[maybe_unused]] void* const loaded_early =
    access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0 ? load_torch_cuda() : nullptr;

class CudaMemory final : public DeviceMemory {
 public:
  CudaMemory() {
    void* library = load_torch_cuda();
    if (library == nullptr) {
      const char* reason = dlerror();
      throw Exception(io::Error{.kind = io::ErrorKind::environment,
                                .operation = "load torch's CUDA library",
                                .detail = std::string(reason == nullptr ? "it is not beside libtorch_cpu.so" : reason) +
                                          "; the torch wheel of this build has no CUDA: use --device cpu"});
    }
    const auto gpu = GpuMonitor::open(value_or_throw(swap::cuda_device_info(0)).pci_bus);
    const auto used = [&] { return gpu == nullptr ? std::nullopt : gpu->bytes_used(); };
    const auto before = used();
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    const auto* allocator = static_cast<std::atomic<Allocator*>*>(dlsym(library, kAllocator));
    if (allocator == nullptr || allocator->load() == nullptr)
      throw Exception(io::Error{.kind = io::ErrorKind::environment,
                                .operation = "find torch's CUDA allocator",
                                .detail = "this torch is not the one that Tierflow was built with: build again"});
    allocator_ = allocator->load();
    const std::uint64_t others = stats().used;  // of a process that has used torch before
    {                                           // brings the context up, and cuBLAS with its handle
      const at::Tensor a = at::ones({16, 16}, at::device(at::kCUDA).dtype(at::kBFloat16));
      at::mm(a, a).sum().item<float>();
    }
    const auto after = used();
    const DeviceMemoryStats now = stats();
    if (before && after && *after > *before + now.held) fixed_ += *after - *before - now.held;
    workspace_ = now.used - std::min(now.used, others);
    fixed_ += workspace_;
  }
  std::uint64_t fixed() const override { return fixed_; }
  void set_cap(std::uint64_t bytes) override {
    const double share =
        static_cast<double>(bytes + workspace_) / static_cast<double>(allocator_->getMemoryInfo(0).second);
    allocator_->setMemoryFraction(std::clamp(share, 0.0, 1.0), 0);
  }
  void release_kept() override { allocator_->emptyCache(); }
  void reset_peak() override { allocator_->resetPeakStats(0); }
  DeviceMemoryStats stats() const override {
    const auto stats = allocator_->getDeviceStats(0);
    const auto count = [this](std::int64_t bytes) {
      return static_cast<std::uint64_t>(bytes) - std::min(workspace_, static_cast<std::uint64_t>(bytes));
    };
    return {.used = count(stats.allocated_bytes[kAll].current),
            .held = count(stats.reserved_bytes[kAll].current),
            .peak_used = count(stats.allocated_bytes[kAll].peak),
            .peak_held = count(stats.reserved_bytes[kAll].peak),
            .retries = static_cast<std::uint64_t>(stats.num_alloc_retries)};
  }

 private:
  Allocator* allocator_ = nullptr;
  std::uint64_t fixed_ = swap::kBounceBytes;
  std::uint64_t workspace_ = 0;  // cuBLAS's, of torch's allocator: a part of fixed_, and of no tensor
};

}  // namespace

DeviceMemory& DeviceMemory::cuda() {
  static CudaMemory memory;
  return memory;
}

}  // namespace tierflow
