#pragma once
// What the current window adds to weights that are trained by projected gradients (AdapterInit::galore).
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>

#include "runtime/spec/model_spec.h"
#include "runtime/state/model_extents.h"
#include "runtime/state/streamed_state.h"

namespace tierflow {

// For one unit: B A beside each weight W [out, in], computed in fp32 from the masters. Holds the factors in fp32.
class WindowSum {
 public:
  // master: hands on a tensor of the unit, in order.
  WindowSum(const ModelSpec& spec, int unit, const std::function<void(int tensor, const UseMaster& use)>& master);
  // Adds it to elements [first, first + values.size()) of a tensor of the unit; a tensor without a window stays. The
  // same bits however a tensor is cut into calls.
  void add_to(int tensor, std::uint64_t first, std::span<float> values) const;

 private:
  struct Product {
    torch::Tensor left, right;  // of W as it is stored
  };
  std::map<int, Product> products_;  // by tensor
};

// `read` for an export of such a model: the words of what a window is added to are fp32 masters with it, rounded to
// bf16 once. Everything that it refers to outlives this.
ReadChunk read_with_windows(const ModelSpec& spec, const ModelExtents& extents);

}  // namespace tierflow
