// Models with low-rank adapters: put there new or from PEFT's folder, and written as that.
#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/weights_hash.h"
#include "runtime/session/adapter_folder.h"
#include "runtime/session/adapter_init.h"
#include "runtime/session/own_layers.h"
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

Model adapted(const Model& base, const AdapterConfig& config, WeightSource adapters) {
  Model model = changed(base, "adapters",
                        [&](ModelSpec& spec) { add_adapters(spec, named_in_own_layers(*base.layers, config)); });
  model.weights = [adapters = std::move(adapters), weights = base.weights](const TensorSpec& tensor,
                                                                           std::uint64_t first, std::span<float> out) {
    (is_adapter(tensor) || tensor.trainable ? adapters : weights)(tensor, first, out);
  };
  return model;
}

// With the lengths of the base's rows where DoRA wants them: `model` has magnitudes as PEFT has them, and these become
// what is to be added to those lengths. fresh: they have none yet, and nothing is to be added.
Model with_lengths(Model model, const Model& base, bool fresh) {
  const auto lengths = std::make_shared<RowLengths>(model.spec(), BaseValues(model.spec(), base.weights, base.stored));
  model.weights = [lengths, fresh, weights = std::move(model.weights)](const TensorSpec& tensor, std::uint64_t first,
                                                                       std::span<float> out) {
    const AdapterPart part = adapter_part(tensor);
    if (part == AdapterPart::initial_magnitude) return lengths->read(tensor, first, out);
    weights(tensor, first, out);
    if (part != AdapterPart::magnitude || fresh) return;
    std::vector<float> before(out.size());
    lengths->read(tensor, first, before);
    std::ranges::transform(out, before, out.begin(), std::minus<>());
  };
  return model;
}

}  // namespace

Model with_adapters(const Model& base, const AdapterConfig& config, std::uint64_t seed) {
  if (config.init != AdapterInit::standard && config.init != AdapterInit::galore) {
    Model model = adapted(base, config, {});
    model.weights = adapters_from_base(model.spec(), config, seed, {model.spec(), base.weights, base.stored});
    return model;
  }
  Model model =
      adapted(base, config,
              [seed, weights = base.weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                if (!is_adapter(tensor)) return weights(tensor, first, out);
                initial_values(tensor, seed, first, out);
              });
  return config.dora ? with_lengths(std::move(model), base, true) : model;
}

Model with_adapters(const Model& base, const fs::path& folder) {
  const AdapterFolder adapter = open_adapter(folder);
  Model model = adapted(
      base, adapter.config,
      [values = std::make_shared<AdapterReader>(adapter.weights)](
          const TensorSpec& tensor, std::uint64_t first, std::span<float> out) { values->read(tensor, first, out); });
  check_adapters(model.spec(), *adapter.weights, base.weights);
  return adapter.config.dora ? with_lengths(std::move(model), base, false) : model;
}

namespace {

// Of a model's folder; empty where it is none that can be read here, as a name on the hub.
std::string hash_of(const fs::path& base, const std::string& as) {
  try {
    return base.empty() ? "" : hash_text(weights_hash(base, as));
  } catch (const Exception&) {
    return "";
  }
}

}  // namespace

std::string Session::export_adapter(const fs::path& folder, const fs::path& base) {
  impl_->expect_first_values();
  const ModelSpec& spec = impl_->model->spec();
  if (!is_written_beside_base(spec)) fail_usage("the model has no adapters: export_hf() writes it");
  impl_->flush();
  return write_adapter(
      spec, base, hash_of(base, spec.read_as), folder,
      [this](int unit, int tensor, const UseMaster& use) { impl_->state->read_master(unit, tensor, use); });
}

}  // namespace tierflow
