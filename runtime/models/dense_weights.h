#pragma once
// Turns frozen weights as they are stored (runtime/spec/weight_format.h) into tensors to compute with.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

// `stored`: one-dimensional uint8 with the stored bytes, on the CPU or a CUDA device, from an address that 4 divides;
// more bytes may follow. Returns a new bf16 tensor, fp32 of fp32, on its device, whose memory torch's allocator gives.
// On CUDA the work is enqueued on torch's current stream, and `stored` must hold until it has run. Every device gives
// the same bits.
at::Tensor dense(const at::Tensor& stored, WeightFormat format, const std::vector<std::int64_t>& shape);

// The weights of `of_stage`, unit after unit, with those that are stored in other formats made dense, the others as
// they are. Undefined ones stay so.
Weights dense_weights(const std::vector<UnitSpec>& units, const std::vector<int>& of_stage, const Weights& stored);

bool has_stored_weights(const ModelSpec& spec, int stage);
// The same for a stage of a model. Adapters with a magnitude get the lengths that the rows of their sums have now
// (Adapter::with_lengths).
Weights dense_weights(const ModelSpec& spec, int stage, const Weights& stored);

}  // namespace tierflow::models
