#pragma once
// The low-rank adapter of a head (spec/outer_adapters.h): logits of normed states x are W x + B low(x), with low(x) =
// scale * A(x) [tokens, rank], which is computed once, where the states are normed. Where Weights have no factors
// (without_adapters()), there is none. By hand.
#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

// Rows of a head's matrices, all or those of a tile: W [rows, hidden], and B [rows, rank] or undefined.
struct HeadRows {
  at::Tensor output, b;
  // Writes the logits [tokens, rows] of normed states [tokens, hidden].
  void logits(at::Tensor& logits, const at::Tensor& normed, const at::Tensor& low) const;
};

class HeadAdapter {
 public:
  HeadAdapter() = default;
  // index: of the stage that norms. dropout: of what A takes, in training.
  HeadAdapter(const TensorIndex& index, double dropout);

  struct Kept {
    at::Tensor taken, mask;  // what A took, and what dropout left of it
  };
  // low(normed), undefined where there is none. Where it drops, it draws (random_numbers.h).
  at::Tensor low(const Weights& weights, const at::Tensor& normed, bool training, Kept* kept = nullptr) const;
  // Adds the gradient of A, and to d [tokens, hidden] what follows for the normed states. d_low: the gradient of low().
  void backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_low, const Kept& kept,
                at::Tensor& d) const;

 private:
  int a_ = -1;
  double scale_ = 1, dropout_ = 0;
};

// Position of B in a stage's weights; -1: there is none.
int head_adapter_rows(const TensorIndex& index);

}  // namespace tierflow::models
