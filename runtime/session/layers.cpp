#include "runtime/session/layers.h"

#include <map>
#include <mutex>

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

class ModuleModel final : public LayeredModel {
 public:
  ModuleModel(ModelSpec spec, std::vector<std::shared_ptr<Layer>> layers)
      : spec_(std::move(spec)), layers_(std::move(layers)) {}

  const ModelSpec& spec() const override { return spec_; }
  Shared share(const MicroBatch& batch, torch::Device device) const override { return shared_of(batch, device); }

  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    bind(stage, weights);
    layers_[stage]->train(training);
    return layers_[stage]->forward(carry, shared);
  }

  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override {
    bind(stage, weights);
    layers_[stage]->train(true);
    return differentiate(layers_[stage]->parameters(), gradients, carry, d_out,
                         [&](const Carry& inputs) { return layers_[stage]->forward(inputs, shared); });
  }

  HeadScores head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const override {
    if (shared.top > 0) throw Exception(io::ErrorKind::usage, "layers of one's own have no most likely tokens");
    const int last = static_cast<int>(layers_.size()) - 1;
    return {.loss_sum = scalar_loss(forward(last, weights, carry, shared, false)).item<double>()};
  }

  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const models::TokenScale& scale) const override {
    if (shared.teacher.defined())
      throw Exception(io::ErrorKind::usage,
                      "layers of one's own have no logits that a teacher's could be compared with");
    if (!scale.uniform()) throw Exception(io::ErrorKind::usage, "layers of one's own have no loss of each token");
    const int last = static_cast<int>(layers_.size()) - 1;
    bind(last, weights);
    layers_[last]->train(true);
    HeadResult result;
    const auto scaled =
        torch::full({}, scale.all(), torch::TensorOptions().dtype(torch::kFloat32).device(shared.ids.device()));
    result.d_carry = differentiate(layers_[last]->parameters(), gradients, carry, {scaled}, [&](const Carry& inputs) {
      const torch::Tensor loss = scalar_loss(layers_[last]->forward(inputs, shared)).to(torch::kFloat32);
      result.loss_sum = loss.detach().to(torch::kDouble);
      return Carry{loss};
    });
    return result;
  }

 private:
  void bind(int stage, const Weights& weights) const {
    const auto parameters = layers_[stage]->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor parameter = parameters[i];
      parameter.set_data(weights[i]);
      parameter.mutable_grad().reset();
    }
  }
  static torch::Tensor scalar_loss(const Carry& carry) {
    if (carry.size() != 1 || carry[0].numel() != 1)
      throw Exception(io::ErrorKind::usage,
                      "the last layer must return one scalar: the loss summed over the labels that count");
    return carry[0].reshape({});
  }

  ModelSpec spec_;
  std::vector<std::shared_ptr<Layer>> layers_;  // by stage; repeated layers share one
};

std::shared_ptr<Layer> construct(const LayerFactory& factory, std::uint64_t seed) {
  torch::manual_seed(seed);
  std::shared_ptr<Layer> layer = factory();
  if (layer == nullptr) throw Exception(io::ErrorKind::usage, "a layer's factory returned null");
  return layer;
}

// Weights of the modules that the factories make, one module at a time.
class FactoryWeights {
 public:
  FactoryWeights(std::vector<std::pair<std::string, LayerFactory>> layers,
                 std::vector<std::shared_ptr<Layer>> templates, std::uint64_t seed)
      : layers_(std::move(layers)), templates_(std::move(templates)), seed_(seed) {}

  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    torch::Tensor values;
    {
      std::lock_guard lock(mutex_);
      const std::string layer = tensor.name.substr(0, tensor.name.size() - tensor.role.size() - 1);
      if (layer != held_name_) make(layer);
      values = held_.at(tensor.role);
    }
    const torch::NoGradGuard no_grad;
    const auto part = values.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(out.size()));
    std::copy_n(part.data_ptr<float>(), out.size(), out.data());
  }

 private:
  void make(const std::string& name) {
    held_.clear();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (layers_[i].first != name) continue;
      const auto layer = construct(layers_[i].second, seed_ + i);
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : layer->named_parameters())
        held_[parameter.key()] = parameter.value().detach().to(torch::kFloat32).contiguous().flatten();
      const auto expected = templates_[i]->buffers(), found = layer->buffers();
      for (std::size_t b = 0; b < expected.size(); ++b)
        if (!torch::equal(expected[b], found[b].to(expected[b].scalar_type())))
          throw Exception(io::ErrorKind::usage, "layer " + name +
                                                    " has a buffer that differs from its siblings': they share one "
                                                    "template; pass such values in the carry or make them parameters");
    }
    held_name_ = name;
  }

  const std::vector<std::pair<std::string, LayerFactory>> layers_;
  const std::vector<std::shared_ptr<Layer>> templates_;
  const std::uint64_t seed_;
  std::mutex mutex_;
  std::string held_name_;
  std::map<std::string, torch::Tensor> held_;
};

}  // namespace

Layers& Layers::add(std::string name, const LayerFactory& factory) {
  entries_.push_back({.name = std::move(name), .factory = factory, .shape = shapes_++});
  return *this;
}

Layers& Layers::repeat(int count, const std::string& name, const LayerFactory& factory) {
  for (int i = 0; i < count; ++i)
    entries_.push_back({.name = name + "." + std::to_string(i), .factory = factory, .shape = shapes_});
  ++shapes_;
  return *this;
}

Model Layers::build(std::uint64_t seed) const {
  DeviceMemory::install();
  if (entries_.size() < 2)
    throw Exception(io::ErrorKind::usage, "a model has at least a first layer and one that returns the loss");
  ModelSpec spec;
  spec.config_json = "{}";
  std::map<int, std::shared_ptr<Layer>> templates;
  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<std::pair<std::string, LayerFactory>> factories;
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    const Entry& entry = entries_[index];
    for (const auto& [name, factory] : factories)
      if (name == entry.name) throw Exception(io::ErrorKind::usage, "two layers are named " + name);
    if (!templates.contains(entry.shape)) {
      templates[entry.shape] = construct(entry.factory, seed + index);
      templates[entry.shape]->to(torch::kBFloat16);
    }
    UnitSpec unit{.name = entry.name};
    for (const auto& parameter : templates[entry.shape]->named_parameters())
      unit.tensors.push_back({.name = entry.name + "." + parameter.key(),
                              .role = parameter.key(),
                              .shape = parameter.value().sizes().vec(),
                              .decays = parameter.value().dim() >= 2,
                              .moments_32 = parameter.value().dim() < 2});
    const bool last = index + 1 == entries_.size();
    spec.stages.push_back({.kind = last ? StageKind::head : StageKind::block,
                           .block = last ? -1 : static_cast<std::int64_t>(index),
                           .units = {static_cast<int>(index)}});
    spec.units.push_back(std::move(unit));
    layers.push_back(templates[entry.shape]);
    factories.emplace_back(entry.name, entry.factory);
  }
  const auto weights = std::make_shared<FactoryWeights>(std::move(factories), layers, seed);
  return {std::make_shared<ModuleModel>(std::move(spec), std::move(layers)),
          [weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
            weights->read(tensor, first, out);
          }};
}

}  // namespace tierflow
