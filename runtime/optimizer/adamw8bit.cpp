#include "runtime/optimizer/adamw8bit.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "optim/adamw.h"
#include "optim/adamw_device.h"
#include "runtime/base/exception.h"

namespace tierflow {
namespace {

using torch::Tensor;

constexpr auto kSegment = static_cast<std::int64_t>(optim::kNormSegment);

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64 == 0;
}

std::uint16_t* words(const Tensor& tensor) {
  return static_cast<std::uint16_t*>(tensor.data_ptr());
}

void check_range(bool holds, const char* name, double value) {
  if (!holds) fail_usage(std::string("AdamW8bit: ") + name + " is " + std::to_string(value));
}

void check(const Tensor& parameter, const Tensor& gradient) {
  const auto type = parameter.scalar_type();
  const char* wrong = nullptr;
  if (parameter.device() != gradient.device())
    wrong = "and its gradient are on different devices";
  else if (!parameter.is_cpu() && !parameter.is_cuda())
    wrong = "is neither on the CPU nor on a CUDA device";
  else if (parameter.is_cuda() && !optim::device_update_is_built())
    wrong = "is on a CUDA device, for which this build has no kernel: configure it where nvcc is";
  else if (type != torch::kFloat32 && type != torch::kBFloat16)
    wrong = "is neither fp32 nor bf16";
  else if (!parameter.is_contiguous())
    wrong = "is not contiguous: call contiguous() on it before the optimizer is made";
  else if (gradient.is_sparse())
    wrong = "has a sparse gradient: make its embedding with sparse(false)";
  else if (gradient.sizes() != parameter.sizes())
    wrong = "has a gradient of another shape";
  if (wrong != nullptr) fail_usage("AdamW8bit: a parameter of shape " + c10::str(parameter.sizes()) + " " + wrong);
}

Tensor as_bf16(const Tensor& gradient) {
  const Tensor rounded = gradient.detach().to(torch::kBFloat16).contiguous();
  return aligned(rounded) ? rounded : rounded.clone();
}

// Where torch would enqueue work on the tensor's device.
optim::CudaStream stream_of(const Tensor& tensor) {
  const auto index = tensor.device().index();
  return {.device = index, .stream = at::accelerator::getCurrentStream(index).native_handle()};
}

using FiniteWords = std::map<c10::DeviceIndex, Tensor>;

// The word of the gradient's device becomes 1 where it is not finite; nothing is waited for.
void look_through_on_device(const Tensor& gradient, FiniteWords& finite_words) {
  Tensor& word = finite_words[gradient.device().index()];
  if (!word.defined()) word = torch::zeros({1}, gradient.options().dtype(torch::kInt32));
  const std::int64_t segments = (gradient.numel() + kSegment - 1) / kSegment;
  const Tensor sums = torch::empty({segments}, gradient.options().dtype(torch::kFloat64));
  optim::gradient_norm_squared_on_device(words(gradient), static_cast<std::size_t>(gradient.numel()),
                                         sums.data_ptr<double>(), static_cast<std::uint32_t*>(word.data_ptr()),
                                         stream_of(gradient));
}

bool finite(const Tensor& gradient) {
  const std::int64_t n = gradient.numel();
  std::atomic<bool> all = true;
  at::parallel_for(0, (n + kSegment - 1) / kSegment, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      double sum = 0;
      if (!optim::gradient_norm_squared(words(gradient) + i * kSegment, std::min(kSegment, n - i * kSegment), &sum))
        all = false;
    }
  });
  return all;
}

