// Mixtures of experts in a session: what they take at once, and routers that overflow.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "runtime/device/device_memory.h"
#include "runtime/session/session.h"
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
  Session session({make_model(parse_model_spec(which.json, which.name, tiling)), initial(11)}, options);
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

INSTANTIATE_TEST_SUITE_P(Mixtures, RouterThatOverflows,
                         ::testing::Values("mixtral", "qwen2_moe", "granite_moe", "glm4_moe", "gpt_oss"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tierflow::testing
