#pragma once
// How the operations split their work, from shapes alone, and the type that they compute in.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace tierflow::models {

inline constexpr std::int64_t kGrain = 32768;           // elements worth a thread
inline constexpr std::int64_t kSoftmaxSlice = 1 << 22;  // wide logits at once where no kernel works in place

// Rows of this width that are worth a thread.
inline std::int64_t grain_rows(std::int64_t width) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
}

inline at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace tierflow::models
