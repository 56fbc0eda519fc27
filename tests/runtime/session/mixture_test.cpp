// Mixtures of experts in a session: what they take at once, and routers that overflow.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "runtime/device/device_memory.h"
#include "runtime/models/layered_model.h"
#include "runtime/session/session.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

// So large that the products of the last layer's router are no numbers of the model's type.
WeightSource overflowing() {
  return [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial(11)(tensor, first, out);
    if (tensor.part == Part::router && tensor.shape.size() == 2 && tensor.name.find("layers.1.") != std::string::npos)
      std::ranges::fill(out, 3e38F);
  };
}

class RouterThatOverflows : public ::testing::TestWithParam<const char*> {};

// Scores of infinities are no numbers, wherever the state lies and however the layer is cut.
TEST_P(RouterThatOverflows, IsAStepThatIsSkippedWhole) {
  DeviceMemory::install();
  const Case which = case_called(GetParam());
  const Folder folder;
  for (const bool on_storage : {false, true})
    for (const Tiling& tiling : {Tiling{}, Tiling{.block_elements = 1, .experts = 1}}) {
      const SessionOptions options = on_storage ? streamed(resident(2), folder) : resident(2);
      Session session({make_model(parse_model_spec(which.json, which.name, tiling)), overflowing()}, options);
      const auto before = masters_of(session);
      for (int step = 0; step < 2; ++step) EXPECT_TRUE(session.step(batches(2, step), 1e-2).skipped);
      EXPECT_EQ(session.skipped_steps(), 2U);
      EXPECT_EQ(masters_of(session), before);
    }
}

// How often a step of so many micro-batches enters each stage forward, and its result.
std::pair<std::map<int, int>, StepResult> entered_in_a_step(const Tiling& tiling, int micro_batches,
                                                            std::int64_t sequence_length) {
  DeviceMemory::install();
  SessionOptions options = resident(micro_batches);
  options.device_memory = options.host_memory = 512 * kMiB;
  options.sequence_length = sequence_length;
  options.record = true;
  const Case which = case_called("mixtral");
  Session session(plain_model(which, tiling), options);
  const StepResult result = session.step(batches(micro_batches, 0), 1e-2);
  std::map<int, int> entered;
  for (const swap::TaskRecord& record : session.take_timeline())
    if (record.kind == swap::TaskKind::compute && record.pass == swap::Pass::forward) ++entered[record.stage];
  return {entered, result};
}

TEST(Together, AStepTakesItsMicroBatchesThroughExpertsAtOnce) {
  const auto [cut, result] = entered_in_a_step({}, 3, 16);
  EXPECT_EQ(cut, (std::map<int, int>{{0, 3}, {1, 3}, {2, 1}, {3, 3}, {4, 1}}));
  EXPECT_EQ(result.experts, 4);
  ASSERT_EQ(result.experts_touched.size(), 2U);
  for (const std::int64_t touched : result.experts_touched) EXPECT_TRUE(touched >= 2 && touched <= 4) << touched;
  const auto [whole, other] = entered_in_a_step({.experts_apart = false}, 3, 16);
  EXPECT_EQ(whole, (std::map<int, int>{{0, 3}, {1, 3}, {2, 3}}));
  EXPECT_NEAR(other.loss, result.loss, 1e-5 * result.loss);
  EXPECT_NEAR(other.grad_norm, result.grad_norm, 1e-2 * result.grad_norm);
}

// So many that memory does not grow with a step's tokens for ever; groups of one size, but for the last.
TEST(Together, AsManyMicroBatchesAsHaveSoManyTokens) {
  const auto together = [](int micro_batches, std::int64_t tokens) {
    return micro_batches_together({.micro_batch = 2, .micro_batches = micro_batches, .sequence_length = tokens / 2});
  };
  EXPECT_EQ(together(1, 1024), 1);
  EXPECT_EQ(together(16, kTokensTogether / 16), 16);
  EXPECT_EQ(together(17, kTokensTogether / 16), 9);
  EXPECT_EQ(together(9, kTokensTogether / 8), 5);
  EXPECT_EQ(together(4, 2 * kTokensTogether), 1);
  EXPECT_EQ(micro_batches_together({.micro_batch = 2, .micro_batches = 4, .sequence_length = 16, .train = false}), 1);
}

