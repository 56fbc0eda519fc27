#pragma once
// A linear layer's low-rank adapter (spec/adapters.h): adds scale * B(A(x)) to its output, or scale * (B(A(x)) -
// B0(A0(x))) where it has first values beside it. Their difference is taken first: it is zero until they differ.
#include <string>

#include "runtime/models/layered_model.h"
#include "runtime/models/tensor_index.h"

namespace tierflow::models {

struct Adapter {
  int a = -1, b = -1;    // positions in Weights; -1: there is none
  int a0 = -1, b0 = -1;  // its first values
  double scale = 1.0;

  Adapter() = default;
  // That of the layer `module`, as the index names it, if there is one.
  Adapter(const TensorIndex& index, const std::string& module);

  explicit operator bool() const { return a >= 0; }
  // y of the layer, x its input [.., in]: y with the adapter's part added. Differentiable where autograd is on.
  // dropout: of the x that A takes; A0 takes all of it.
  at::Tensor add_to(const at::Tensor& y, const Weights& weights, const at::Tensor& x, double dropout) const;
  // By hand, for d_y [tokens, out]: the gradient of A(x) [tokens, rank]. Undefined where there is no adapter.
  at::Tensor low_gradient(const Weights& weights, const at::Tensor& d_y) const;
  // Adds the gradient of x [tokens, in] from those of y and A(x).
  void add_input_gradient(at::Tensor& d_x, const Weights& weights, const at::Tensor& d_y,
                          const at::Tensor& d_low) const;
  // Adds the gradients of A and B.
  void add_gradients(const Gradients& sums, const Weights& weights, const at::Tensor& d_y, const at::Tensor& x,
                     const at::Tensor& d_low) const;
};

}  // namespace tierflow::models
