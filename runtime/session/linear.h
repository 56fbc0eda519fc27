#pragma once
// The linear layer for your own layers (layers.h) that can have a low-rank adapter.
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <functional>

namespace tierflow {

// torch::nn::Linear: its options, names, shapes and first values; x [.., in] -> [.., out]. In a model of
// with_adapters() its forward adds what its adapter gives; PEFT finds the adapter under this module's path.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& input) {
    return computed_by_ ? computed_by_(input) : torch::nn::LinearImpl::forward(input);
  }
  // Computes forward() while a layer of a model with adapters computes; null: the layer's own product.
  void compute_by(std::function<torch::Tensor(const torch::Tensor&)> function) { computed_by_ = std::move(function); }

 private:
  std::function<torch::Tensor(const torch::Tensor&)> computed_by_;
};
TORCH_MODULE(Linear);

}  // namespace tierflow
