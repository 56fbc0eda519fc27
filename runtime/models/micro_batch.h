#pragma once
// What one forward and backward takes.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tierflow {

// Tokens [begin, begin + length) of a row: a query attends to keys of its own document alone.
struct Document {
  std::int64_t row = 0, begin = 0, length = 0;
};

struct MicroBatch {
  at::Tensor ids;     // [micro-batch, sequence] int64
  at::Tensor labels;  // the same shape: the token that each position predicts (already shifted), -100 where none counts
  // The same shape, int64: where rows are packed, the position of each token in its document. It is 0 at the first
  // token of a row and of each document, and one more at each next token. Undefined: each row is one document.
  at::Tensor positions = {};
  // Of pairs (pair_batch.h): each row's log-probability under the reference model, where the loss needs it.
  std::vector<double> reference = {};

  // A teacher's most likely tokens for each position [micro-batch, sequence, K], where the loss needs them: ids int32
  // and log-probabilities fp16 (soft_targets.h).
  at::Tensor teacher_ids = {}, teacher_log_probabilities = {};

  std::int64_t target_tokens() const;  // labels that count
  // The documents of all rows in order; none where each row is one. Throws Exception (kind usage) for positions that
  // are not as above.
  std::vector<Document> documents() const;
};

}  // namespace tierflow
