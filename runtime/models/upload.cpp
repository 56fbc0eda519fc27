#include "runtime/models/upload.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

namespace tierflow::models {

std::vector<at::Tensor> upload(const std::vector<at::Tensor>& tensors, at::Device device) {
  if (device.is_cuda()) return upload_in_one_block(tensors, device, at::TensorOptions().pinned_memory(true));
  std::vector<at::Tensor> there;
  for (const at::Tensor& tensor : tensors) there.push_back(tensor.defined() ? tensor.to(device) : tensor);
  return there;
}

at::Tensor download(const at::Tensor& tensor) {
  if (tensor.is_cuda()) at::accelerator::getCurrentStream(tensor.device().index()).synchronize();
  return tensor.cpu();
}

std::vector<at::Tensor> upload_in_one_block(const std::vector<at::Tensor>& tensors, at::Device device,
                                            const at::TensorOptions& host) {
  constexpr std::int64_t kAligned = 16;
  const auto leaves = [](const at::Tensor& tensor) { return tensor.defined() && tensor.is_cpu(); };
  const auto bytes_of = [](const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); };
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors)
    if (leaves(tensor)) bytes += (bytes_of(tensor) + kAligned - 1) / kAligned * kAligned;
  const at::Tensor block = at::empty({bytes}, host.dtype(at::kByte));
  const auto part = [&](const at::Tensor& of, std::int64_t at, const at::Tensor& like) {
    return of.narrow(0, at, bytes_of(like)).view(like.scalar_type()).view(like.sizes());
  };
  std::int64_t at = 0;
  const auto next = [&](const at::Tensor& tensor) {
    return std::exchange(at, at + (bytes_of(tensor) + kAligned - 1) / kAligned * kAligned);
  };
  for (const at::Tensor& tensor : tensors)
    if (leaves(tensor)) part(block, next(tensor), tensor).copy_(tensor);
  // torch's allocator of pinned memory gives the block to nobody else before the copy has read it.
  const at::Tensor there = block.to(device, at::kByte, /*non_blocking=*/true);
  at = 0;
  std::vector<at::Tensor> views;
  for (const at::Tensor& tensor : tensors) {
    if (leaves(tensor))
      views.push_back(part(there, next(tensor), tensor));
    else
      views.push_back(tensor.defined() ? tensor.to(device) : tensor);
  }
  return views;
}

}  // namespace tierflow::models
