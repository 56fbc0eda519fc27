#pragma once
// Token embedding, learned positions where the family has them, dropout. A table in tiles is a stage each: every stage
// fills in the tokens of its rows, the last adds positions and dropout. With an adapter (spec/outer_adapters.h) every
// stage also fills in the tokens' rows of A [tokens, rank], which the carry has behind the hidden states, and the last
// adds scale * B of them.
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
  Carry forward(const Weights& weights, const Carry& carry, const Shared& shared, bool training) const;
  // Adds the gradients of the tables in fp32 and gives what the stage before takes; the dropout mask comes from the
  // generator in the state that forward found it in.
  Carry backward(const Weights& weights, const Gradients& gradients, const Carry& carry, const Shared& shared,
                 const Carry& d_out) const;

 private:
  bool is_last() const { return first_row_ + rows_ == vocab_; }
  // The rows of `table`, the stage's of all, that tokens have; of the others those in `before`, or zeros.
  at::Tensor look_up(const at::Tensor& table, const at::Tensor& before, const at::Tensor& ids) const;
  at::Tensor low(const Weights& weights, const Carry& carry, const at::Tensor& ids) const;
  // Adds rows of d [tokens, ..] to the rows of `sum` that the tokens have.
  void add_gradient(const at::Tensor& sum, const at::Tensor& ids, const at::Tensor& d) const;

  at::Tensor rounded_multiplier(const at::Tensor& x) const;

  int tokens_ = 0, positions_ = -1;
  int a_ = -1, b_ = -1;  // of the adapter; B in the last stage alone
  double scale_ = 1;
  std::int64_t first_row_ = 0, rows_ = 0, vocab_ = 0;
  std::int64_t offset_ = 0, max_positions_ = 0;
  double multiplier_ = 1, dropout_ = 0;
};

}  // namespace tierflow::models
