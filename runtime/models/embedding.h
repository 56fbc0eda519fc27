#pragma once
// Token embedding, learned positions where the family has them, dropout. A table in tiles is a stage each: every stage
// fills in the tokens of its rows, the last adds positions and dropout.
#include <ATen/core/Tensor.h>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

// add_rows_at() of ops.h for the ids [tokens] that are rows of sum; the others add nothing. Nobody counts which are, so
// the host does not wait for the device.
void add_rows_within(const at::Tensor& sum, const at::Tensor& ids, const at::Tensor& d);

class Embedding {
 public:
  // The stage's tokens [rows, hidden] and, in the last stage and where the model has them, positions
  // [position_offset + max_positions, hidden].
  Embedding(const ModelSpec& spec, int stage);

  // Hidden states [batch, sequence, hidden], complete after the last stage; `carry` is what the stage before gave.
  // Ids are in the vocabulary (check_tokens() of micro_batch.h). Throws Exception (kind usage) for a document longer
  // than the positions.
  at::Tensor forward(const Weights& weights, const Carry& carry, const Shared& shared, bool training) const;
  // Adds the gradients of the tables in fp32 and gives what the stage before takes; the dropout mask comes from the
  // generator in the state that forward found it in.
  Carry backward(const Gradients& gradients, const Shared& shared, const at::Tensor& d_out) const;

 private:
  at::Tensor look_up(const at::Tensor& table, const Carry& carry, const at::Tensor& ids) const;

  at::Tensor rounded_multiplier(const at::Tensor& x) const;

  int tokens_ = 0, positions_ = -1;
  std::int64_t first_row_ = 0, rows_ = 0, vocab_ = 0;
  std::int64_t offset_ = 0, max_positions_ = 0;
  double multiplier_ = 1, dropout_ = 0;
};

}  // namespace tierflow::models
