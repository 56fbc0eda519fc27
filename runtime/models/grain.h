#pragma once
// How the operations split their work, which depends only on shapes, and the type that they compute in.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace tierflow::models {

inline constexpr std::int64_t kGrain = 32768;           // elements worth a thread
inline constexpr std::int64_t kSoftmaxSlice = 1 << 22;  // wide logits at once where no kernel works in place

// How many rows of this width are worth a thread.
inline std::int64_t grain_rows(std::int64_t width) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
}

// Calls use(first row, rows) for slices of the logits' rows that may be wide at once.
template <class Use>
void for_each_slice(const at::Tensor& logits, Use use) {
  const std::int64_t rows = logits.size(0), slice = std::max<std::int64_t>(1, kSoftmaxSlice / logits.size(1));
  for (std::int64_t row = 0; row < rows; row += slice) use(row, std::min(slice, rows - row));
}

inline at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace tierflow::models
