#pragma once
// The tensors into which streamed tensors are cut when they are saved, because some models have other tensors in a
// folder.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/checkpoint/safetensors.h"
#include "runtime/spec/packing.h"

namespace tierflow {

// A tensor as it is saved: all elements of a streamed tensor, or a part of them, in order.
struct SavedPart {
  std::string name;
  std::vector<std::int64_t> shape;
};
// By unit and tensor: the tensors into which each streamed one is cut; none: it is not saved.
using SavedParts = std::vector<std::vector<std::vector<SavedPart>>>;

// Of all of them, bf16, in the order in which write_weights() (streamed_state.h) writes. Throws Exception (kind usage)
// where a tensor is saved in parts that are not the whole, or is stored in another format than bf16.
std::vector<TensorHeader> headers_of(const std::vector<UnitSpec>& units, const PackedModel& packed,
                                     const SavedParts& parts);

// Throws Exception (kind usage) if the tensor is stored in another format than bf16; the text says that it cannot be
// `done` ("saved").
void expect_plain(const TensorSpec& tensor, const char* done);

}  // namespace tierflow
