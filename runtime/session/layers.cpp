#include "runtime/session/layers.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/linear.h"
#include "runtime/models/random_numbers.h"
#include "runtime/session/own_layers.h"
#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

class ModuleModel final : public LayeredModel {
 public:
  ModuleModel(ModelSpec spec, std::vector<std::shared_ptr<Layer>> layers)
      : spec_(std::move(spec)), layers_(std::move(layers)), adapted_(layers_.size()) {
    for (std::size_t stage = 0; stage < layers_.size(); ++stage) find_adapted(static_cast<int>(stage));
  }

  const ModelSpec& spec() const override { return spec_; }
  const std::vector<std::shared_ptr<Layer>>& layers() const { return layers_; }
  std::uint64_t constant_bytes() const override {
    std::uint64_t bytes = 0;
    for (const auto& layer : std::set(layers_.begin(), layers_.end()))
      for (const torch::Tensor& buffer : layer->buffers()) bytes += buffer.nbytes();
    return bytes;
  }
  Shared share(const MicroBatch& batch, torch::Device device) const override { return shared_of(batch, device); }

  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    const Bound bound(*this, stage, weights, shared.ids.device(), training);
    return layers_[stage]->forward(carry, shared);
  }

  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override {
    const Bound bound(*this, stage, weights, shared.ids.device(), true);
    return differentiate(bound.leaves(), gradients, carry, d_out,
                         [&](const Carry& inputs) { return layers_[stage]->forward(inputs, shared); });
  }

  HeadScores head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const override {
    if (shared.top > 0) fail_usage("layers of one's own have no most likely tokens");
    const int last = static_cast<int>(layers_.size()) - 1;
    return {.loss_sum = scalar_loss(forward(last, weights, carry, shared, false)).item<double>()};
  }

  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const models::TokenScale& scale) const override {
    if (shared.teacher.defined())
      fail_usage("layers of one's own have no logits that a teacher's could be compared with");
    if (!scale.uniform()) fail_usage("layers of one's own have no loss of each token");
    const int last = static_cast<int>(layers_.size()) - 1;
    const Bound bound(*this, last, weights, shared.ids.device(), true);
    HeadResult result;
    const auto scaled =
        torch::full({}, scale.all(), torch::TensorOptions().dtype(torch::kFloat32).device(shared.ids.device()));
    result.d_carry = differentiate(bound.leaves(), gradients, carry, {scaled}, [&](const Carry& inputs) {
      const torch::Tensor loss = scalar_loss(layers_[last]->forward(inputs, shared)).to(torch::kFloat32);
      if (!loss.requires_grad())
        fail_usage("the last layer's loss has no gradient: it was detached, or computed where autograd is off");
      result.loss_sum = loss.detach().to(torch::kDouble);
      return Carry{loss};
    });
    return result;
  }

 private:
  struct Adapted {
    std::shared_ptr<LinearImpl> module;
    models::Adapter adapter;  // by position in the stage's weights
    models::Linear linear;    // the same with its layer
  };

  // While a stage computes: its module's parameters are the weights, and its linear layers have their adapters.
  class Bound {
   public:
    Bound(const ModuleModel& model, int stage, const Weights& weights, torch::Device device, bool training)
        : adapted_(model.adapted_[stage]), leaves_(model.layers_[stage]->parameters()) {
      move_buffers(*model.layers_[stage], device);
      for (std::size_t i = 0; i < leaves_.size(); ++i) {
        leaves_[i].set_data(weights[i]);
        leaves_[i].mutable_grad().reset();
      }
      for (std::size_t i = leaves_.size(); i < weights.size(); ++i) leaves_.push_back(weights[i].detach());
      model.layers_[stage]->train(training);
      const double dropout = training ? model.spec_.config.adapter_dropout : 0.0;
      for (const Adapted& each : adapted_)
        each.module->compute_by([this, &each, dropout](const torch::Tensor& x) {
          // The layer's own product, which training begins with to the bit; of rows with lengths the bias comes last.
          if (each.adapter.has_magnitude()) return each.linear(leaves_, x, dropout);
          return each.adapter.add_to(each.module->torch::nn::LinearImpl::forward(x), leaves_, x, dropout);
        });
    }
    ~Bound() {
      for (const Adapted& each : adapted_) each.module->compute_by(nullptr);
    }
    Bound(const Bound&) = delete;
    Bound& operator=(const Bound&) = delete;
    // The parameters, and behind them the tensors of adapters.
    const Weights& leaves() const { return leaves_; }

   private:
    const std::vector<Adapted>& adapted_;
    Weights leaves_;
  };

  void find_adapted(int stage) {
    const std::string& name = spec_.units[static_cast<std::size_t>(spec_.stages[stage].units.front())].name;
    const models::TensorIndex index(spec_, stage);
    for (const auto& module : layers_[stage]->named_modules(name)) {
      if (!models::Adapter(index, module.key())) continue;
      auto linear = std::dynamic_pointer_cast<LinearImpl>(module.value());
      if (linear == nullptr)
        fail_usage(module.key() +
                   " is no tierflow::Linear, which alone can have an adapter: "
                   "make it one, or name other modules");
      adapted_[stage].push_back(
          {std::move(linear), models::Adapter(index, module.key()), models::Linear(index, module.key())});
    }
  }
  // They stay there for all computations that follow, so the copies are ordinary tensors also where none is now.
  static void move_buffers(const Layer& layer, torch::Device device) {
    const c10::InferenceMode ordinary(false);
    for (torch::Tensor& buffer : layer.buffers())
      if (buffer.device() != device) buffer.set_data(buffer.to(device));
  }
  static torch::Tensor scalar_loss(const Carry& carry) {
    if (carry.size() != 1 || carry[0].numel() != 1)
      fail_usage("the last layer must return one scalar: the loss summed over the labels that count");
    return carry[0].reshape({});
  }

  ModelSpec spec_;
  std::vector<std::shared_ptr<Layer>> layers_;  // by stage; repeated layers share one
  std::vector<std::vector<Adapted>> adapted_;   // by stage
};