void start(AdamW8bitParamState& state, const Tensor& parameter, const AdamW8bitOptions& options) {
  const std::int64_t n = parameter.numel();
  const bool eight_bits = n >= options.min_8bit_size();
  const auto blocks = (n + static_cast<std::int64_t>(optim::kBlock) - 1) / static_cast<std::int64_t>(optim::kBlock);
  for (const bool is_signed : {true, false}) {
    const Tensor values = torch::zeros({n}, eight_bits ? torch::kUInt8 : torch::kFloat32);
    const Tensor absmax = eight_bits ? torch::zeros({blocks}, torch::kFloat32) : Tensor();
    const optim::Moment moment{.format = eight_bits ? optim::MomentFormat::block8 : optim::MomentFormat::f32,
                               .values = values.data_ptr(),
                               .absmax = eight_bits ? absmax.data_ptr<float>() : nullptr};
    optim::zero_moment(moment, static_cast<std::size_t>(n), is_signed);
    const Tensor there = values.to(parameter.device()),
                 absmax_there = eight_bits ? absmax.to(parameter.device()) : Tensor();
    if (is_signed)
      state.exp_avg(there).absmax(absmax_there);
    else
      state.exp_avg_sq(there).absmax_sq(absmax_there);
  }
  if (parameter.scalar_type() == torch::kBFloat16)
    state.master_low(torch::zeros({n}, parameter.options().dtype(torch::kInt16).requires_grad(false)));
}

optim::AdamWParams params_of(const AdamW8bitParamState& state, const AdamW8bitOptions& options) {
  return {.lr = static_cast<float>(options.lr()),
          .beta1 = static_cast<float>(std::get<0>(options.betas())),
          .beta2 = static_cast<float>(std::get<1>(options.betas())),
          .eps = static_cast<float>(options.eps()),
          .weight_decay = static_cast<float>(options.weight_decay()),
          .step = state.step()};
}

optim::Moment part(const Tensor& values, const Tensor& absmax, std::int64_t first) {
  const bool eight_bits = absmax.defined();
  return {.format = eight_bits ? optim::MomentFormat::block8 : optim::MomentFormat::f32,
          .values = static_cast<std::byte*>(values.data_ptr()) + first * values.element_size(),
          .absmax = eight_bits ? absmax.data_ptr<float>() + first / static_cast<std::int64_t>(optim::kBlock) : nullptr};
}

// Segments are cut by the shape alone. An fp32 parameter is its own master: split, updated and joined, which is exact.
void update(const Tensor& parameter, const Tensor& gradient, const AdamW8bitParamState& state,
            const AdamW8bitOptions& options) {
  const std::int64_t n = parameter.numel();
  const optim::AdamWParams params = params_of(state, options);
  const bool in_place = parameter.scalar_type() == torch::kBFloat16 && aligned(parameter);
  at::parallel_for(0, (n + kSegment - 1) / kSegment, 1, [&](std::int64_t begin, std::int64_t end) {
    const Tensor buffer = in_place ? Tensor() : torch::empty({2, kSegment}, torch::kInt16);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i * kSegment;
      const auto count = static_cast<std::size_t>(std::min(kSegment, n - first));
      optim::State view{.m = part(state.exp_avg(), state.absmax(), first),
                        .v = part(state.exp_avg_sq(), state.absmax_sq(), first)};
      float* const wide = parameter.scalar_type() == torch::kFloat32 ? parameter.data_ptr<float>() + first : nullptr;
      view.hi = in_place ? words(parameter) + first : words(buffer);
      view.lo = wide != nullptr ? words(buffer) + kSegment : words(state.master_low()) + first;
      if (wide != nullptr)
        optim::split_master(wide, view.hi, view.lo, count);
      else if (!in_place)
        std::copy_n(words(parameter) + first, count, view.hi);
      optim::adamw_update(params, words(gradient) + first, view, count);
      if (wide != nullptr)
        optim::join_master(view.hi, view.lo, wide, count);
      else if (!in_place)
        std::copy_n(view.hi, count, words(parameter) + first);
    }
  });
}

