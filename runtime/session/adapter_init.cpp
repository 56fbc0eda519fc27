#include "runtime/session/adapter_init.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "optim/adamw.h"
#include "runtime/base/exception.h"
#include "runtime/session/adapter_factors.h"
#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kReadAtOnce = 1 << 14;  // elements

std::map<std::string, int> units_of_modules(const ModelSpec& spec) {
  std::map<std::string, int> units;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (const TensorSpec& tensor : spec.units[unit].tensors)
      if (const std::string module = linear_module(tensor); !module.empty())
        units.emplace(module, static_cast<int>(unit));
  return units;
}

class BaseFactors {
 public:
  BaseFactors(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed, BaseValues base)
      : config_(config),
        transposed_(has_transposed_weights(spec)),
        base_(std::move(base)),
        units_(units_of_modules(spec)) {
    check_first_factors(spec);
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors)
        if (adapter_part(tensor) == AdapterPart::b) {
          const std::string module = linear_module(tensor);
          layers_[module] = {
              .name = base_.weight(module).name, .rank = tensor.shape[1], .scale = tensor.scale, .seed = seed};
        }
  }

  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    if (of_gradient(config_.init)) {
      std::ranges::fill(out, 0.0F);
      return;
    }
    const std::string module = linear_module(tensor);
    const AdapterPart part = adapter_part(tensor);
    const std::scoped_lock lock(mutex_);
    // A unit's tensors come group by group, so that a layer's factors are wanted more than once.
    if (std::exchange(unit_, units_.at(module)) != units_.at(module)) factors_.clear();
    auto found = factors_.find(module);
    if (found == factors_.end()) found = factors_.emplace(module, factors_of(module)).first;
    const bool left = part == AdapterPart::b || part == AdapterPart::initial_b;
    const auto words = std::span(left ? found->second.b : found->second.a).subspan(first, out.size());
    std::ranges::transform(words, out.begin(), optim::float_from_bf16);
  }

  const WeightSource& weights() const { return base_.weights(); }

 private:
  Factors factors_of(const std::string& module) const {
    const TensorSpec& weight = base_.weight(module);
    torch::Tensor w = torch::empty(weight.shape, torch::kFloat32);
    auto* next = w.data_ptr<float>();
    base_.each(weight, [&](std::span<const float> values) {
      if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); }))
        fail(io::ErrorKind::input, weight.name, "is not finite: adapters cannot begin with its factors");
      next = std::copy(values.begin(), values.end(), next);
    });
    return factors_of_weight(transposed_ ? w.t() : w, config_, layers_.at(module));
  }

  const AdapterConfig config_;
  const bool transposed_;
  const BaseValues base_;
  const std::map<std::string, int> units_;
  std::map<std::string, FactorsOf> layers_;  // by module
  std::mutex mutex_;
  int unit_ = -1;  // whose factors are there
  std::map<std::string, Factors> factors_;
};

}  // namespace

BaseValues::BaseValues(const ModelSpec& spec, WeightSource weights, StoredSource stored)
    : weights_(std::move(weights)), stored_(std::move(stored)) {
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (const std::string module = linear_module(tensor); !module.empty() && !is_adapter(tensor))
        layers_.emplace(module, tensor);
}

void BaseValues::each(const TensorSpec& weight, const std::function<void(std::span<const float>)>& use) const {
  const auto elements = static_cast<std::uint64_t>(weight.elements());
  std::vector<float> values(std::min(kReadAtOnce, elements));
  std::vector<std::uint16_t> words(values.size());
  std::vector<std::byte> stored;
  if (weight.format != WeightFormat::bf16)
    stored = stored_weight(weight, stored_,
                           [&](std::uint64_t first, std::span<float> out) { weights_(weight, first, out); });
  for (std::uint64_t first = 0; first < elements; first += values.size()) {
    const std::uint64_t count = std::min<std::uint64_t>(values.size(), elements - first);
    if (stored.empty()) {
      weights_(weight, first, {values.data(), count});
      std::transform(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count), words.begin(),
                     optim::bf16_from_float);
    } else {
      dequantise(weight.format, weight.shape, stored, first, {words.data(), count});
    }
    std::transform(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(count), values.begin(),
                   optim::float_from_bf16);
    use({values.data(), count});
  }
}

WeightSource adapters_from_base(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed,
                                BaseValues base) {
  const auto factors = std::make_shared<BaseFactors>(spec, config, seed, std::move(base));
  return [factors](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    if (adapter_part(tensor) == AdapterPart::none) return factors->weights()(tensor, first, out);
    factors->read(tensor, first, out);
  };
}

RowLengths::RowLengths(const ModelSpec& spec, BaseValues base)
    : transposed_(has_transposed_weights(spec)), base_(std::move(base)), units_(units_of_modules(spec)) {}

std::vector<float> RowLengths::lengths_of(const TensorSpec& weight) const {
  const auto columns = static_cast<std::size_t>(weight.shape[1]);
  std::vector<double> squares(static_cast<std::size_t>(weight.shape[transposed_ ? 1 : 0]));
  std::size_t row = 0, column = 0;
  base_.each(weight, [&](std::span<const float> values) {
    for (const float value : values) {
      squares[transposed_ ? column : row] += static_cast<double>(value) * static_cast<double>(value);
      if (++column != columns) continue;
      column = 0;
      ++row;
    }
  });
  std::vector<float> lengths(squares.size());
  std::ranges::transform(squares, lengths.begin(), [](double sum) { return static_cast<float>(std::sqrt(sum)); });
  return lengths;
}

void RowLengths::read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
  const std::string module = linear_module(tensor);
  const std::scoped_lock lock(mutex_);
  if (std::exchange(unit_, units_.at(module)) != units_.at(module)) lengths_.clear();
  auto found = lengths_.find(module);
  if (found == lengths_.end()) found = lengths_.emplace(module, lengths_of(base_.weight(module))).first;
  std::copy_n(found->second.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

}  // namespace tierflow