// Calls use(path, module) for each module of each layer but the last, which has the loss.
template <class Use>
void for_each_module(const ModuleModel& model, Use use) {
  for (std::size_t stage = 0; stage + 1 < model.layers().size(); ++stage) {
    const std::string& name = model.spec().units[stage].name;
    for (const auto& module : model.layers()[stage]->named_modules(name)) use(module.key(), *module.value());
  }
}

std::shared_ptr<Layer> construct(const LayerFactory& factory, std::uint64_t seed) {
  const models::Seeded seeded(models::Draws::torchs, seed, torch::kCPU);
  std::shared_ptr<Layer> layer = factory();
  if (layer == nullptr) fail_usage("a layer's factory returned null");
  return layer;
}

// What a template must be, and how Tierflow holds it: parameters in bf16, buffers as they are.
void prepare(const std::string& name, Layer& layer) {
  const torch::NoGradGuard no_grad;
  std::map<const void*, std::string> seen;
  for (const auto& parameter : layer.named_parameters()) {
    torch::Tensor values = parameter.value();
    if (!values.is_floating_point())
      fail_usage("parameter " + parameter.key() + " of layer " + name + " is " + c10::toString(values.scalar_type()) +
                 ": parameters are floating-point numbers; make it a buffer");
    if (const auto [first, fresh] = seen.try_emplace(values.unsafeGetTensorImpl(), parameter.key()); !fresh)
      fail_usage("layer " + name + " has one parameter under two names, " + first->second + " and " + parameter.key() +
                 ": register the module that has it once, and call it twice");
    values.set_data(values.to(torch::kBFloat16));
  }
}

// Bytes that a layer takes while its weights are read: as it was made, with copies of its parameters in fp32 and of the
// buffers that it is compared with, which may be on a card.
std::uint64_t bytes_while_read(const Layer& layer) {
  std::uint64_t bytes = 0;
  for (const torch::Tensor& values : layer.parameters())
    bytes += values.nbytes() + (values.scalar_type() == torch::kFloat32 ? 0 : 4 * values.numel());
  for (const torch::Tensor& values : layer.buffers()) bytes += 2 * values.nbytes();
  return bytes;
}

