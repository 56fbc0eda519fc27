// The drop-in optimizer for loops that stay in memory.
#include "runtime/optimizer/adamw8bit.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <limits>
#include <sstream>

#include "optim/adamw.h"
#include "runtime/base/exception.h"

namespace tierflow {
namespace {

torch::Tensor bf16_valued(std::initializer_list<std::int64_t> shape, std::int64_t seed) {
  torch::manual_seed(seed);
  return torch::randn(shape).to(torch::kBFloat16).to(torch::kFloat32);
}

bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && torch::equal(a, b);
}

TEST(AdamW8bit, In32BitsFollowsTorchsAdamW) {
  const torch::Tensor start = bf16_valued({130, 300}, 1);
  torch::Tensor ours = start.clone().requires_grad_(), theirs = start.clone().requires_grad_();
  AdamW8bit optimizer({ours}, AdamW8bitOptions(1e-2).weight_decay(0.1).min_8bit_size(1 << 30));
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  for (int step = 0; step < 20; ++step) {
    ours.mutable_grad() = bf16_valued({130, 300}, 100 + step);
    theirs.mutable_grad() = ours.grad().clone();
    optimizer.step();
    reference.step();
  }
  EXPECT_LT((ours - theirs).abs().max().item<double>(), 2e-6);
  EXPECT_GT((ours - start).abs().max().item<double>(), 1e-2);
}

TEST(AdamW8bit, FollowsTorchsAdamWUnderEveryOption) {
  const torch::Tensor start = bf16_valued({1000}, 6);
  torch::Tensor ours = start.clone().requires_grad_(), theirs = start.clone().requires_grad_();
  AdamW8bit optimizer({ours},
                      AdamW8bitOptions(1e-2).betas({0.7, 0.95}).eps(0.1).weight_decay(0.3).min_8bit_size(1 << 30));
  torch::optim::AdamW reference({theirs},
                                torch::optim::AdamWOptions(1e-2).betas({0.7, 0.95}).eps(0.1).weight_decay(0.3));
  for (int step = 0; step < 5; ++step) {
    ours.mutable_grad() = bf16_valued({1000}, 400 + step);
    theirs.mutable_grad() = ours.grad().clone();
    optimizer.step();
    reference.step();
  }
  EXPECT_LT((ours - theirs).abs().max().item<double>(), 1e-6);
}

TEST(AdamW8bit, TheSmallestParameterWithEightBitsHasTheSizeThatWasAskedFor) {
  for (const auto& [size, type] : {std::pair{15, torch::kFloat32}, {16, torch::kUInt8}}) {
    torch::Tensor parameter = torch::ones({size}).requires_grad_();
    AdamW8bit optimizer({parameter}, AdamW8bitOptions(0.1).min_8bit_size(16));
    parameter.mutable_grad() = torch::ones({size});
    optimizer.step();
    const auto& state = static_cast<const AdamW8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().scalar_type(), type) << size;
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), type) << size;
  }
}

// The same bits as the update of streamed training, whatever the number of threads.
TEST(AdamW8bit, IsTheUpdateOfTheSpans) {
  constexpr std::int64_t n = 3 * 64 * 1024 + 777;
  const torch::Tensor start = bf16_valued({n}, 2);
  std::vector<torch::Tensor> results;
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    torch::Tensor parameter = start.clone().requires_grad_();
    AdamW8bit optimizer({parameter}, AdamW8bitOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      parameter.mutable_grad() = bf16_valued({n}, 200 + step);
      optimizer.step();
    }
    results.push_back(parameter.detach());
  }
  EXPECT_TRUE(same(results[0], results[1]));

  const auto short_of = [](std::int64_t size) { return torch::zeros({size}, torch::kInt16); };
  const torch::Tensor hi = short_of(n), lo = short_of(n), m = torch::zeros({n}, torch::kUInt8), v = m.clone(),
                      m_max = torch::zeros({n / 256 + 1}), v_max = m_max.clone();
  const auto at = [](const torch::Tensor& t) { return static_cast<std::uint16_t*>(t.data_ptr()); };
  const optim::State state{.hi = at(hi),
                           .lo = at(lo),
                           .m = {.values = m.data_ptr(), .absmax = m_max.data_ptr<float>()},
                           .v = {.values = v.data_ptr(), .absmax = v_max.data_ptr<float>()}};
  optim::zero_moment(state.m, n, true);
  optim::zero_moment(state.v, n, false);
  optim::split_master(start.data_ptr<float>(), state.hi, state.lo, n);
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor gradient = bf16_valued({n}, 200 + step).to(torch::kBFloat16);
    optim::adamw_update({.lr = 1e-2F, .weight_decay = 1e-2F, .step = step + 1}, at(gradient), state, n);
  }
  torch::Tensor expected = torch::zeros({n});
  optim::join_master(state.hi, state.lo, expected.data_ptr<float>(), n);
  EXPECT_TRUE(same(results[0], expected));
}

