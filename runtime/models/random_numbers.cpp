#include "runtime/models/random_numbers.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

namespace tierflow::models {
namespace {

thread_local std::optional<at::Generator> own;  // of dropped(), while there is a Seeded

}  // namespace

Seeded::Seeded(Draws draws, std::uint64_t seed, torch::Device device) {
  if (draws == Draws::nothing) return;
  if (!device.is_cpu()) seed_default(device, seed);
  if (draws == Draws::own)
    own = at::make_generator<at::CPUGeneratorImpl>(seed);
  else
    seed_default(at::kCPU, seed);
}

Seeded::~Seeded() {
  own.reset();
  for (auto& [generator, state] : before_) {
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(state);
  }
}

void Seeded::seed_default(torch::Device device, std::uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  before_.emplace_back(generator, generator.get_state());
  generator.set_current_seed(seed);
}

std::tuple<torch::Tensor, torch::Tensor> dropped(const torch::Tensor& x, double p) {
  if (!own || !x.is_cpu() || x.numel() == 0) return at::native_dropout(x, p, true);
  at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool).requires_grad(false));
  mask.bernoulli_(1 - p, own);
  return {x.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace tierflow::models
