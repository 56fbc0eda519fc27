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
// Adds a tile [tokens, width], whose first column is column `first` of the vocabulary. Tiles come in order. A NaN among
// the logits shows: as a value that is NaN, or as the id INT32_MAX of a place that no logit took.
void top_logits(const at::Tensor& logits, std::int64_t first, const TopLogits& top);

}  // namespace tierflow::models