// Steps too small for bf16 add up in the master.
TEST(AdamW8bit, ABf16ParameterHasAnExactMaster) {
  torch::Tensor narrow = torch::ones({5000}, torch::kBFloat16).requires_grad_(),
                wide = torch::ones({5000}).requires_grad_();
  AdamW8bit optimizer({narrow, wide}, AdamW8bitOptions(1e-4).weight_decay(0));
  for (int step = 0; step < 100; ++step) {
    narrow.mutable_grad() = torch::ones({5000}, torch::kBFloat16);
    wide.mutable_grad() = torch::ones({5000});
    optimizer.step();
  }
  EXPECT_NEAR(wide[0].item<double>(), 0.99, 1e-4);
  EXPECT_NEAR(narrow[0].item<double>(), 0.99, 4e-3);
  EXPECT_LT(narrow[0].item<double>(), 1.0);
}

TEST(AdamW8bit, GroupsSchedulersAndParametersWithoutGradients) {
  torch::Tensor a = torch::ones({5000}).requires_grad_(), b = a.detach().clone().requires_grad_(),
                idle = a.detach().clone().requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{a, idle});
  groups.emplace_back(std::vector<torch::Tensor>{b},
                      std::make_unique<AdamW8bitOptions>(AdamW8bitOptions(0.5).weight_decay(0)));
  AdamW8bit optimizer(groups, AdamW8bitOptions(0.1).weight_decay(0));
  torch::optim::StepLR schedule(optimizer, 1, 0.1);
  const auto moved = [](const torch::Tensor& t, double from) { return from - t[0].item<double>(); };
  for (torch::Tensor* tensor : {&a, &b}) tensor->mutable_grad() = torch::ones({5000});
  optimizer.step();
  EXPECT_NEAR(moved(a, 1), 0.1, 1e-5);
  EXPECT_NEAR(moved(b, 1), 0.5, 1e-5);
  EXPECT_EQ(moved(idle, 1), 0);
  const double before = a[0].item<double>();
  for (int i = 0; i < 2; ++i) schedule.step();  // torch's first call keeps the rate
  optimizer.step();
  EXPECT_NEAR(moved(a, before), 0.01, 1e-4);
}

// A parameter that lies in a larger buffer begins where no vector does.
TEST(AdamW8bit, AParameterWithinABufferIsUpdatedAlike) {
  for (const auto type : {torch::kBFloat16, torch::kFloat32}) {
    const torch::Tensor buffer = bf16_valued({5001}, 5).to(type),
                        within = buffer.narrow(0, 1, 5000).detach().requires_grad_(),
                        alone = within.detach().clone().requires_grad_();
    AdamW8bit optimizer({within, alone}, AdamW8bitOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor gradients = bf16_valued({5001}, 300 + step).to(type);
      within.mutable_grad() = gradients.narrow(0, 1, 5000);
      alone.mutable_grad() = gradients.narrow(0, 1, 5000).clone();
      optimizer.step();
    }
    EXPECT_TRUE(same(within, alone));
    EXPECT_FALSE(same(alone, bf16_valued({5001}, 5).to(type).narrow(0, 1, 5000)));
  }
}

TEST(AdamW8bit, ItsClosureComputesGradients) {
  torch::Tensor a = torch::ones({5000}).requires_grad_();
  AdamW8bit optimizer({a}, AdamW8bitOptions(0.1).weight_decay(0));
  const torch::NoGradGuard whatever_the_loop_has;
  const torch::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    torch::Tensor sum = a.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<double>(), 5000);
  EXPECT_NEAR(a[0].item<double>(), 0.9, 1e-5);
}

