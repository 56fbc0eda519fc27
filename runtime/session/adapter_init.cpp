#include "runtime/session/adapter_init.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <tuple>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

// W [out, in], as the base holds it.
torch::Tensor values_of(const TensorSpec& weight, bool transposed, const WeightSource& weights) {
  torch::Tensor values = torch::empty(weight.shape, torch::kFloat32);
  const std::span<float> all(values.data_ptr<float>(), static_cast<std::size_t>(values.numel()));
  weights(weight, 0, all);
  torch::Tensor words = values.to(torch::kBFloat16);
  if (weight.format != WeightFormat::bf16) {
    Quantiser quantiser(weight.format, weight.shape);
    quantiser.add(all);
    dequantise(weight.format, weight.shape, quantiser.finish(), 0,
               {static_cast<std::uint16_t*>(words.data_ptr()), all.size()});
  }
  values = words.to(torch::kFloat32);
  return transposed ? values.t().contiguous() : values;
}

// Of one layer, row by row.
struct Factors {
  std::vector<float> a, b;
};

class BaseFactors {
 public:
  BaseFactors(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed, WeightSource weights)
      : init_(config.init),
        iterations_(config.pissa_iterations),
        seed_(seed),
        transposed_(has_transposed_weights(spec)),
        weights_(std::move(weights)) {
    check_first_factors(spec);
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors) {
        if (const std::string module = linear_module(tensor); !module.empty()) {
          Layer& layer = layers_[module];
          if (adapter_part(tensor) == AdapterPart::none) layer.weight = tensor;
          if (adapter_part(tensor) != AdapterPart::b) continue;
          layer.rank = tensor.shape[1];
          layer.scale = tensor.scale;
        }
      }
  }

  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    const std::string module = linear_module(tensor);
    const AdapterPart part = adapter_part(tensor);
    const std::scoped_lock lock(mutex_);
    auto found = std::ranges::find(recent_, module, &std::pair<std::string, Factors>::first);
    if (found == recent_.end()) {
      // A thread of its own: LAPACK's bits depend on the number of threads, which may differ among the callers.
      Factors factors = std::async(std::launch::async, [&] { return factors_of(layers_.at(module)); }).get();
      recent_.emplace_front(module, std::move(factors));
      if (recent_.size() > kRecent) recent_.pop_back();
      found = recent_.begin();
    }
    const bool left = part == AdapterPart::b || part == AdapterPart::initial_b;
    std::copy_n((left ? found->second.b : found->second.a).begin() + static_cast<std::ptrdiff_t>(first), out.size(),
                out.begin());
  }

  const WeightSource& weights() const { return weights_; }

 private:
  struct Layer {
    TensorSpec weight;
    std::int64_t rank = 0;
    double scale = 1;
  };
  // More than a unit has: its tensors come group by group, so that a layer's factors are wanted more than once.
  static constexpr std::size_t kRecent = 16;

  Factors factors_of(const Layer& layer) const {
    const torch::NoGradGuard no_grad;
    const torch::Tensor w = values_of(layer.weight, transposed_, weights_);
    if (!w.isfinite().all().item<bool>())
      fail(io::ErrorKind::input, layer.weight.name, "is not finite: adapters cannot begin with its factors");
    torch::Tensor a, b;
    if (init_ == AdapterInit::pissa) {
      const auto [u, s, vh] = iterations_ > 0 ? randomised(layer, w) : torch::linalg_svd(w, /*full_matrices=*/false);
      const torch::Tensor root = (s.narrow(0, 0, layer.rank) / layer.scale).sqrt();
      a = root.unsqueeze(1) * vh.narrow(0, 0, layer.rank);
      b = u.narrow(1, 0, layer.rank) * root;
    } else {
      // The first columns of Q are those of the first columns of W; and R = Q^T W.
      b = std::get<0>(torch::linalg_qr(w.narrow(1, 0, layer.rank)));
      a = torch::mm(b.t(), w);
    }
    return {.a = rounded(a), .b = rounded(b)};
  }

  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> randomised(const Layer& layer, const torch::Tensor& w) const {
    const std::int64_t wide = std::min({layer.rank + 8, w.size(0), w.size(1)});
    torch::Tensor range = torch::empty({w.size(1), wide}, torch::kFloat32);
    const TensorSpec normal{.name = layer.weight.name, .shape = {w.size(1), wide}, .init_std = 1};
    initial_values(normal, seed_, 0, {range.data_ptr<float>(), static_cast<std::size_t>(range.numel())});
    const auto basis = [](const torch::Tensor& of) { return std::get<0>(torch::linalg_qr(of)); };
    range = basis(torch::mm(w, range));
    for (std::int64_t i = 0; i < iterations_; ++i) range = basis(torch::mm(w, basis(torch::mm(w.t(), range))));
    const auto [u, s, vh] = torch::linalg_svd(torch::mm(range.t(), w), /*full_matrices=*/false);
    return {torch::mm(range, u), s, vh};
  }

  static std::vector<float> rounded(const torch::Tensor& values) {
    const torch::Tensor words = values.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
    const auto* const first = words.const_data_ptr<float>();
    return {first, first + words.numel()};
  }

  const AdapterInit init_;
  const std::int64_t iterations_;
  const std::uint64_t seed_;
  const bool transposed_;
  const WeightSource weights_;
  std::map<std::string, Layer> layers_;  // by module
  std::mutex mutex_;
  std::deque<std::pair<std::string, Factors>> recent_;
};

}  // namespace

WeightSource adapters_from_base(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed,
                                WeightSource weights) {
  const auto factors = std::make_shared<BaseFactors>(spec, config, seed, std::move(weights));
  return [factors](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    if (adapter_part(tensor) == AdapterPart::none) return factors->weights()(tensor, first, out);
    factors->read(tensor, first, out);
  };
}

RowLengths::RowLengths(const ModelSpec& spec, WeightSource weights)
    : transposed_(has_transposed_weights(spec)), weights_(std::move(weights)) {
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (const std::string module = linear_module(tensor); !module.empty() && !is_adapter(tensor))
        layers_.emplace(module, tensor);
}

void RowLengths::read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
  const std::string module = linear_module(tensor);
  const std::scoped_lock lock(mutex_);
  std::vector<float>& lengths = lengths_[module];
  if (lengths.empty()) {
    const torch::Tensor w = values_of(layers_.at(module), transposed_, weights_);
    const auto columns = static_cast<std::size_t>(w.size(1));
    const auto* row = w.const_data_ptr<float>();
    for (std::int64_t i = 0; i < w.size(0); ++i, row += columns) {
      double sum = 0;
      for (std::size_t j = 0; j < columns; ++j) sum += static_cast<double>(row[j]) * static_cast<double>(row[j]);
      lengths.push_back(static_cast<float>(std::sqrt(sum)));
    }
  }
  std::copy_n(lengths.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

}  // namespace tierflow
