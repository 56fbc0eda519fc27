#pragma once
// Makes from one backward the first values of adapters that come from the gradient of the base (LoRA-GA), or the
// projectors of the gradient (GaLore).
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
  // Before the backward of a stage: puts into `gradients` sums for the weights beside adapters, zeros for the first
  // micro-batch.
  void bind(int stage, int micro_batch, Gradients& gradients);
  // After the last micro-batch of a stage: decomposes its sums, none after a signal asked for an end (base/signals.h).
  // Throws as factors_of_gradient() does; may be called again then, and goes on with the sum that it had come to.
  void take(int stage);
  // Whether every gradient that needs a projector was finite.
  bool finite() const { return finite_; }
  // After take() of all stages: elements [first, first + values.size()) of an adapter's tensor, if it has such values.
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
  std::vector<torch::Tensor> sums_;  // of the current stage
  std::map<std::string, Factors> factors_;
};

}  // namespace tierflow
