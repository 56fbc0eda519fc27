#include "tests/swap/devices_under_test.h"

namespace tierflow::swap {

std::vector<DeviceUnderTest> devices_under_test() {
  return {
      {"cpu", [] { return open_cpu_device(); }},
      {"cpu_chaos", [] { return open_cpu_device({.chaos_seed = 5}); }},
      {"cuda", []() -> std::unique_ptr<Device> { return cuda_available() ? open_cuda_device(0).value() : nullptr; }}};
}

std::unique_ptr<Device> open_toy_device(std::uint64_t chaos_seed) {
  return open_cpu_device({.chaos_seed = chaos_seed});
}
void compute_on(Device& device, StreamId stream, std::function<void()> work) {
  device.enqueue(stream, [work = std::move(work)](const DeviceQueue&) { work(); });
}

}  // namespace tierflow::swap
