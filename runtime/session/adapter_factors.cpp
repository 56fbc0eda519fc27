#include "runtime/session/adapter_factors.h"

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <cmath>
#include <future>
#include <mutex>
#include <tuple>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"

namespace tierflow {
namespace {

constexpr double kGamma = 16;
constexpr std::int64_t kGradientIterations = 4, kProjectorIterations = 2;

using Decomposition = std::tuple<torch::Tensor, torch::Tensor, torch::Tensor>;  // U, S, V^T

Decomposition randomised(const torch::Tensor& w, std::int64_t wide, std::int64_t iterations, const FactorsOf& of) {
  torch::Tensor range = torch::empty({w.size(1), wide}, torch::kFloat32);
  const TensorSpec normal{.name = of.name, .shape = {w.size(1), wide}, .init_std = 1};
  initial_values(normal, of.seed, 0, {range.data_ptr<float>(), static_cast<std::size_t>(range.numel())});
  const auto basis = [](const torch::Tensor& columns) { return std::get<0>(torch::linalg_qr(columns)); };
  range = basis(torch::mm(w, range.to(w.device())));
  for (std::int64_t i = 0; i < iterations; ++i) range = basis(torch::mm(w, basis(torch::mm(w.t(), range))));
  const auto [u, s, vh] = torch::linalg_svd(torch::mm(range.t(), w), /*full_matrices=*/false);
  return {torch::mm(range, u), s, vh};
}

std::vector<std::uint16_t> rounded(const torch::Tensor& values) {
  const torch::Tensor words = values.to(torch::kBFloat16).cpu().contiguous();
  const auto* const first = static_cast<const std::uint16_t*>(words.const_data_ptr());
  return {first, first + words.numel()};
}

// torch's threads are set for the process; a thread that computed before keeps its own.
class OneThread {
 public:
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_ = at::get_num_threads();
};

// In a thread of its own, which computes alone: LAPACK's bits depend on the number of threads, and its many short
// parallel regions cost a new team more than they save.
template <class Work>
Factors apart(Work work) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  return std::async(std::launch::async,
                    [&] {
                      const OneThread alone;
                      const torch::NoGradGuard no_grad;
                      return work();
                    })
      .get();
}

std::int64_t columns_of(const torch::Tensor& w, const AdapterConfig& config, const FactorsOf& of) {
  const auto size = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  return static_cast<std::int64_t>(basis_columns(config, size(of.rank), size(w.size(0)), size(w.size(1))));
}

}  // namespace

Factors factors_of_weight(const torch::Tensor& w, const AdapterConfig& config, const FactorsOf& of) {
  return apart([&]() -> Factors {
    if (config.init == AdapterInit::olora) {
      // The first columns of Q are those of the first columns of W; and R = Q^T W.
      const torch::Tensor b = std::get<0>(torch::linalg_qr(w.narrow(1, 0, of.rank)));
      return {.a = rounded(torch::mm(b.t(), w)), .b = rounded(b)};
    }
    const std::int64_t wide = columns_of(w, config, of);
    const auto [u, s, vh] =
        wide > 0 ? randomised(w, wide, config.pissa_iterations, of) : torch::linalg_svd(w, /*full_matrices=*/false);
    const torch::Tensor root = (s.narrow(0, 0, of.rank) / of.scale).sqrt();
    return {.a = rounded(root.unsqueeze(1) * vh.narrow(0, 0, of.rank)), .b = rounded(u.narrow(1, 0, of.rank) * root)};
  });
}

Factors factors_of_gradient(const torch::Tensor& gradient, AdapterInit init, const FactorsOf& of) {
  return apart([&]() -> Factors {
    if (!std::isfinite(gradient.sum().item<double>()))
      fail(io::ErrorKind::numeric, of.name, "has a gradient that is not finite: adapters cannot begin with it");
    const std::int64_t wide = columns_of(gradient, {.init = init}, of);
    const auto [u, s, vh] = randomised(gradient, wide, kGradientIterations, of);
    const torch::Tensor right = vh.narrow(0, 0, of.rank), left = u.narrow(1, of.rank, of.rank);
    const bool peft = init == AdapterInit::peft_lora_ga;
    const auto out = static_cast<double>(gradient.size(peft && of.transposed ? 1 : 0));
    const double factor = std::pow(out, 0.25) / std::sqrt(kGamma);
    if (peft) return {.a = rounded(right), .b = rounded(left * (s.narrow(0, of.rank, of.rank) * factor))};
    return {.a = rounded(right * factor), .b = rounded(left * factor)};
  });
}

Factors projector_of_gradient(const torch::Tensor& gradient, const FactorsOf& of) {
  return apart([&]() -> Factors {
    if (!std::isfinite(gradient.sum().item<double>())) return {};
    const bool left = gradient.size(0) < gradient.size(1);
    const torch::Tensor wide = left ? gradient : gradient.t();
    const std::int64_t columns = columns_of(gradient, {.init = AdapterInit::galore}, of);
    const torch::Tensor projector =
        std::get<0>(randomised(wide, columns, kProjectorIterations, of)).narrow(1, 0, of.rank);
    if (left) return {.a = {}, .b = rounded(projector)};
    return {.a = rounded(projector.t()), .b = {}};
  });
}

}  // namespace tierflow
