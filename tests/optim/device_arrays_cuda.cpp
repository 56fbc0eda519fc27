#include <cuda_runtime.h>

#include <stdexcept>

#include "tests/optim/device_arrays.h"

namespace tierflow::optim {
namespace {
void require(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
}  // namespace

bool gpu_is_here() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

DeviceArray::DeviceArray(std::size_t bytes) {
  void* data = nullptr;
  require(cudaMalloc(&data, bytes));
  data_ = {data, [](void* memory) { cudaFree(memory); }};
}
void DeviceArray::set(const void* from, std::size_t bytes) {
  require(cudaMemcpyAsync(data_.get(), from, bytes, cudaMemcpyHostToDevice, cudaStreamLegacy));
}
void DeviceArray::get(void* to, std::size_t bytes) const {
  require(cudaMemcpyAsync(to, data_.get(), bytes, cudaMemcpyDeviceToHost, cudaStreamLegacy));
  require(cudaStreamSynchronize(cudaStreamLegacy));
}

}  // namespace tierflow::optim