// Weights of the modules that the factories make, one module at a time. After the last element of its last tensor was
// read a module is dropped.
class FactoryWeights {
 public:
  FactoryWeights(std::vector<std::pair<std::string, LayerFactory>> layers,
                 std::vector<std::shared_ptr<Layer>> templates, std::vector<UnitSpec> units, std::uint64_t seed)
      : layers_(std::move(layers)), templates_(std::move(templates)), units_(std::move(units)), seed_(seed) {}

  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    torch::Tensor values;
    {
      std::lock_guard lock(mutex_);
      const std::string layer = tensor.name.substr(0, tensor.name.size() - tensor.role.size() - 1);
      if (layer != held_name_) make(layer);
      values = held_.at(tensor.role);
      if (first + out.size() == static_cast<std::uint64_t>(values.numel())) unread_.erase(tensor.role);
      if (unread_.empty()) drop();
    }
    const torch::NoGradGuard no_grad;
    const auto part = values.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(out.size()));
    std::copy_n(part.data_ptr<float>(), out.size(), out.data());
  }

 private:
  void drop() {
    held_.clear();
    unread_.clear();
    held_name_.clear();
  }
  void make(const std::string& name) {
    drop();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (layers_[i].first != name) continue;
      const auto layer = construct(layers_[i].second, seed_ + i);
      const torch::NoGradGuard no_grad;
      const std::vector<TensorSpec>& tensors = units_[i].tensors;
      bool alike = layer->named_parameters().size() == tensors.size();
      for (const auto& parameter : layer->named_parameters()) {
        alike = alike && std::ranges::any_of(tensors, [&](const TensorSpec& tensor) {
                  return tensor.role == parameter.key() &&
                         parameter.value().sizes() == torch::IntArrayRef(tensor.shape) &&
                         tensor.trainable == parameter.value().requires_grad();
                });
        held_[parameter.key()] = parameter.value().detach().to(torch::kFloat32).contiguous().flatten();
        unread_.insert(parameter.key());
      }
      if (!alike)
        fail_usage("layer " + name +
                   " has other parameters than its factory made before, in name, shape or requires_grad: the layers "
                   "of a repeat() are of one shape; add() each of the others");
      const auto expected = templates_[i]->buffers(), found = layer->buffers();
      alike = expected.size() == found.size();
      for (std::size_t b = 0; alike && b < expected.size(); ++b)
        alike = expected[b].scalar_type() == found[b].scalar_type() && torch::equal(expected[b].cpu(), found[b]);
      if (!alike)
        fail_usage("layer " + name +
                   " has a buffer that forward() changes, or that differs from its siblings': buffers are constants "
                   "that all layers of a repeat() share; pass such values in the carry or make them parameters");
    }
    held_name_ = name;
  }

  const std::vector<std::pair<std::string, LayerFactory>> layers_;
  const std::vector<std::shared_ptr<Layer>> templates_;
  const std::vector<UnitSpec> units_;
  const std::uint64_t seed_;
  std::mutex mutex_;
  std::string held_name_;
  std::map<std::string, torch::Tensor> held_;
  std::set<std::string> unread_;  // of them
};

}  // namespace

std::shared_ptr<LayeredModel> own_layers_as(const LayeredModel& model, const ModelSpec& spec) {
  const auto* own = dynamic_cast<const ModuleModel*>(&model);
  return own == nullptr ? nullptr : std::make_shared<ModuleModel>(spec, own->layers());
}

AdapterConfig named_in_own_layers(const LayeredModel& model, AdapterConfig config) {
  const auto* own = dynamic_cast<const ModuleModel*>(&model);
  if (own == nullptr) return config;
  if (config.init == AdapterInit::galore)
    fail_usage("projected gradients are for the models of load() and from_config(), not for layers of one's own");
  if (!config.layers.empty())
    fail_usage("layers of one's own have names, not numbers: choose among them by targets or a target pattern");
  if (!config.targets.empty() || !config.target_pattern.empty() || config.parameters_alone) return config;
  for_each_module(*own, [&](const std::string& path, const torch::nn::Module& module) {
    if (dynamic_cast<const LinearImpl*>(&module) != nullptr) config.targets.push_back(path);
  });
  if (config.targets.empty())
    fail_usage("no layer but the last has a tierflow::Linear, which alone can have an adapter");
  return config;
}