TEST(AdamW8bit, SavesAndLoads) {
  torch::Tensor one = bf16_valued({6000}, 3).requires_grad_(), small = bf16_valued({10}, 4).requires_grad_();
  const AdamW8bitOptions options =
      AdamW8bitOptions(1e-2).betas({0.8, 0.9}).eps(1e-3).weight_decay(0.2).min_8bit_size(8);
  AdamW8bit optimizer({one, small}, options);
  const auto step = [](AdamW8bit& with, torch::Tensor& x, torch::Tensor& y, int seed) {
    x.mutable_grad() = bf16_valued({6000}, seed);
    y.mutable_grad() = bf16_valued({10}, seed);
    with.step();
  };
  step(optimizer, one, small, 10);
  std::stringstream file;
  torch::save(optimizer, file);
  torch::Tensor other = one.detach().clone().requires_grad_(), other_small = small.detach().clone().requires_grad_();
  AdamW8bit loaded({other, other_small}, AdamW8bitOptions(0.5));
  torch::load(loaded, file);
  step(optimizer, one, small, 11);
  step(loaded, other, other_small, 11);
  const auto& read = static_cast<const AdamW8bitOptions&>(loaded.param_groups()[0].options());
  EXPECT_EQ(std::tuple(read.lr(), read.betas(), read.eps(), read.weight_decay(), read.min_8bit_size()),
            std::tuple(options.lr(), options.betas(), options.eps(), options.weight_decay(), options.min_8bit_size()));
  EXPECT_TRUE(same(one, other) && same(small, other_small));
}

TEST(AdamW8bit, AGradientThatIsNotFiniteSkipsTheStepWhole) {
  for (const bool of_the_first : {false, true}) {
    torch::Tensor a = torch::ones({5000}).requires_grad_(), b = a.detach().clone().requires_grad_();
    AdamW8bit optimizer({a, b}, AdamW8bitOptions(0.1));
    a.mutable_grad() = torch::ones({5000});
    b.mutable_grad() = torch::ones({5000});
    (of_the_first ? a : b).mutable_grad()[4321] = std::numeric_limits<float>::infinity();
    EXPECT_EQ(optimizer.step([] { return torch::full({}, 5.0); }).item<double>(), 5);
    EXPECT_EQ(optimizer.skipped_steps(), 1);
    EXPECT_TRUE(same(a, torch::ones({5000})) && same(b, torch::ones({5000})));
  }
}

TEST(AdamW8bit, RefusesWhatItCannotUpdate) {
  const auto refused = [](torch::Tensor parameter) {
    parameter.requires_grad_();
    parameter.mutable_grad() = torch::ones_like(parameter);
    AdamW8bit optimizer({parameter});
    EXPECT_THROW(optimizer.step(), Exception);
  };
  refused(torch::ones({10}, torch::kFloat64));
  refused(torch::ones({4, 6}).t());
  refused(torch::ones({10}, torch::kMeta));
  for (const torch::Tensor& gradient :
       {torch::ones({9}), torch::ones({5, 2}), torch::ones({10}, torch::kMeta), torch::ones({10}).to_sparse()}) {
    torch::Tensor parameter = torch::ones({10}).requires_grad_();
    parameter.mutable_grad() = gradient;
    AdamW8bit optimizer({parameter});
    EXPECT_THROW(optimizer.step(), Exception) << gradient.toString();
    EXPECT_TRUE(same(parameter, torch::ones({10})));
  }
  const AdamW8bitOptions usual(0.1);
  for (const AdamW8bitOptions& wrong :
       {AdamW8bitOptions(-1.0), AdamW8bitOptions(usual).eps(-1e-8), AdamW8bitOptions(usual).weight_decay(-0.1),
        AdamW8bitOptions(usual).betas({-0.1, 0.9}), AdamW8bitOptions(usual).betas({1, 0.9}),
        AdamW8bitOptions(usual).betas({0.9, -0.1}), AdamW8bitOptions(usual).betas({0.9, 1})}) {
    EXPECT_THROW(AdamW8bit({torch::ones({1})}, wrong), Exception);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{torch::ones({1})});
    groups.emplace_back(std::vector<torch::Tensor>{torch::ones({1})}, std::make_unique<AdamW8bitOptions>(wrong));
    EXPECT_THROW(AdamW8bit(groups, usual), Exception);
  }
  EXPECT_NO_THROW(AdamW8bit({torch::ones({1})}, AdamW8bitOptions(0.0).eps(0).weight_decay(0).betas({0, 0})));
}

}  // namespace
}  // namespace tierflow
