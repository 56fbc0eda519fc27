#pragma once
// How the tensors that are saved for an item lie in its slot: side by side in one piece of device memory.
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tierflow {

struct TensorShape {
  std::vector<std::int64_t> shape;
  torch::ScalarType dtype = torch::kBFloat16;
  std::uint64_t bytes = 0, offset = 0;  // in the slot
};

// The place of each tensor in the slot, one after the other.
std::vector<TensorShape> shapes_in_slot(const std::vector<torch::Tensor>& tensors);
// Bytes of a slot that holds them, a multiple of swap::kSector.
std::uint64_t slot_bytes(const std::vector<TensorShape>& shapes);
// Views of the slot, dense.
std::vector<torch::Tensor> tensors_in_slot(std::byte* slot, const std::vector<TensorShape>& shapes,
                                           torch::Device device);
// Copies the tensors to where `shapes_in_slot` says.
std::vector<TensorShape> copy_to_slot(std::byte* slot, const std::vector<torch::Tensor>& tensors);

}  // namespace tierflow
