// Windows of projected gradients beside the formula of GaLore (Zhao et al., 2024) on whole weights.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cmath>
#include <future>
#include <map>

#include "runtime/device/device_memory.h"
#include "runtime/session/adapter_factors.h"
#include "runtime/spec/adapters.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

const AdapterConfig kGalore{.rank = 4, .init = AdapterInit::galore, .windows = {.steps = 2, .scale = 0.5}};
constexpr AdamW kAdamW{.lr = 1e-2};

// Keeps the gradient sums that a stage's backward left behind last.
class Watched : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override {
    Carry d_in = ForwardingModel::backward(stage, weights, gradients, carry, shared, d_out);
    keep(stage, gradients);
    return d_in;
  }
  Carry backward_kept(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                      const Shared& shared, const Carry& d_out, std::unique_ptr<KeptActivations> kept) const override {
    Carry d_in = ForwardingModel::backward_kept(stage, weights, gradients, carry, shared, d_out, std::move(kept));
    keep(stage, gradients);
    return d_in;
  }
  mutable std::map<int, std::vector<torch::Tensor>> sums;  // by stage and position

 private:
  void keep(int stage, const Gradients& gradients) const {
    std::vector<torch::Tensor>& of_stage = sums[stage];
    of_stage.clear();
    for (const torch::Tensor& each : gradients.tensors()) of_stage.push_back(each.defined() ? each.clone() : each);
  }
};

// One projected weight: where its parts are in a unit, what the formula makes of it, and the moments.
struct Projected {
  int stage = 0, unit = 0, weight = 0, a = 0, b = 0;
  bool trains_a = false;
  torch::Tensor begin, expected, m, v;
};

TEST(WindowReference, AddsToTheWeightWhatItsProjectorMakesOfEachUpdate) {
  DeviceMemory::install();
  const Case which = case_called("llama");
  Model model = with_adapters(plain_model(which), kGalore, 5);
  const auto watched = std::make_shared<Watched>(make_model(model.spec()));
  model.layers = watched;
  SessionOptions options = resident(2);
  options.precision = Precision::fp32_master_adam32;
  options.clip.reset();
  Session session(model, options, kAdamW);
  const ModelSpec& spec = session.model().spec();
  const auto value = [&](int unit, int tensor) {
    return torch::tensor(session.master(unit, tensor), torch::kDouble)
        .view(spec.units[static_cast<std::size_t>(unit)].tensors[static_cast<std::size_t>(tensor)].shape);
  };
  std::vector<Projected> all;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) {
    if (spec.stages[stage].kind != StageKind::block) continue;
    const int unit = spec.stages[stage].units.at(0);
    std::map<std::string, Projected> by_module;
    const std::vector<TensorSpec>& tensors = spec.units[static_cast<std::size_t>(unit)].tensors;
    for (int i = 0; i < static_cast<int>(tensors.size()); ++i) {
      if (!is_adapter(tensors[i]) && tensors[i].rewritten != Rewritten::master) continue;
      Projected& of = by_module[linear_module(tensors[i])];
      of.stage = stage;
      of.unit = unit;
      if (!is_adapter(tensors[i])) {
        of.weight = i;
      } else {
        const bool a = adapter_part(tensors[i]) == AdapterPart::a;
        (a ? of.a : of.b) = i;
        if (a) of.trains_a = tensors[i].trainable;
      }
    }
    for (auto& [module, of] : by_module) {
      of.begin = value(unit, of.weight);
      of.expected = of.begin.clone();
      all.push_back(of);
    }
  }
  ASSERT_EQ(all.size(), 14U);
  constexpr int kSteps = 5;  // two windows, and the begin of a third
  for (int step = 0; step < kSteps; ++step) {
    if (session.waits_for_gradient()) session.begin_with_gradient(batches(2, step));
    session.step(batches(2, step), kAdamW.lr);
    for (Projected& of : all) {
      const int trained = of.trains_a ? of.a : of.b;
      const torch::Tensor g =
          watched->sums.at(of.stage).at(static_cast<std::size_t>(trained)).to(torch::kBFloat16).to(torch::kDouble);
      if (step == 0) of.m = of.v = torch::zeros_like(g);
      of.m = kAdamW.beta1 * of.m + (1 - kAdamW.beta1) * g;
      of.v = kAdamW.beta2 * of.v + (1 - kAdamW.beta2) * g * g;
      const torch::Tensor m = of.m / (1 - std::pow(kAdamW.beta1, step + 1)),
                          v = of.v / (1 - std::pow(kAdamW.beta2, step + 1));
      const torch::Tensor change = m / (v.sqrt() + kAdamW.eps) * (-kAdamW.lr * kGalore.windows.scale);
      const torch::Tensor projector = value(of.unit, of.trains_a ? of.b : of.a);
      of.expected += of.trains_a ? torch::mm(projector, change) : torch::mm(change, projector);
    }
  }
  for (const Projected& of : all) {
    const torch::Tensor found = value(of.unit, of.weight) + torch::mm(value(of.unit, of.b), value(of.unit, of.a));
    const double off = (found - of.expected).norm().item<double>();
    EXPECT_LT(off, 1e-4 * (of.expected - of.begin).norm().item<double>())
        << spec.units[static_cast<std::size_t>(of.unit)].tensors[static_cast<std::size_t>(of.weight)].name;
  }
}

// The base of a resumed run lies in memory as it lies in the store.
TEST(WindowReference, AResumedRunDoesNotWriteTheBaseAgain) {
  DeviceMemory::install();
  const Case which = case_called("llama");
  const Folder folder;
  const Model model = with_adapters(plain_model(which), kGalore, 5);
  SessionOptions options = streamed(resident(2), folder);
  options.host_memory = 64 * kMiB;
  options.commit_every = 1;
  {
    Session session(model, options);
    for (int step = 0; step < 3; ++step) {
      if (session.waits_for_gradient()) session.begin_with_gradient(batches(2, step));
      session.step(batches(2, step));
    }
    session.commit();
  }
  options.resume = true;
  Session session(model, options);
  ASSERT_FALSE(session.waits_for_gradient());
  std::uint64_t base = 0, trained = 0;
  for (const swap::Chunk& chunk : session.plan().layout->chunks()) {
    ASSERT_TRUE(session.plan().arrangement.hi_resident[static_cast<std::size_t>(chunk.id)]);
    (chunk.trainable ? trained : base) += chunk.word_bytes() + chunk.state_bytes;
  }
  const std::uint64_t before = session.bytes_written();
  session.step(batches(2, 3));
  session.commit();
  EXPECT_LT(session.bytes_written() - before, trained + base / 2) << "trained " << trained << ", base " << base;
  session.discard();
}

// One thread computes, whatever torch has, and torch keeps what it had.
TEST(Projector, HasTheSameBitsOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  torch::manual_seed(3);
  const torch::Tensor gradient = torch::randn({700, 600});
  const FactorsOf of{.name = "weight", .rank = 64, .seed = 7};
  std::vector<std::vector<std::uint16_t>> found;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    found.push_back(projector_of_gradient(gradient, of).a);
    EXPECT_EQ(at::get_num_threads(), threads);
    std::async(std::launch::async, [&] { EXPECT_EQ(at::get_num_threads(), threads); }).get();
  }
  at::set_num_threads(before);
  EXPECT_EQ(found[0].size(), 64U * 600U);
  EXPECT_EQ(found[1], found[0]);
  EXPECT_EQ(found[2], found[0]);
}

}  // namespace
}  // namespace tierflow::testing
