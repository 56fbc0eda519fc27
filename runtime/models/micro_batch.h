#pragma once
// What one forward and backward takes.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tierflow {

struct MicroBatch {
  at::Tensor ids;     // [micro-batch, sequence] int64
  at::Tensor labels;  // the same shape: the token that each position predicts (already shifted), -100 where none counts
  std::int64_t target_tokens() const;  // labels that count
};

}  // namespace tierflow
