#include "runtime/models/dense_weights.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>

#include <span>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/models/adapter.h"
#include "runtime/models/dense_weights_device.h"
#include "runtime/models/grain.h"
#include "runtime/spec/adapters.h"

namespace tierflow::models {

namespace {

void add_lengths(const ModelSpec& spec, int stage, Weights& weights) {
  std::vector<std::string> modules;
  for (const int unit : spec.stages[static_cast<std::size_t>(stage)].units)
    for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors)
      if (adapter_part(tensor) == AdapterPart::initial_magnitude) modules.push_back(linear_module(tensor));
  if (modules.empty()) return;
  const TensorIndex index(spec, stage);
  for (const std::string& module : modules) {
    const Adapter adapter(index, module);
    const at::Tensor& weight = at_position(weights, index.at(module + ".weight"));
    if (!weight.defined()) continue;
    weights[static_cast<std::size_t>(adapter.m0)] =
        adapter.with_lengths(weights, has_transposed_weights(spec) ? weight.t() : weight);
  }
}

}  // namespace

at::Tensor dense(const at::Tensor& stored, WeightFormat format, const std::vector<std::int64_t>& shape) {
  const WeightLayout layout = weight_layout(format, shape);
  if (stored.scalar_type() != at::kByte || stored.dim() != 1 || !stored.is_contiguous() ||
      static_cast<std::uint64_t>(stored.numel()) < layout.bytes)
    throw Exception(io::ErrorKind::internal, std::string("a weight stored as ") + weight_format_name(format) +
                                                 " takes " + std::to_string(layout.bytes) +
                                                 " bytes in one run; there are " + std::to_string(stored.numel()));
  if (format == WeightFormat::fp32)
    return stored.narrow(0, 0, static_cast<std::int64_t>(layout.bytes)).view(at::kFloat).view(shape).clone();
  const at::Tensor out = at::empty(shape, stored.options().dtype(at::kBFloat16));
  const auto* const bytes = static_cast<const std::byte*>(stored.const_data_ptr());
  auto* const words = static_cast<std::uint16_t*>(out.mutable_data_ptr());
  if (!stored.is_cpu()) {
    const auto device = stored.device().index();
    dense_on_device(format, layout, bytes, words, device, at::accelerator::getCurrentStream(device).native_handle());
    return out;
  }
  at::parallel_for(0, out.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    dequantise(format, shape, {bytes, layout.bytes}, static_cast<std::uint64_t>(begin),
               {words + begin, static_cast<std::size_t>(end - begin)});
  });
  return out;
}

bool has_stored_weights(const ModelSpec& spec, int stage) {
  for (const int unit : spec.stages[static_cast<std::size_t>(stage)].units)
    for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors)
      if (tensor.format != WeightFormat::bf16) return true;
  return false;
}

Weights dense_weights(const std::vector<UnitSpec>& units, const std::vector<int>& of_stage, const Weights& stored) {
  Weights weights = stored;
  std::size_t index = 0;
  for (const int unit : of_stage)
    for (const TensorSpec& tensor : units[static_cast<std::size_t>(unit)].tensors) {
      at::Tensor& weight = weights[index++];
      if (tensor.format != WeightFormat::bf16 && weight.defined()) weight = dense(weight, tensor.format, tensor.shape);
    }
  return weights;
}

Weights dense_weights(const ModelSpec& spec, int stage, const Weights& stored) {
  Weights weights = dense_weights(spec.units, spec.stages[static_cast<std::size_t>(stage)].units, stored);
  add_lengths(spec, stage, weights);
  return weights;
}

}  // namespace tierflow::models
