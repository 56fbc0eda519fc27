#pragma once
// A model run whole with all weights resident: what the stages of LayeredModel add up to.
#include <torch/utils.h>

#include <functional>
#include <utility>
#include <vector>

#include "runtime/models/layered_model.h"

namespace tierflow::testing {

struct ResidentModel {
  std::unique_ptr<LayeredModel> model;
  std::vector<Weights> units;                         // of each unit
  std::vector<std::vector<torch::Tensor>> gradients;  // fp32 (fp64 beside fp64 weights), the same shapes
  models::RouterLoads loads;                          // with the load-balancing loss: of forward_backward()'s tokens

  ResidentModel(const ModelSpec& spec, torch::ScalarType type) : model(make_model(spec)) {
    const auto sum = type == torch::kDouble ? torch::kDouble : torch::kFloat;
    for (const UnitSpec& unit : spec.units) {
      units.emplace_back();
      gradients.emplace_back();
      for (const TensorSpec& tensor : unit.tensors) {
        units.back().push_back(torch::zeros(tensor.shape, tensor.format == WeightFormat::fp32 ? torch::kFloat : type));
        gradients.back().push_back(torch::zeros(tensor.shape, sum));
      }
    }
  }

  const ModelSpec& spec() const { return model->spec(); }
  int stages() const { return static_cast<int>(spec().stages.size()); }

  // Every weight from a normal distribution, norms around one: no layer equals another.
  void randomise(std::uint64_t seed, double scale = 0.2) {
    const torch::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (std::size_t u = 0; u < units.size(); ++u) {
      for (std::size_t t = 0; t < units[u].size(); ++t) {
        torch::Tensor value = torch::randn(units[u][t].sizes(), generator, torch::kDouble) * scale;
        if (spec().units[u].tensors[t].init == Init::ones) value += 1.0;
        units[u][t].copy_(value);
      }
    }
  }

  void zero_gradients() {
    for (auto& unit : gradients) {
      for (auto& gradient : unit)
        if (gradient.defined()) gradient.zero_();
    }
  }

  std::vector<torch::Tensor> bind(int stage, const std::vector<std::vector<torch::Tensor>>& from) const {
    std::vector<torch::Tensor> bound;
    for (int unit : spec().stages[static_cast<std::size_t>(stage)].units) {
      for (const torch::Tensor& tensor : from[static_cast<std::size_t>(unit)]) bound.push_back(tensor);
    }
    return bound;
  }

  // The carries into the blocks and the head, stage by stage; element s is the input of stage s.
  std::vector<Carry> forward(
      const Shared& shared, bool training, std::uint64_t seed = 0, const std::function<void()>& passed = [] {}) const {
    const torch::NoGradGuard no_grad;
    std::vector<Carry> inputs = {{}};
    for (int stage = 0; stage + 1 < stages(); ++stage) {
      torch::manual_seed(seed + static_cast<std::uint64_t>(stage));
      inputs.push_back(model->forward(stage, bind(stage, units), inputs.back(), shared, training));
      passed();
    }
    return inputs;
  }

  double aux_loss() const { return spec().config.experts.balance * loads.loss(); }

  // Adds the gradients of scale * (sum of the losses) + aux_loss(); returns that sum.
  double forward_backward(const MicroBatch& batch, const models::TokenScale& scale, bool training = true,
                          std::uint64_t seed = 0) {
    Shared shared = model->share(batch, torch::kCPU);
    models::RouterBalance balance{.parts = {{.begin = 0, .length = batch.ids.numel()}}, .found = {{}}};
    const double coefficient = spec().config.experts.balance;
    if (coefficient != 0) shared.watch.balance = &balance;
    loads = {};
    const std::vector<Carry> inputs = forward(shared, training, seed, [&] {
      if (const models::RouterLoads layer = std::exchange(balance.found[0], {}); !layer.chosen.empty())
        loads.add(layer);
    });
    balance.gradients = {loads.gradient(coefficient)};
    const int last = stages() - 1;
    HeadResult head =
        model->head_loss_and_backward(bind(last, units), bind(last, gradients), inputs.back(), shared, scale);
    Carry d = std::move(head.d_carry);
    for (int stage = last - 1; stage >= 0; --stage) {
      torch::manual_seed(seed + static_cast<std::uint64_t>(stage));
      const auto at = static_cast<std::size_t>(stage);
      d = model->backward(stage, bind(stage, units), bind(stage, gradients),
                          taken_by_backward(spec().stages[at], inputs[at]), shared, d);
    }
    return head.loss_sum.item<double>();
  }
};

}  // namespace tierflow::testing
