// The update on a device over the stand-in for CUDA's runtime: where its work goes, and what becomes of calls that CUDA
// refuses. The tests of device_test.cpp run here too; after each test nothing may be left of what it made.
#include "tests/support/cuda/standin.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "optim/adamw_device.h"
#include "tests/optim/device_arrays.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

namespace cuda = tierflow::testing::cuda;

class NoFaults final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { cuda::start({.seed = 3, .together = true}); }
  void OnTestEnd(const ::testing::TestInfo&) override {
    for (const std::string& fault : cuda::finish().faults) ADD_FAILURE() << "the CUDA runtime: " << fault;
  }
};

[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new NoFaults);  // which owns it
  return true;
}();

// An update of one and a half blocks, of zeros, with a split master and moments in fp32: arrays on the current device.
struct SmallUpdate {
  SmallUpdate() {
    std::vector<std::byte> zeros(4 * n);
    for (DeviceArray* array : {&gradient, &hi, &lo}) array->set(zeros.data(), 2 * n);
    for (DeviceArray* array : {&m, &v}) array->set(zeros.data(), 4 * n);
  }
  void run(const CudaStream& on) {
    State state;
    state.master = MasterFormat::split;
    state.hi = hi.as<std::uint16_t>();
    state.lo = lo.as<std::uint16_t>();
    state.m = {MomentFormat::f32, m.as<float>(), nullptr};
    state.v = {MomentFormat::f32, v.as<float>(), nullptr};
    AdamWParams params;
    params.step = 1;
    params.skip_call_if_not_finite = true;
    adamw_update_on_device(params, gradient.as<std::uint16_t>(), state, state, n, report.as<DeviceReport>(), on);
  }
  DeviceReport reported() const {
    DeviceReport result;
    report.get(&result, sizeof(result));
    return result;
  }

  static constexpr std::size_t n = kBlock + kBlock / 2;
  DeviceArray gradient{2 * n}, hi{2 * n}, lo{2 * n}, m{4 * n}, v{4 * n}, report{sizeof(DeviceReport)};
};

TEST(UpdateOverStandin, GoesToItsDeviceAndLeavesTheCurrentOne) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  SmallUpdate update;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  update.run({.device = 1, .stream = stream});
  int current = -1;
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(update.reported().skipped, 0U);
}

TEST(UpdateOverStandin, WhatCudaRefusesIsThrown) {
  SmallUpdate update;
  std::uint64_t calls = 0;
  for (bool refused = true; refused; calls += refused) {
    cuda::fail_call_in(calls + 1);
    try {
      update.run({});
      refused = false;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "optim: the CUDA device: cudaErrorUnknown");
    }
  }
  cuda::fail_call_in(0);
  EXPECT_EQ(calls, 5U) << "the device, its processors, the report, and two kernels";
}

TEST(UpdateOverStandin, OfNothingNeedsNoGradientAndIsReported) {
  DeviceArray report(sizeof(DeviceReport));
  DeviceReport result{.skipped = 9, .largest_gradient = 9};
  report.set(&result, sizeof(result));
  adamw_update_on_device({}, nullptr, {}, {}, 0, report.as<DeviceReport>(), {});
  report.get(&result, sizeof(result));
  EXPECT_EQ(result.skipped, 0U);
  EXPECT_EQ(result.largest_gradient, 0U);
}

TEST(UpdateOverStandin, ArgumentsThatBreakAContractAreRefused) {
  DeviceArray report(sizeof(DeviceReport));
  EXPECT_THROW(adamw_update_on_device({}, nullptr, {}, {}, 0, nullptr, {}), std::invalid_argument);
  EXPECT_THROW(adamw_update_on_device({}, nullptr, {}, {}, 1, report.as<DeviceReport>(), {}), std::invalid_argument);
  EXPECT_THROW(adamw_update_on_device({.step = 0}, nullptr, {}, {}, 0, report.as<DeviceReport>(), {}),
               std::invalid_argument);
}

// One word serves many calls: a gradient that is finite does not clear it.
TEST(SumsOverStandin, AWordThatSaysNotFiniteStays) {
  const std::size_t n = kNormSegment + 3;
  auto g = gradients(n, 5);
  DeviceArray gradient(2 * n), sums(2 * sizeof(double)), word(4);
  gradient.set(g.data(), 2 * n);
  for (const std::uint32_t before : {0U, 1U}) {
    std::uint32_t not_finite = before;
    word.set(&not_finite, 4);
    gradient_norm_squared_on_device(gradient.as<std::uint16_t>(), n, sums.as<double>(), word.as<std::uint32_t>(), {});
    word.get(&not_finite, 4);
    EXPECT_EQ(not_finite, before);
  }
}

// The refused allocation is the caller's to handle; the launches behind it have not failed.
TEST(UpdateOverStandin, ARefusedAllocationIsNoneOfItsErrors) {
  SmallUpdate update;
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, std::size_t{1} << 40), cudaErrorMemoryAllocation);
  update.run({});
  EXPECT_EQ(update.reported().skipped, 0U);
  cudaGetLastError();
}

}  // namespace
}  // namespace tierflow::optim
