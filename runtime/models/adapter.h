#pragma once
// A linear layer's low-rank adapter (spec/adapters.h): adds scale * B(A(x)) to its output, or scale * (B(A(x)) -
// B0(A0(x))) where it has first values beside it. Their difference is taken first: it is zero until they differ.
// With a magnitude the sum is scaled too, each output by its own gain = (M0 + M) / |row of W + scale * B A| (DoRA).
// The lengths of these rows are computed where they are needed, or once for all by with_lengths().
// If Weights has no factors (without_adapters()), y is the layer's own output.
#include <string>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

struct Adapter {
  int a = -1, b = -1;    // positions in Weights; -1: there is none
  int a0 = -1, b0 = -1;  // its first values
  int m = -1, m0 = -1;   // its magnitude
  double scale = 1.0;

  Adapter() = default;
  // The adapter of the layer `module`, as the index names it, if there is one.
  Adapter(const TensorIndex& index, const std::string& module);

  explicit operator bool() const { return a >= 0; }
  bool has_magnitude() const { return m >= 0; }
  bool is_in(const Weights& weights) const { return a >= 0 && at_position(weights, a).defined(); }
  // y of the layer, x its input [.., in]: y with the adapter's part added. Differentiable where autograd is on.
  // dropout: of the input of A; A0 takes the whole x. For adapters without a magnitude.
  at::Tensor add_to(const at::Tensor& y, const Weights& weights, const at::Tensor& x, double dropout) const;
  // For adapters with a magnitude: the same, scaled, for y = W x without the layer's bias. weight: W [out, in]. The
  // lengths of the rows are constants to autograd. dropout: as PEFT has it, of all that is not W x itself.
  at::Tensor scaled(const at::Tensor& y, const Weights& weights, const at::Tensor& weight, const at::Tensor& x,
                    double dropout) const;

  // [2, out]: M0, and the lengths of the rows of W + scale * B A. It may replace M0 [out] in Weights as long as W, A
  // and B do not change. Every result has the same bits with it. weight: W [out, in].
  at::Tensor with_lengths(const Weights& weights, const at::Tensor& weight) const;

  // The gradient by hand: what follows from the gradient of y [tokens, out].
  struct Incoming {
    at::Tensor low;          // of A(x) [tokens, rank]; undefined where there is no adapter
    at::Tensor sum;          // of W x + scale * B(A(x)), where there is a magnitude
    at::Tensor reciprocals;  // 1 / |row| [out], there
    const at::Tensor& of_sum(const at::Tensor& d_y) const { return sum.defined() ? sum : d_y; }
  };
  Incoming incoming(const Weights& weights, const at::Tensor& weight, const at::Tensor& d_y) const;
  // Adds the gradient of x [tokens, in], without the part through W.
  void add_input_gradient(at::Tensor& d_x, const Weights& weights, const at::Tensor& d_y, const Incoming& in) const;
  // Adds the gradients of A, B and the magnitude.
  void add_gradients(const Gradients& sums, const Weights& weights, const at::Tensor& weight, const at::Tensor& d_y,
                     const at::Tensor& x, const Incoming& in) const;

 private:
  at::Tensor product(const Weights& weights, const at::Tensor& x, int first, int second) const;
  at::Tensor lengths(const Weights& weights, const at::Tensor& weight) const;
  at::Tensor magnitude(const Weights& weights) const;
};

// The weights of a stage for forwards of the model without its adapters.
Weights without_adapters(const ModelSpec& spec, int stage, Weights weights);

}  // namespace tierflow::models