std::vector<std::string> no_linear_weights(const LayeredModel& model) {
  std::vector<std::string> others;
  const auto* own = dynamic_cast<const ModuleModel*>(&model);
  if (own == nullptr) return others;
  for (const UnitSpec& unit : own->spec().units)
    for (const TensorSpec& tensor : unit.tensors)
      if (!is_adapter(tensor) && !linear_module(tensor).empty()) others.push_back(tensor.name);
  for_each_module(*own, [&](const std::string& path, const torch::nn::Module& module) {
    if (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr) std::erase(others, path + ".weight");
  });
  return others;
}

Layers& Layers::add(std::string name, const LayerFactory& factory) {
  entries_.push_back({.name = std::move(name), .factory = factory, .shape = shapes_++});
  return *this;
}

Layers& Layers::repeat(int count, const std::string& name, const LayerFactory& factory) {
  if (count < 1) fail_usage("repeat() makes at least one layer of " + name + ", not " + std::to_string(count));
  for (int i = 0; i < count; ++i)
    entries_.push_back({.name = name + "." + std::to_string(i), .factory = factory, .shape = shapes_});
  ++shapes_;
  return *this;
}

Model Layers::build(std::uint64_t seed) const {
  DeviceMemory::install();
  if (entries_.size() < 2) fail_usage("a model has at least a first layer and one that returns the loss");
  ModelSpec spec;
  spec.config_json = "{}";
  std::map<int, std::shared_ptr<Layer>> templates;
  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<std::pair<std::string, LayerFactory>> factories;
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    const Entry& entry = entries_[index];
    if (entry.name.empty()) fail_usage("layer " + std::to_string(index) + " has no name");
    for (const auto& [name, factory] : factories)
      if (name == entry.name) fail_usage("two layers are named " + name);
    if (!templates.contains(entry.shape)) {
      templates[entry.shape] = construct(entry.factory, seed + index);
      spec.source_bytes = std::max(spec.source_bytes, bytes_while_read(*templates[entry.shape]));
      prepare(entry.name, *templates[entry.shape]);
    }
    UnitSpec unit{.name = entry.name};
    for (const auto& parameter : templates[entry.shape]->named_parameters())
      unit.tensors.push_back({.name = entry.name + "." + parameter.key(),
                              .role = parameter.key(),
                              .shape = parameter.value().sizes().vec(),
                              .decays = parameter.value().dim() >= 2,
                              .moments_32 = parameter.value().dim() < 2,
                              .trainable = parameter.value().requires_grad()});
    const bool last = index + 1 == entries_.size();
    spec.stages.push_back({.kind = last ? StageKind::head : StageKind::block,
                           .block = last ? -1 : static_cast<std::int64_t>(index),
                           .units = {static_cast<int>(index)}});
    spec.units.push_back(std::move(unit));
    layers.push_back(templates[entry.shape]);
    factories.emplace_back(entry.name, entry.factory);
  }
  spec.config.layers = static_cast<std::int64_t>(entries_.size()) - 1;
  const auto weights = std::make_shared<FactoryWeights>(std::move(factories), layers, spec.units, seed);
  return {std::make_shared<ModuleModel>(std::move(spec), std::move(layers)),
          [weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
            weights->read(tensor, first, out);
          }};
}

Model Layers::load(const std::filesystem::path& folder) const {
  Model model = build();
  const auto checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(folder));
  check_tensors(model.spec(), *checkpoint);
  ModelSpec read_in_pieces = model.spec();
  read_in_pieces.source_bytes = 0;
  model.layers = own_layers_as(*model.layers, read_in_pieces);
  model.weights = [checkpoint](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    checkpoint->read_f32(tensor, first, out);
  };
  return model;
}

}  // namespace tierflow
