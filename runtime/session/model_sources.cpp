#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/causal_model.h"
#include "runtime/session/own_layers.h"
#include "runtime/session/session.h"
#include "runtime/session/session_impl.h"
#include "runtime/spec/experts_on_demand.h"

namespace tierflow {

const ModelSpec& Model::spec() const {
  return layers->spec();
}

Model from_config(const ModelSpec& spec, std::uint64_t seed) {
  return {make_model(spec), [seed](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
            initial_values(tensor, seed, first, out);
          }};
}

Model changed(const Model& model, std::string_view what, const std::function<void(ModelSpec& spec)>& change) {
  ModelSpec spec = model.spec();
  change(spec);
  if (std::shared_ptr<LayeredModel> own = own_layers_as(*model.layers, spec))
    return {std::move(own), model.weights, model.stored, model.source};
  if (dynamic_cast<const models::CausalModel*>(model.layers.get()) == nullptr)
    fail_usage(std::string(what) + " are for the models of load(), from_config() and Layers, not for others");
  return {make_model(std::move(spec)), model.weights, model.stored, model.source};
}

Model with_base_format(const Model& model, WeightFormat format) {
  std::vector<std::string> plain = no_linear_weights(*model.layers);
  if (is_unconverted(format)) plain = plain_beside(model.spec(), format, model.stored.has);
  return changed(model, "weights of other formats", [&](ModelSpec& spec) { set_base_format(spec, format, plain); });
}

Model with_trainable(const Model& model, const TrainableConfig& config) {
  return changed(model, "frozen weights", [&](ModelSpec& spec) { set_trainable(spec, config); });
}

Model with_learning_rates(const Model& model, const std::vector<std::pair<std::string, double>>& by_pattern) {
  return changed(model, "learning rates of tensors", [&](ModelSpec& spec) { set_learning_rates(spec, by_pattern); });
}

Model without_dropout(const Model& model) {
  return changed(model, "models without dropout", remove_dropout);
}

Model with_experts_on_demand(const Model& model) {
  return changed(model, "experts on demand", set_experts_on_demand);
}

Model load(const std::filesystem::path& folder, const std::string& as) {
  DeviceMemory::install();
  ModelSpec spec = read_folder_spec(folder, {}, as);
  auto checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(folder));
  check_tensors(spec, *checkpoint);
  auto source = std::make_shared<const SourceFolder>(spec, checkpoint);
  if (!source->gives()) source.reset();
  return {make_model(std::move(spec)),
          [checkpoint](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
            checkpoint->read_f32(tensor, first, out);
          },
          {.has = [checkpoint](const std::string& name, WeightFormat format) { return checkpoint->has(name, format); },
           .read = [checkpoint](const TensorSpec& tensor) { return checkpoint->read_unconverted(tensor); }},
          std::move(source)};
}

}  // namespace tierflow
