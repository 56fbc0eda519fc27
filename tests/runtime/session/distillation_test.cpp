// Micro-batches with a teacher's tokens through a session: the same bits under every budget, and what is left out is
// refused. What a teacher's session hands on has the same bits too.
#include <gtest/gtest.h>

#include "runtime/device/device_memory.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr std::int64_t kTop = 6;

std::vector<MicroBatch> taught_batches(int count, int step) {
  std::vector<MicroBatch> all = batches(count, step);
  for (MicroBatch& batch : all) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(batch.ids.sum().item<std::int64_t>());
    batch.teacher_ids = std::get<1>(torch::rand({2, 16, 96}, generator).topk(kTop, 2)).to(torch::kInt);
    batch.teacher_log_probabilities = torch::randn({2, 16, kTop}, generator).log_softmax(2).to(torch::kHalf);
  }
  return all;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> masters;
  bool operator==(const Outcome&) const = default;
};

Outcome run(const Case& which, const SessionOptions& options, const Tiling& tiling) {
  Session session(plain_model(which, tiling), options, {.lr = 3e-3});
  Outcome outcome;
  for (int step = 0; step < 3; ++step) {
    const StepResult result = session.step(taught_batches(options.micro_batches, step));
    const Distillation& rule = options.loss.distillation;
    EXPECT_NEAR(result.loss, rule.ce_alpha * result.ce_loss + rule.alpha * result.kd_loss, 1e-12);
    outcome.losses.insert(outcome.losses.end(), {result.loss, result.ce_loss, result.kd_loss, result.grad_norm});
  }
  outcome.losses.push_back(session.evaluate(batches(3, 9)).loss);
  outcome.masters = masters_of(session);
  return outcome;
}

TEST(DistillationSession, has_the_same_bits_under_every_budget) {
  DeviceMemory::install();
  const Folder folder;
  for (const Tiling& tiling : {Tiling{}, kTiled})
    for (const double temperature : {1.0, 2.0}) {
      const Case which = cases()[0];
      SessionOptions options = resident(2);
      options.loss.distillation = {.top = kTop, .temperature = temperature};
      const Outcome expected = run(which, options, tiling);
      EXPECT_EQ(run(which, least_device(options, which, tiling), tiling), expected);
      SessionOptions small = streamed(options, folder);
      EXPECT_EQ(run(which, small, tiling), expected);
      EXPECT_EQ(run(which, swapping(small, which, tiling), tiling), expected);
    }
}

// A step of two micro-batches is one of both: what it divides by is counted over the step.
TEST(DistillationSession, accumulates_over_micro_batches) {
  SessionOptions two = resident(2), one = resident(1);
  one.micro_batch = 4;
  two.loss.distillation = one.loss.distillation = {.top = kTop, .temperature = 2};
  std::vector<MicroBatch> apart = taught_batches(2, 0);
  apart[0].labels[0].fill_(-100);  // unequal numbers
  const auto joined = [&](at::Tensor MicroBatch::*part) { return torch::cat({apart[0].*part, apart[1].*part}); };
  const MicroBatch both{.ids = joined(&MicroBatch::ids),
                        .labels = joined(&MicroBatch::labels),
                        .teacher_ids = joined(&MicroBatch::teacher_ids),
                        .teacher_log_probabilities = joined(&MicroBatch::teacher_log_probabilities)};
  const StepResult a = Session(plain_model(cases()[0]), two).step(apart),
                   b = Session(plain_model(cases()[0]), one).step({both});
  EXPECT_NEAR(a.loss, b.loss, 1e-6 * b.loss);
  EXPECT_NEAR(a.kd_loss, b.kd_loss, 1e-6 * b.kd_loss);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 2e-2 * b.grad_norm);
}

// Its tokens lie on the device for the whole step, those of every micro-batch.
TEST(DistillationSession, plans_the_memory_of_the_teachers_tokens) {
  constexpr std::uint64_t kTokens = 2 * 16, kMany = 64, kBatches = 32;
  SessionOptions options = resident(kBatches);
  const std::uint64_t plain = Session(plain_model(cases()[0]), options).plan().workspace;
  options.loss.distillation.top = kMany;
  EXPECT_GE(Session(plain_model(cases()[0]), options).plan().workspace, plain + kBatches * kTokens * kMany * (4 + 2));
}

TEST(DistillationSession, needs_a_teachers_tokens_for_every_token) {
  SessionOptions options = resident(2);
  options.loss.distillation.top = kTop;
  std::vector<MicroBatch> fewer = taught_batches(2, 0);
  for (MicroBatch& batch : fewer) {
    batch.teacher_ids = batch.teacher_ids.narrow(2, 0, kTop - 1);
    batch.teacher_log_probabilities = batch.teacher_log_probabilities.narrow(2, 0, kTop - 1);
  }
  for (const std::vector<MicroBatch>& wrong : {batches(2, 0), fewer}) {
    Session session(plain_model(cases()[0]), options);
    EXPECT_THROW(session.step(wrong), Exception);
  }
  options.loss.kind = LossKind::simpo;
  EXPECT_THROW(Session(plain_model(cases()[0]), options), Exception);
}

TEST(TeacherSession, hands_on_the_same_bits_under_every_budget) {
  const Folder folder;
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    const auto top_of = [&](SessionOptions options) {
      options.top = kTop;
      options.train = false;
      Session session(plain_model(cases()[0], tiling), options);
      std::vector<torch::Tensor> found;
      session.evaluate(
          3, [](std::int64_t index) { return batches(3, 5)[static_cast<std::size_t>(index)]; },
          [&](std::int64_t, const MicroBatch&, const HeadScores& scores) {
            found.insert(found.end(), {scores.top_ids, scores.top_log_probabilities});
          });
      return torch::cat({found[0], found[2], found[4], found[1], found[3], found[5]}, 1);
    };
    const torch::Tensor expected = top_of(resident(2));
    EXPECT_EQ(expected.size(1), 6 * kTop);
    EXPECT_TRUE(torch::equal(top_of(resident(1)), expected));
    EXPECT_TRUE(torch::equal(top_of(streamed(resident(3), folder)), expected));
  }
}

}  // namespace
}  // namespace tierflow::testing
