#include "runtime/models/random_numbers.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

namespace tierflow::models {
namespace {

thread_local std::optional<at::Generator> own;  // of dropped(), while there is a Seeded

// Calls change(generator) with torch's default generator of the device, which nobody else uses meanwhile.
template <class Change>
void with_default(torch::Device device, Change change) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  change(generator);
}

}  // namespace

Seeded::Seeded(Draws draws, std::uint64_t seed, torch::Device device) {
  if (draws == Draws::nothing) return;
  if (!device.is_cpu()) with_default(device, [&](at::Generator& of_card) { of_card.set_current_seed(seed); });
  if (draws == Draws::own) {
    own = at::make_generator<at::CPUGeneratorImpl>(seed);
    return;
  }
  with_default(at::kCPU, [&](at::Generator& generator) {
    before_ = generator.get_state();
    generator.set_current_seed(seed);
  });
}

Seeded::~Seeded() {
  own.reset();
  if (before_.defined()) with_default(at::kCPU, [&](at::Generator& generator) { generator.set_state(before_); });
}

std::tuple<torch::Tensor, torch::Tensor> dropped(const torch::Tensor& x, double p) {
  if (!own || !x.is_cpu() || x.numel() == 0) return at::native_dropout(x, p, true);
  at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool).requires_grad(false));
  mask.bernoulli_(1 - p, own);
  return {x.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace tierflow::models
