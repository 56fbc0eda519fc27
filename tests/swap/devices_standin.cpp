// The second of the stand-in's devices, so that a call that does not name its device shows. After each test nothing may
// be left of what it made, nor may it have done what no program may.
#include <gtest/gtest.h>

#include "tests/support/cuda/standin.h"
#include "tests/swap/devices_under_test.h"

namespace tierflow::swap {
namespace {

void expect_no_fault() {
  for (const std::string& fault : testing::cuda::finish().faults) ADD_FAILURE() << "the CUDA runtime: " << fault;
}

class NoFaults final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { testing::cuda::start({}); }
  void OnTestEnd(const ::testing::TestInfo&) override { expect_no_fault(); }
};

std::unique_ptr<Device> open(std::uint64_t seed) {
  expect_no_fault();
  testing::cuda::start({.seed = seed});
  return open_cuda_device(testing::cuda::kDevices - 1).value();
}

[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new NoFaults);  // which owns it
  return true;
}();

}  // namespace

std::vector<DeviceUnderTest> devices_under_test() {
  return {{"cuda_standin", [] { return open(0); }}, {"cuda_standin_chaos", [] { return open(5); }}};
}

std::unique_ptr<Device> open_toy_device(std::uint64_t chaos_seed) {
  return open(chaos_seed);
}
void compute_on(Device& device, StreamId stream, std::function<void()> work) {
  device.enqueue(stream, [&work](const DeviceQueue& queue) {
    testing::cuda::enqueue(static_cast<cudaStream_t>(queue.stream), std::move(work));
  });
}

}  // namespace tierflow::swap
