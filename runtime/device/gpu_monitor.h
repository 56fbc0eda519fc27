#pragma once
// What the NVIDIA driver says about a card: utilisation, power, energy, the link. Its library (NVML) belongs to the
// driver and is loaded when a monitor is opened. A machine without it has no monitor; nothing else changes.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace tierflow {

// Values that the card does not report are empty.
struct GpuSample {
  std::optional<double> utilisation;  // share of the recent time in which a kernel ran, 0 to 1
  std::optional<double> power;        // W
  std::optional<double> energy;       // J, since the driver was loaded
};

class GpuMonitor {
 public:
  // The card on that PCI bus; null if there is no NVML or it does not know the card.
  static std::unique_ptr<GpuMonitor> open(const std::string& pci_bus, const char* library = "libnvidia-ml.so.1");
  ~GpuMonitor();

  GpuSample sample() const;
  // "PCIe 5.0 x16", and what the card could do if the link is slower; empty if unknown.
  std::string link() const;
  // Bytes that all processes use, contexts included; empty if unknown.
  std::optional<std::uint64_t> bytes_used() const;
  // Bytes that no process uses; empty if unknown. To ask for them takes no context on the card, which would use some.
  std::optional<std::uint64_t> bytes_free() const;

 private:
  struct Library;
  GpuMonitor(std::unique_ptr<Library> library, void* card);
  std::unique_ptr<Library> library_;
  void* card_;
};

}  // namespace tierflow
