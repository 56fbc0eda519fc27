#pragma once
// Copies small tensors between host and device. To CUDA this is one copy from pinned memory, and the host does not
// wait: later work on the same stream finds the tensors there.
#include <ATen/core/Tensor.h>

#include <vector>

namespace tierflow::models {

// The tensors on `device`, in their order; undefined ones stay undefined, and those that are there already are given
// back. Elsewhere than on CUDA this is Tensor::to().
std::vector<at::Tensor> upload(const std::vector<at::Tensor>& tensors, at::Device device);

// The tensor on the host, once the device has computed it. A plain copy waits for that inside the driver, where the
// lanes' copies and launches may have to wait with it.
at::Tensor download(const at::Tensor& tensor);

// What upload() does on CUDA: all of them through one block of host memory, which `host` describes. The results share
// one block of the device; each begins at a multiple of 16 bytes.
std::vector<at::Tensor> upload_in_one_block(const std::vector<at::Tensor>& tensors, at::Device device,
                                            const at::TensorOptions& host);

}  // namespace tierflow::models
