#pragma once
// The largest logits of each token, over a vocabulary that may come in tiles. Of equal logits the first column comes
// first, wherever tiles begin.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tierflow::models {

// The largest so far, in falling order: values [tokens, top] fp32, ids [tokens, top] int32.
struct TopLogits {
  at::Tensor values, ids;
};
TopLogits no_top_logits(std::int64_t tokens, std::int64_t top, at::Device device);
// Takes a tile [tokens, width] in, its columns from `first`; tiles come in order. Logits of NaN are taken by nobody or
// come first: then a value or an id (INT32_MAX) says so.
void top_logits(const at::Tensor& logits, std::int64_t first, const TopLogits& top);

}  // namespace tierflow::models
