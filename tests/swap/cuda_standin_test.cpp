// What the stand-in for CUDA's runtime itself promises of launches.
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/cuda/standin.h"

namespace tierflow::testing::cuda {
namespace {

class CudaStandin : public ::testing::Test {
 protected:
  void SetUp() override { start({}); }
  void TearDown() override { EXPECT_EQ(finish().faults, std::vector<std::string>()); }
};

void nothing() {}

cudaError_t launched(dim3 grid, dim3 block) {
  return cudaLaunchKernel(nothing, grid, block, nullptr, 0, cudaStreamLegacy);
}

// The limits of CUDA's programming guide, which every card has.
TEST_F(CudaStandin, RefusesLaunchesThatNoCardTakes) {
  const std::vector<std::pair<dim3, dim3>> refused = {
      {{0, 1, 1}, 32},   {{1, 0, 1}, 32},     {{1, 1, 0}, 32},     {1, {0, 1, 1}},           {1, {1, 0, 1}},
      {1, {1, 1, 0}},    {{1, 65536, 1}, 32}, {{1, 1, 65536}, 32}, {{0x80000000U, 1, 1}, 1}, {1, {1025, 1, 1}},
      {1, {1, 1025, 1}}, {1, {1, 1, 65}},     {1, {32, 33, 1}},    {1, {65536, 65536, 1}}};
  for (const auto& [grid, block] : refused) {
    EXPECT_EQ(launched(grid, block), cudaErrorInvalidConfiguration)
        << grid.x << " x " << grid.y << " x " << grid.z << " blocks of " << block.x << " x " << block.y << " x "
        << block.z << " threads";
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(launched({1, 65535, 1}, 1), cudaSuccess);
  EXPECT_EQ(launched({1, 1, 65535}, 1), cudaSuccess);
  EXPECT_EQ(launched(1, 1024), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

void count_threads(unsigned* times) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  ++times[block * blockDim.x + threadIdx.x];
}

TEST_F(CudaStandin, RunsEachThreadOfAGridOnce) {
  constexpr unsigned kThreads = 2 * 3 * 4 * 32;
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kThreads * sizeof(unsigned)), cudaSuccess);
  std::vector<unsigned> times(kThreads);
  ASSERT_EQ(cudaMemcpyAsync(memory, times.data(), kThreads * sizeof(unsigned), cudaMemcpyHostToDevice, nullptr),
            cudaSuccess);
  void* arguments[] = {&memory};
  ASSERT_EQ(cudaLaunchKernel(count_threads, dim3(2, 3, 4), 32, arguments, 0, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(times.data(), memory, kThreads * sizeof(unsigned), cudaMemcpyDeviceToHost, nullptr),
            cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(times, std::vector<unsigned>(kThreads, 1));
}

}  // namespace
}  // namespace tierflow::testing::cuda