// One step of a mixture on these micro-batches, from its first weights.
StepResult step_of(const Case& which, const std::vector<MicroBatch>& batches, const Tiling& tiling) {
  SessionOptions options = resident(static_cast<int>(batches.size()));
  options.device_memory = options.host_memory = 512 * kMiB;
  Session session(plain_model(which, tiling), options);
  return session.step(batches, 1e-2);
}

// The routers' loss counts in a step as the tokens of its micro-batch do, and padding in none of its numbers.
TEST(Balance, OfAStepIsThatOfItsMicroBatchesByTheirTokens) {
  DeviceMemory::install();
  const Case with = case_called("mixtral_balanced"), without = case_called("mixtral");
  std::vector<MicroBatch> all = batches(3, 0);
  all[0].labels.narrow(1, 4, 12).fill_(-100);
  all[1].labels.narrow(1, 9, 7).fill_(-100);
  all[1].lengths = {10, 10};
  const double tokens[] = {8, 18, 32};
  for (const Tiling& tiling : {Tiling{}, Tiling{.experts_apart = false}, Tiling{.block_elements = 1, .experts = 1}}) {
    const StepResult result = step_of(with, all, tiling), plain = step_of(without, all, tiling);
    double expected = 0;
    for (std::size_t i = 0; i < all.size(); ++i)
      expected += tokens[i] / (8 + 18 + 32) * step_of(with, {all[i]}, tiling).aux_loss;
    EXPECT_GT(expected, 1.9);  // about as many as a token takes
    EXPECT_NEAR(result.aux_loss, expected, 1e-6);
    EXPECT_NEAR(result.loss, plain.loss + 0.5 * expected, 1e-6);
    EXPECT_TRUE(std::isnan(plain.aux_loss));
    EXPECT_NE(result.grad_norm, plain.grad_norm);
    // Cut off, what was padding is not there.
    std::vector<MicroBatch> cut = all;
    cut[1] = {.ids = all[1].ids.narrow(1, 0, 10).contiguous(), .labels = all[1].labels.narrow(1, 0, 10).contiguous()};
    EXPECT_NEAR(step_of(with, cut, tiling).aux_loss, expected, 1e-4);
    cut[1] = all[1];
    cut[1].lengths.clear();
    EXPECT_GT(std::abs(step_of(with, cut, tiling).aux_loss - expected), 1e-3);
  }
}

TEST(Balance, LengthsOfRowsAreThoseOfRows) {
  DeviceMemory::install();
  std::vector<MicroBatch> all = batches(1, 0);
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{16}, {17, 1}, {4, -1}}) {
    all[0].lengths = lengths;
    expect_refusal(io::ErrorKind::usage, {"lengths"}, [&] { step_of(case_called("mixtral_balanced"), all, {}); });
  }
}

// Does not hear which experts have tokens, so that all of their gradients move.
class UntoldModel : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    return ForwardingModel::forward(stage, weights, carry, untold(shared), training);
  }
  std::unique_ptr<KeptActivations> forward_keeping(int stage, const Weights& weights, Carry& carry,
                                                   const Shared& shared) const override {
    return ForwardingModel::forward_keeping(stage, weights, carry, untold(shared));
  }

 private:
  static Shared untold(Shared shared) {
    shared.watch.touched = nullptr;
    return shared;
  }
};

struct Moved {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
  std::map<swap::TaskKind, std::uint64_t> bytes;
  std::uint64_t left_out = 0, in_steps = 0;
  std::int64_t touched = 0;

  std::uint64_t bytes_of(swap::TaskKind kind) const {
    const auto found = bytes.find(kind);
    return found == bytes.end() ? 0 : found->second;
  }
};

