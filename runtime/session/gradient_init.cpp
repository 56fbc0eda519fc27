#include "runtime/session/gradient_init.h"

#include <torch/utils.h>

#include <algorithm>

#include "optim/adamw.h"
#include "runtime/base/signals.h"
#include "runtime/session/session_impl.h"
#include "runtime/spec/adapters.h"

namespace tierflow {

GradientInit::GradientInit(const ModelSpec& spec, std::uint64_t seed, torch::Device device)
    : spec_(spec),
      init_(parse_adapter_config(spec.adapter_config_json, "the model's adapters").init),
      seed_(seed),
      device_(device) {}

std::vector<GradientInit::Weight> GradientInit::weights_of(int stage) const {
  std::map<std::string, Weight> wanted;  // by module
  std::size_t position = 0;
  for (const int unit : spec_.stages[stage].units)
    for (const TensorSpec& tensor : spec_.units[unit].tensors) {
      const std::string module = linear_module(tensor);
      Weight& weight = wanted[module];
      if (!is_adapter(tensor)) {
        weight.position = position;
        weight.module = module;
        weight.shape = tensor.shape;
        weight.of.name = tensor.name;
      } else if (adapter_part(tensor) == AdapterPart::b) {
        weight.of.rank = tensor.shape[1];
        weight.of.scale = tensor.scale;
        weight.of.seed = seed_;
        weight.of.transposed = has_transposed_weights(spec_);
      }
      ++position;
    }
  std::vector<Weight> weights;
  for (auto& [module, weight] : wanted)
    if (weight.of.rank != 0) weights.push_back(std::move(weight));
  return weights;
}

void GradientInit::bind(int stage, int micro_batch, Gradients& gradients) {
  const std::vector<Weight> weights = weights_of(stage);
  if (micro_batch == 0) {
    sums_.clear();
    for (const Weight& weight : weights)
      sums_.push_back(torch::zeros(weight.shape, torch::TensorOptions().dtype(torch::kFloat32).device(device_)));
  }
  for (std::size_t i = 0; i < weights.size(); ++i) gradients.set(weights[i].position, sums_[i]);
}

void GradientInit::take(int stage) {
  const std::vector<Weight> weights = weights_of(stage);
  for (std::size_t i = 0; i < weights.size() && stop_signal() == 0; ++i) {
    if (!sums_[i].defined()) continue;
    const torch::Tensor gradient = weights[i].of.transposed ? sums_[i].t() : sums_[i];  // [out, in]
    Factors& factors = factors_[weights[i].module];
    if (init_ == AdapterInit::galore) {
      factors = projector_of_gradient(gradient, weights[i].of);
      finite_ = finite_ && !(factors.a.empty() && factors.b.empty());
    } else {
      factors = factors_of_gradient(gradient.to(torch::kCPU), init_, weights[i].of);
    }
    sums_[i].reset();
  }
}

void GradientInit::read(const TensorSpec& factor, std::uint64_t first, std::span<float> values) const {
  const AdapterPart part = adapter_part(factor);
  const Factors& factors = factors_.at(linear_module(factor));
  const auto& words = part == AdapterPart::b || part == AdapterPart::initial_b ? factors.b : factors.a;
  std::ranges::transform(std::span(words).subspan(first, values.size()), values.begin(), optim::float_from_bf16);
}

// A step whose updates are all dropped. Null where memory ran out, or a signal asked for an end: then what was still to
// be computed was not.
std::unique_ptr<GradientInit> Session::Impl::gradient_pass(const std::vector<MicroBatch>& batches) {
  gradient_init = std::make_unique<GradientInit>(model->spec(), options.seed, torch_device);
  std::int64_t targets = 0;
  for (const MicroBatch& batch : batches) targets += batch.target_tokens();
  const auto work = make_work(0);
  work->skip_updates();
  StepResult result;
  std::vector<Shared> shared = share(batches);
  const Objective objective{.batches = batches, .targets = targets, .pairs = {}};
  watch_balance(objective, shared);
  executor().append(planner->train_step(/*pending=*/false), work);
  forward_all(shared, swap::Pass::forward);
  head_all(shared, objective, result, *work);
  backward_all(shared, *work);
  throw_if(executor().finish_updates());
  throw_if(executor().drain());
  std::unique_ptr<GradientInit> found = std::move(gradient_init);
  if (stop_signal() == 0) return out_of_memory ? nullptr : std::move(found);
  drop_activations();
  return nullptr;
}

void Session::Impl::check_gradient_pass(const std::vector<MicroBatch>& batches) const {
  if (!waits_for_gradient())
    fail_usage(windows == 0 ? "the adapters have their first values: they wait for no gradient"
                            : "the window of this projector has not ended");
  check_batches(batches, true);
}

void Session::Impl::begin_with_gradient(const std::vector<MicroBatch>& batches) {
  const torch::NoGradGuard no_grad;
  flush();
  const std::uint64_t cap = torch_bytes();
  torch_share.set(cap + (torch_device.is_cpu() ? plan.loading : 0));
  bool made = false;
  if (const std::unique_ptr<GradientInit> found = gradient_pass(batches); found != nullptr) {
    windows == 0 ? take_first_values(*found) : begin_window(*found);
    made = true;
  }
  planner->forget_weights();
  torch_memory.release_kept();
  torch_share.set(cap);
  torch_memory.reset_peak();
  if (windows == 0) throw_if_out_of_memory();
  if (plan.commit_every != 0 && made) commit();
}

void Session::Impl::take_first_values(const GradientInit& found) {
  const std::vector<UnitSpec>& units = model->spec().units;
  for (std::size_t unit = 0; unit < units.size(); ++unit)
    state->rewrite(
        static_cast<int>(unit),
        [&](int tensor) { return is_adapter(units[unit].tensors[static_cast<std::size_t>(tensor)]); },
        [&](int tensor, std::uint64_t first, std::span<float> values) {
          found.read(units[unit].tensors[static_cast<std::size_t>(tensor)], first, values);
        });
  lacks_first_values = false;
}

}  // namespace tierflow
