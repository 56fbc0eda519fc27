#pragma once
// The devices that a test program's tests run over. Which, is chosen where it is linked: devices_of_the_machine.cpp, or
// devices_standin.cpp for the CUDA device over a runtime that stands in for CUDA's.
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "swap/device.h"

namespace tierflow::swap {

// For a contract. `open` gives null where the machine has no such device.
struct DeviceUnderTest {
  std::string name;
  std::function<std::unique_ptr<Device>()> open;
  friend std::ostream& operator<<(std::ostream& to, const DeviceUnderTest& device) { return to << device.name; }
};
std::vector<DeviceUnderTest> devices_under_test();

// For runs of a toy model: its memory is memory that the host can read. A seed that is not 0 delays and poisons.
std::unique_ptr<Device> open_toy_device(std::uint64_t chaos_seed);
// Does the toy's work when the stream comes to it, as enqueue() of a real model does with kernels.
void compute_on(Device& device, StreamId stream, std::function<void()> work);

}  // namespace tierflow::swap