// Steps of so few tokens that in each some experts have none, and that others have none in the next.
Moved steps_of_few_tokens(const Case& which, SessionOptions options, const Tiling& tiling, bool told) {
  options.record = true;
  std::unique_ptr<LayeredModel> model = make_model(parse_model_spec(which.json, which.name, tiling));
  if (!told) model = std::make_unique<UntoldModel>(std::move(model));
  Session session({std::move(model), initial(11)}, options, {.weight_decay = 0.1});
  Moved moved;
  for (int step = 0; step < 6; ++step) {
    std::vector<MicroBatch> few = batches(1, step);
    few[0] = {.ids = few[0].ids.narrow(0, 0, 1).narrow(1, 0, 1).contiguous(),
              .labels = few[0].labels.narrow(0, 0, 1).narrow(1, 0, 1).contiguous()};
    const StepResult result = session.step(few, 3e-3);
    moved.losses.push_back(result.loss);
    moved.norms.push_back(result.grad_norm);
    moved.in_steps += result.gradient_bytes_left_out;
    for (const std::int64_t touched : result.experts_touched) moved.touched += touched;
  }
  moved.masters = masters_of(session);
  for (const swap::TaskRecord& record : session.take_timeline()) moved.bytes[record.kind] += record.bytes;
  for (const swap::LaneCounters& lane : session.lanes()) moved.left_out += lane.left_out;
  return moved;
}

class ExpertsWithoutTokens : public ::testing::TestWithParam<const char*> {};

// Their gradients are zeros, which do not move; the updates are those of zeros that did, to the bit.
TEST_P(ExpertsWithoutTokens, MoveNoGradients) {
  using enum swap::TaskKind;
  DeviceMemory::install();
  const Case which = case_called(GetParam());
  const ExpertsSpec spec = parse_model_spec(which.json, which.name).config.experts;
  const Folder folder;
  for (const Tiling& tiling : {Tiling{}, Tiling{.experts_apart = false}, Tiling{.block_elements = 1, .experts = 1}})
    for (const std::optional<double> clip : {std::optional<double>(0.05), std::optional<double>()}) {
      SessionOptions options = resident(1);
      options.clip = clip;
      const std::vector<std::vector<float>> expected = steps_of_few_tokens(which, options, tiling, false).masters;
      SessionOptions small = streamed(options, folder), delayed = small;
      delayed.chaos_seed = 7;
      for (const SessionOptions& each : {options, small, delayed}) {
        const Moved all = steps_of_few_tokens(which, each, tiling, false);
        const Moved few = steps_of_few_tokens(which, each, tiling, true);
        EXPECT_EQ(few.losses, all.losses);
        EXPECT_EQ(few.norms, all.norms);
        EXPECT_EQ(all.masters, expected);
        EXPECT_EQ(few.masters, expected);
        // In two layers and six steps, those that no token took: three matrices each.
        const auto untouched = static_cast<std::uint64_t>(2 * 6 * spec.count - few.touched);
        EXPECT_GT(untouched, 0U);
        EXPECT_GE(few.left_out, untouched * 2 * 3 * 32 * static_cast<std::uint64_t>(spec.width));
        EXPECT_EQ(all.left_out, 0U);
        EXPECT_TRUE(few.in_steps > 0 && few.in_steps <= few.left_out) << few.in_steps;
        std::uint64_t less = 0;
        for (const swap::TaskKind kind : {download_gradient, write_gradient, read_gradient})
          less += all.bytes_of(kind) - few.bytes_of(kind);
        EXPECT_EQ(few.left_out, less);
        // A chunk of such experts alone is not stored either.
        const bool stored = tiling.experts == 1 && all.bytes_of(write_gradient) != 0;
        EXPECT_TRUE(!stored || few.bytes_of(write_gradient) < all.bytes_of(write_gradient));
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Mixtures, ExpertsWithoutTokens, ::testing::Values("mixtral", "granite_moe", "gpt_oss"),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Mixtures, RouterThatOverflows,
                         ::testing::Values("mixtral", "qwen2_moe", "granite_moe", "glm4_moe", "gpt_oss", "llama4"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tierflow::testing