// The same on the parameter's device, enqueued: the bits do not depend on the cut, so it is not cut.
void update_on_device(const Tensor& parameter, const Tensor& gradient, const AdamW8bitParamState& state,
                      const AdamW8bitOptions& options) {
  const auto n = static_cast<std::size_t>(parameter.numel());
  const optim::CudaStream stream = stream_of(parameter);
  const bool wide = parameter.scalar_type() == torch::kFloat32, in_place = !wide && aligned(parameter);
  const auto shorts = gradient.options().dtype(torch::kInt16);
  const Tensor report =
      torch::empty({static_cast<std::int64_t>(sizeof(optim::DeviceReport))}, shorts.dtype(torch::kUInt8));
  const Tensor hi = in_place ? parameter : torch::empty({parameter.numel()}, shorts),
               lo = wide ? torch::empty({parameter.numel()}, shorts) : state.master_low();
  if (wide)
    optim::split_master_on_device(parameter.data_ptr<float>(), words(hi), words(lo), n, stream);
  else if (!in_place)
    hi.copy_(parameter.detach().view(torch::kInt16).view({-1}));
  const optim::State view{.hi = words(hi),
                          .lo = words(lo),
                          .m = part(state.exp_avg(), state.absmax(), 0),
                          .v = part(state.exp_avg_sq(), state.absmax_sq(), 0)};
  optim::adamw_update_on_device(params_of(state, options), words(gradient), view, view, n,
                                static_cast<optim::DeviceReport*>(report.data_ptr()), stream);
  if (wide)
    optim::join_master_on_device(words(hi), words(lo), parameter.data_ptr<float>(), n, stream);
  else if (!in_place)
    parameter.detach().view(torch::kInt16).view({-1}).copy_(hi);
}

}  // namespace

AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     const AdamW8bitOptions& defaults)
    : Optimizer(param_groups, std::make_unique<AdamW8bitOptions>(defaults)) {
  const auto within = [](double value) { return value >= 0 && value < 1; };
  for (const auto& group : this->param_groups()) {
    const auto& options = static_cast<const AdamW8bitOptions&>(group.options());
    check_range(options.lr() >= 0, "lr", options.lr());
    check_range(options.eps() >= 0, "eps", options.eps());
    check_range(within(std::get<0>(options.betas())), "the first beta", std::get<0>(options.betas()));
    check_range(within(std::get<1>(options.betas())), "the second beta", std::get<1>(options.betas()));
    check_range(options.weight_decay() >= 0, "weight_decay", options.weight_decay());
  }
}

torch::Tensor AdamW8bit::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  struct Item {
    Tensor parameter, gradient;
    const AdamW8bitOptions* options;
  };
  std::vector<Item> items;
  bool all_finite = true;
  FiniteWords finite_words;
  for (auto& group : param_groups_)
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.numel() == 0) continue;
      check(parameter, parameter.grad());
      items.push_back({parameter, as_bf16(parameter.grad()), static_cast<const AdamW8bitOptions*>(&group.options())});
      if (parameter.is_cuda())
        look_through_on_device(items.back().gradient, finite_words);
      else
        all_finite = all_finite && finite(items.back().gradient);
    }
  for (const auto& [device, word] : finite_words) all_finite = all_finite && word.item<std::int32_t>() == 0;
  if (!all_finite) {
    ++skipped_;
    return loss;
  }
  for (const Item& item : items) {
    auto& held = state_[item.parameter.unsafeGetTensorImpl()];
    if (held == nullptr) {
      auto fresh = std::make_unique<AdamW8bitParamState>();
      start(*fresh, item.parameter, *item.options);
      held = std::move(fresh);
    }
    auto& state = static_cast<AdamW8bitParamState&>(*held);
    state.step(state.step() + 1);
    (item.parameter.is_cuda() ? update_on_device : update)(item.parameter, item.gradient, state, *item.options);
  }
  return loss;
}

void AdamW8bitOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(min_8bit_size);
}

void AdamW8bitOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::int64_t, min_8bit_size);
}

void AdamW8bitParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(absmax);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(absmax_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master_low);
}

void AdamW8bitParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, absmax);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, absmax_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, master_low);
}

void AdamW8bit::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamW8bitParamState, AdamW8bitOptions>(archive, *this);
}

void AdamW8bit::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamW8bitParamState, AdamW8bitOptions>(archive, *this);
}

}  // namespace tierflow
