// Turns in an order that the caller decides: wherever the state lives, they give the same bits.
#include "runtime/stream/streamer.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kStages = 3;

// Three square matrices, one a stage, of two chunks each.
std::vector<UnitSpec> matrices() {
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < kStages; ++unit) {
    const std::string name = "layers." + std::to_string(unit);
    units.push_back({.name = name, .tensors = {{.name = name + ".weight", .shape = {300, 300}, .init_std = 0.06}}});
  }
  return units;
}

StreamerOptions in_memory() {
  return {.device_memory = 64 * kMiB, .host_memory = 64 * kMiB, .seed = 3, .update_threads = 1};
}

StreamerOptions on_storage(const Folder& folder) {
  StreamerOptions options = in_memory();
  options.device_memory = 600 * 1024;
  options.host_memory = 900 * 1024;
  options.storage = {folder.path};
  options.allow_buffered = options.allow_any_filesystem = true;
  options.chunk_elements = 1 << 16;
  options.chaos_seed = 5;  // delays, and poison where nothing may be read
  return options;
}

class Turns {
 public:
  explicit Turns(const StreamerOptions& options)
      : streamer(
            matrices(), {{0}, {1}, {2}},
            [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
              initial_values(tensor, 7, first, out);
            },
            options) {}

  // One pass forward and one back through tanh(x w'): the loss. The gradients are added, by autograd's hooks or by
  // hand.
  double pass(const torch::Tensor& input, bool hooks) {
    std::vector<torch::Tensor> inputs{input};
    for (int stage = 0; stage < kStages; ++stage) {
      const Weights weights = streamer.enter(stage, swap::Pass::forward, {}, false);
      inputs.push_back(torch::tanh(torch::matmul(inputs.back(), weights[0].t())));
      streamer.leave();
    }
    const double loss = inputs.back().to(torch::kFloat).square().mean().item<double>();
    torch::Tensor d = inputs.back() * (2.0 / static_cast<double>(inputs.back().numel()));
    for (int stage = kStages; stage-- > 0;) {
      const Weights weights = streamer.enter(stage, swap::Pass::backward, {true}, false);
      const torch::Tensor x = inputs[static_cast<std::size_t>(stage)].detach().requires_grad_(),
                          weight = weights[0].requires_grad_();
      const torch::Tensor out = torch::tanh(torch::matmul(x, weight.t()));
      if (hooks) {
        streamer.collect({weight});
        out.backward(d);
        d = x.grad();
      } else {
        const auto gradients = torch::autograd::grad({out}, {x, weight}, {d});
        streamer.add({gradients[1]});
        d = gradients[0];
      }
      streamer.leave();
    }
    return loss;
  }
  void step(int number) {
    std::vector<std::pair<int, std::vector<TensorUpdate>>> updates;
    for (int unit = 0; unit < kStages; ++unit)
      updates.push_back({unit, {{.active = true, .lr = 1e-3, .step = number}}});
    streamer.step(std::move(updates));
  }

  Streamer streamer;
};

torch::Tensor input(int number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number));
  return torch::randn({4, 300}, generator).to(torch::kBFloat16);
}

struct Trained {
  std::vector<double> losses;
  std::vector<torch::Tensor> masters;
};

// Three steps of two passes each.
Trained train(const StreamerOptions& options, bool hooks) {
  Turns turns(options);
  Trained trained;
  for (int step = 1; step <= 3; ++step) {
    for (int part = 0; part < 2; ++part) trained.losses.push_back(turns.pass(input(2 * step + part), hooks));
    turns.step(step);
  }
  for (int unit = 0; unit < kStages; ++unit) trained.masters.push_back(turns.streamer.read(unit, 0, /*master=*/true));
  return trained;
}

TEST(StreamerTurns, GiveTheSameBitsFromStorageAndFromMemory) {
  const Folder folder;
  for (const bool hooks : {false, true}) {
    const Trained resident = train(in_memory(), hooks), streamed = train(on_storage(folder), hooks);
    EXPECT_EQ(resident.losses, streamed.losses);
    EXPECT_LT(resident.losses.back(), resident.losses.front());
    for (int unit = 0; unit < kStages; ++unit)
      EXPECT_TRUE(torch::equal(resident.masters[static_cast<std::size_t>(unit)],
                               streamed.masters[static_cast<std::size_t>(unit)]))
          << unit;
  }
}

TEST(StreamerTurns, AddUpTheGradientsOfPassesUntilTheStep) {
  Turns turns(in_memory());
  turns.pass(input(1), false);
  EXPECT_EQ(turns.streamer.gradients_of(1), 1);
  const torch::Tensor first = turns.streamer.gradient(1, 0);
  turns.pass(input(1), false);
  EXPECT_EQ(turns.streamer.gradients_of(1), 2);
  EXPECT_TRUE(torch::equal(turns.streamer.gradient(1, 0), 2 * first));
  EXPECT_NEAR(turns.streamer.squares(1, 0), (2 * first).to(torch::kDouble).square().sum().item<double>(), 1e-9);
  turns.streamer.drop_gradient(1);
  EXPECT_EQ(turns.streamer.gradients_of(1), 0);
  turns.step(1);
  EXPECT_EQ(turns.streamer.gradients_of(0), 0);
}

