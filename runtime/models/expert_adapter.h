#pragma once
// The low-rank adapters of a stage's experts (spec/expert_parameters.h). Each expert has its own factors A and B, and
// adds scale * B(A(x)) to the product of its matrix with its tokens x.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "runtime/models/tensor_index.h"

namespace tierflow::models {

// The factors of one expert; undefined if there are none.
struct ExpertFactors {
  at::Tensor a, b;  // [rank, in], [out, rank]
  double scale = 1;

  explicit operator bool() const { return a.defined(); }
  // scale * A(x) [tokens, rank] for x [tokens, in]; undefined where there are no factors.
  at::Tensor low(const at::Tensor& x) const;
  // The gradient of low() from that of y [tokens, out]; undefined likewise.
  at::Tensor low_gradient(const at::Tensor& d_y) const;
};

// y with the product of low(x) and b, or with some rows of b, added; y itself where low is undefined. Differentiable
// where autograd is on.
at::Tensor with_product(const at::Tensor& y, const at::Tensor& low, const at::Tensor& b);

// The adapters of all experts of the stage, for one parameter.
class ExpertAdapter {
 public:
  ExpertAdapter() = default;
  // For the parameter `name` within `module`. Without factors in the index there is no adapter.
  ExpertAdapter(const TensorIndex& index, const std::string& module, const std::string& name);

  explicit operator bool() const { return a_ >= 0; }
  // The factors of the stage's expert number `here`, in its tensors or in their gradients.
  ExpertFactors of(const std::vector<at::Tensor>& tensors, std::int64_t here) const;

 private:
  int a_ = -1, b_ = -1;
  double scale_ = 1;
};

}  // namespace tierflow::models
