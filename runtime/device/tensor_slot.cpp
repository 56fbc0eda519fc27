#include "runtime/device/tensor_slot.h"

#include "swap/layout.h"

namespace tierflow {
namespace {
constexpr std::uint64_t kAlign = 256;
}

std::vector<TensorShape> shapes_in_slot(const std::vector<torch::Tensor>& tensors) {
  std::vector<TensorShape> shapes;
  std::uint64_t offset = 0;
  for (const torch::Tensor& tensor : tensors) {
    shapes.push_back(
        {.shape = tensor.sizes().vec(), .dtype = tensor.scalar_type(), .bytes = tensor.nbytes(), .offset = offset});
    offset += swap::round_up(tensor.nbytes(), kAlign);
  }
  return shapes;
}

std::uint64_t slot_bytes(const std::vector<TensorShape>& shapes) {
  return shapes.empty() ? 0 : swap::round_up(shapes.back().offset + shapes.back().bytes, swap::kSector);
}

std::vector<torch::Tensor> tensors_in_slot(std::byte* slot, const std::vector<TensorShape>& shapes,
                                           torch::Device device) {
  std::vector<torch::Tensor> tensors;
  for (const TensorShape& shape : shapes)
    tensors.push_back(
        torch::from_blob(slot + shape.offset, shape.shape, torch::TensorOptions().dtype(shape.dtype).device(device)));
  return tensors;
}

std::vector<TensorShape> copy_to_slot(std::byte* slot, const std::vector<torch::Tensor>& tensors) {
  std::vector<TensorShape> shapes = shapes_in_slot(tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tensors_in_slot(slot, {shapes[i]}, tensors[i].device()).front().copy_(tensors[i]);
  return shapes;
}

}  // namespace tierflow