TEST(StreamerTurns, AreTakenOneAtATime) {
  Turns turns(in_memory());
  expect_refusal(io::ErrorKind::usage, {"no turn"}, [&] { turns.streamer.add({input(1)}); });
  turns.streamer.enter(0, swap::Pass::forward, {}, false);
  EXPECT_TRUE(turns.streamer.inside());
  expect_refusal(io::ErrorKind::usage, {"at the same time"},
                 [&] { turns.streamer.enter(1, swap::Pass::forward, {}, false); });
  turns.streamer.leave();
  EXPECT_FALSE(turns.streamer.inside());
}

TEST(StreamerTurns, WhatDoesNotFitTheStagesIsRefusedAndTheStreamerGoesOn) {
  Turns turns(in_memory());
  Streamer& streamer = turns.streamer;
  for (const int stage : {-1, kStages})
    expect_refusal(io::ErrorKind::usage, {"no stage", "0 to 2"},
                   [&] { streamer.enter(stage, swap::Pass::forward, {}, false); });
  expect_refusal(io::ErrorKind::usage, {"stage 1", "1 units", "0 values"},
                 [&] { streamer.enter(1, swap::Pass::backward, {}, false); });
  streamer.enter(1, swap::Pass::backward, {true}, false);
  expect_refusal(io::ErrorKind::usage, {"2 gradients", "1 weights"}, [&] {
    streamer.add({torch::ones({300, 300}), torch::ones({300, 300})});
  });
  streamer.leave();
  streamer.drop_gradient(1);
  using Updates = std::vector<std::pair<int, std::vector<TensorUpdate>>>;
  for (const Updates& wrong : {Updates{{3, {{}}}}, Updates{{-1, {{}}}}, Updates{{0, {}}}})
    expect_refusal(io::ErrorKind::usage, {"unit " + std::to_string(wrong[0].first)}, [&] { streamer.step(wrong); });
  EXPECT_EQ(turns.pass(input(1), false), Turns(in_memory()).pass(input(1), false));
}

TEST(StreamerTurns, AUnitThatIsNotTrainedGetsNoGradients) {
  std::vector<UnitSpec> units = matrices();
  units[1].tensors[0].trainable = false;
  const auto zeros = [](const TensorSpec&, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 0.0F); };
  Streamer streamer(units, {{0}, {1}, {2}}, zeros, in_memory());
  expect_refusal(io::ErrorKind::usage, {"layers.1", "not trained"},
                 [&] { streamer.enter(1, swap::Pass::backward, {true}, false); });
  EXPECT_EQ(streamer.enter(1, swap::Pass::backward, {false}, false).size(), 1U);
  streamer.leave();
}

TEST(StreamerTurns, StagesThatMissOrInventUnitsAreRefused) {
  using Stages = std::vector<std::vector<int>>;
  const auto plan = [](const std::vector<UnitSpec>& units, const Stages& stages) {
    streamer_bytes(units, stages, in_memory(), 1);
  };
  expect_refusal(io::ErrorKind::usage, {"no parameters"}, [&] { plan({}, {}); });
  for (const Stages& stages : {Stages{{0}, {1}, {3}}, Stages{{0}, {-1}, {2}}})
    expect_refusal(io::ErrorKind::usage, {"a stage has unit", "0 to 2"}, [&] { plan(matrices(), stages); });
  expect_refusal(io::ErrorKind::usage, {"unit 1 (layers.1) is in no stage"}, [&] { plan(matrices(), {{0}, {2}}); });
}

// The error names both budgets; with these it works.
TEST(StreamerTurns, BudgetsThatAreTooSmallAreNamedWithTheSmallestThatWork) {
  const Folder folder;
  StreamerOptions options = on_storage(folder);
  options.device_memory = options.host_memory = 1024;
  std::vector<std::uint64_t> smallest;
  try {
    streamer_bytes(matrices(), {{0}, {1}, {2}}, options, 1);
  } catch (const Exception& error) {
    const std::string text = error.what(), said = "the smallest that works is ";
    for (std::size_t at = text.find(said); at != std::string::npos; at = text.find(said, at + 1))
      smallest.push_back(std::stoull(text.substr(at + said.size())) * 1024);
  }
  ASSERT_EQ(smallest.size(), 2U);
  options.device_memory = smallest[0];
  options.host_memory = smallest[1];
  const StreamerBytes bytes = streamer_bytes(matrices(), {{0}, {1}, {2}}, options, 1);
  EXPECT_LE(bytes.device_bytes, options.device_memory);
  EXPECT_LE(bytes.host_bytes, options.host_memory);
  EXPECT_EQ(bytes.parameters, 3U * 300 * 300);
}

}  // namespace
}  // namespace tierflow::testing
