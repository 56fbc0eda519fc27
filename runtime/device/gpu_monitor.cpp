#include "runtime/device/gpu_monitor.h"

#include <dlfcn.h>

namespace tierflow {
namespace {

// NVML's stable C interface, as far as it is used here: every function gives 0 for success.
struct Utilisation {
  unsigned gpu, memory;  // percent
};
struct Memory {
  unsigned long long total, free, used;
};
using Plain = int (*)();
using Find = int (*)(const char* pci_bus, void** card);
using AskUnsigned = int (*)(void* card, unsigned* value);
using AskLong = int (*)(void* card, unsigned long long* value);
using AskUtilisation = int (*)(void* card, Utilisation* value);
using AskMemory = int (*)(void* card, Memory* value);

template <class Function>
Function function(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

template <class Value>
std::optional<Value> asked(int (*ask)(void*, Value*), void* card) {
  Value value{};
  if (ask == nullptr || ask(card, &value) != 0) return std::nullopt;
  return value;
}

}  // namespace

struct GpuMonitor::Library {
  explicit Library(void* handle_) : handle(handle_) {}
  ~Library() {
    if (started) shut_down();
    dlclose(handle);
  }

  void* handle;
  Plain start = function<Plain>(handle, "nvmlInit_v2"), shut_down = function<Plain>(handle, "nvmlShutdown");
  Find find = function<Find>(handle, "nvmlDeviceGetHandleByPciBusId_v2");
  AskUtilisation utilisation = function<AskUtilisation>(handle, "nvmlDeviceGetUtilizationRates");
  AskUnsigned power = function<AskUnsigned>(handle, "nvmlDeviceGetPowerUsage");
  AskLong energy = function<AskLong>(handle, "nvmlDeviceGetTotalEnergyConsumption");
  AskMemory memory = function<AskMemory>(handle, "nvmlDeviceGetMemoryInfo");
  AskUnsigned generation = function<AskUnsigned>(handle, "nvmlDeviceGetCurrPcieLinkGeneration"),
              width = function<AskUnsigned>(handle, "nvmlDeviceGetCurrPcieLinkWidth"),
              most_generation = function<AskUnsigned>(handle, "nvmlDeviceGetMaxPcieLinkGeneration"),
              most_width = function<AskUnsigned>(handle, "nvmlDeviceGetMaxPcieLinkWidth");
  bool started = false;
};

std::unique_ptr<GpuMonitor> GpuMonitor::open(const std::string& pci_bus, const char* library_name) {
  void* handle = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto library = std::make_unique<Library>(handle);
  if (library->start == nullptr || library->shut_down == nullptr || library->find == nullptr || library->start() != 0)
    return nullptr;
  library->started = true;
  void* card = nullptr;
  if (library->find(pci_bus.c_str(), &card) != 0) return nullptr;
  return std::unique_ptr<GpuMonitor>(new GpuMonitor(std::move(library), card));
}

GpuMonitor::GpuMonitor(std::unique_ptr<Library> library, void* card) : library_(std::move(library)), card_(card) {}
GpuMonitor::~GpuMonitor() = default;

GpuSample GpuMonitor::sample() const {
  GpuSample sample;
  if (const auto rates = asked(library_->utilisation, card_)) sample.utilisation = rates->gpu / 100.0;
  if (const auto milliwatts = asked(library_->power, card_)) sample.power = *milliwatts / 1e3;
  if (const auto millijoules = asked(library_->energy, card_)) sample.energy = static_cast<double>(*millijoules) / 1e3;
  return sample;
}

std::string GpuMonitor::link() const {
  const auto text = [](unsigned generation, unsigned width) {
    return "PCIe " + std::to_string(generation) + ".0 x" + std::to_string(width);
  };
  const auto generation = asked(library_->generation, card_), width = asked(library_->width, card_);
  if (!generation || !width) return {};
  const auto most_generation = asked(library_->most_generation, card_), most_width = asked(library_->most_width, card_);
  std::string link = text(*generation, *width);
  // An idle link sleeps at a low generation and wakes by itself; a narrow one stays narrow.
  if (most_generation && most_width && (*generation < *most_generation || *width < *most_width))
    link += " now, " + text(*most_generation, *most_width) + " at most";
  return link;
}

std::optional<std::uint64_t> GpuMonitor::bytes_used() const {
  const auto memory = asked(library_->memory, card_);
  return memory ? std::optional<std::uint64_t>(memory->used) : std::nullopt;
}

std::optional<std::uint64_t> GpuMonitor::bytes_free() const {
  const auto memory = asked(library_->memory, card_);
  return memory ? std::optional<std::uint64_t>(memory->free) : std::nullopt;
}

}  // namespace tierflow
