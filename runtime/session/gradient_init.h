#pragma once
// Adapters whose first values come from the gradient of the base (LoRA-GA), and projectors of it (GaLore): what one
// backward leaves of it.
#include <map>
#include <string>
#include <vector>

#include "runtime/models/layered_model.h"
#include "runtime/session/adapter_factors.h"

namespace tierflow {

// Holds the gradients of one stage's weights, fp32 on the device, and the factors of those of all stages before.
class GradientInit {
 public:
  GradientInit(const ModelSpec& spec, std::uint64_t seed, torch::Device device);
  // Where the backward of a stage adds the gradients of the weights beside adapters: puts sums into `gradients`, zeros
  // for the first micro-batch.
  void bind(int stage, int micro_batch, Gradients& gradients);
  // After the last micro-batch of a stage: decomposes its sums, none after a signal asked for an end (base/signals.h).
  // Throws as factors_of_gradient() does; may be called again then, and goes on with the sum that it had come to.
  void take(int stage);
  // Whether every gradient of which a projector is wanted was finite.
  bool finite() const { return finite_; }
  // When all stages were taken: elements [first, first + values.size()) of an adapter's tensor, of those that it has.
  void read(const TensorSpec& factor, std::uint64_t first, std::span<float> values) const;

 private:
  struct Weight {
    std::size_t position = 0;  // in the stage's Weights
    std::string module;
    FactorsOf of;
    std::vector<std::int64_t> shape;
  };
  std::vector<Weight> weights_of(int stage) const;

  const ModelSpec& spec_;
  const AdapterInit init_;
  const std::uint64_t seed_;
  const torch::Device device_;
  bool finite_ = true;
  std::vector<torch::Tensor> sums_;  // of the stage at hand
  std::map<std::string, Factors> factors_;
};

}  // namespace tierflow
