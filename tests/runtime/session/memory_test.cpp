// Device memory runs out in a step: what is computed again has the same bits, and what cannot be leaves the model as
// the step before left it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/checkpoint/init.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/attention.h"
#include "runtime/session/session.h"
#include "tests/runtime/session/fixture.h"
#include "tests/support/sanitized.h"

namespace tierflow::testing {
namespace {

// A model whose calls fail with torch's error when a test says so, after all their work: sums that they added to have
// been added to.
class Failing final : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  mutable int calls = 0;
  std::set<int> failures;     // by call
  bool of_a_library = false;  // what fails is what cuBLAS allocates past torch
  bool wrong = false;         // fails as torch does where no memory is wanting

 private:
  void called() const override {
    TORCH_CHECK(!wrong, "injected");
    if (!failures.contains(calls++)) return;
    TORCH_CHECK(!of_a_library, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
    TORCH_CHECK_WITH(OutOfMemoryError, false, "injected");
  }
};

struct Trainee {
  Trainee(const Case& which, const SessionOptions& options, const Tiling& tiling = {})
      : Trainee(std::make_shared<Failing>(make_model(parse_model_spec(which.json, which.name, tiling))), options) {}
  Trainee(std::shared_ptr<Failing> with, const SessionOptions& options)
      : model(std::move(with)),
        session({model, [](const TensorSpec& tensor, std::uint64_t first,
                           std::span<float> out) { initial_values(tensor, 11, first, out); }},
                options, {.lr = 3e-3}),
        micro_batches(options.micro_batches) {}

  // One step in which the calls `failures`, counted from its beginning, fail.
  StepResult step(int number, std::set<int> failures = {}) {
    model->calls = 0;
    model->failures = std::move(failures);
    return session.step(batches(micro_batches, number));
  }
  std::vector<std::vector<float>> masters() { return masters_of(session); }

  std::shared_ptr<Failing> model;
  Session session;
  int micro_batches;
};

SessionOptions in_memory(int micro_batches, std::optional<double> clip) {
  DeviceMemory::install();
  SessionOptions options = resident(micro_batches);
  options.clip = clip;
  return options;
}

const std::optional<double> kClips[] = {0.05, std::nullopt};

class ComputedAgain : public ::testing::TestWithParam<Case> {};

// Each call of a step fails once.
TEST_P(ComputedAgain, GivesTheSameBits) {
  for (const auto& clip : kClips)
    for (const Tiling& tiling : {Tiling{}, kTiled}) {
      Trainee plain(GetParam(), in_memory(1, clip), tiling), failing(GetParam(), in_memory(1, clip), tiling);
      std::vector<double> expected, got;
      for (int step = 0; step < 3; ++step) {
        expected.push_back(plain.step(step).loss);
        const int calls = plain.model->calls;
        std::set<int> every_other;
        for (int call = 0; call < calls; ++call) every_other.insert(2 * call);
        const StepResult result = failing.step(step, every_other);
        got.push_back(result.loss);
        // The tied table's sum goes on from the head's: its stages are not computed again, and none of these fail.
        EXPECT_EQ(result.computed_again, calls);
        EXPECT_EQ(failing.model->calls, 2 * calls);
      }
      EXPECT_EQ(got, expected);
      EXPECT_TRUE(failing.masters() == plain.masters());
    }
}

// What was swapped and cannot be used, or could not be kept to be swapped, is computed again.
class SwappedAgain : public ComputedAgain {};
TEST_P(SwappedAgain, GivesTheSameBits) {
  const Folder folder;
  for (const auto& clip : kClips)
    for (const SessionOptions& options : {swapping(in_memory(1, clip), GetParam(), {}),
                                          swapping(streamed(in_memory(1, clip), folder), GetParam(), {})}) {
      std::vector<std::vector<float>> expected;
      std::vector<double> losses;
      for (const bool fails : {false, true}) {
        Trainee run(GetParam(), options);
        for (int step = 0; step < 3; ++step) {
          std::set<int> every_third;
          for (int call = step; fails && call < 200; call += 3) every_third.insert(call);
          const StepResult result = run.step(step, every_third);
          EXPECT_EQ(result.computed_again > 3, fails);
          if (!fails)
            losses.push_back(result.loss);
          else
            EXPECT_EQ(result.loss, losses[step]);
        }
        if (!fails)
          expected = run.masters();
        else
          EXPECT_TRUE(run.masters() == expected);
      }
    }
}

std::vector<Case> untied() {
  std::vector<Case> chosen;
  for (const Case& which : cases("0.1"))
    if (which.name == "llama" || which.name == "qwen3" || which.name == "gpt2_untied" || which.name == "opt_untied")
      chosen.push_back(which);
  return chosen;
}
std::vector<Case> keeping() {
  std::vector<Case> chosen = untied();
  std::erase_if(chosen, [](const Case& which) { return !can_keep(which, {}); });
  return chosen;
}
INSTANTIATE_TEST_SUITE_P(Models, SwappedAgain, ::testing::ValuesIn(keeping()), case_name);
INSTANTIATE_TEST_SUITE_P(Models, ComputedAgain, ::testing::ValuesIn(untied()), case_name);

// Wherever in the third step memory runs out for good, the model is that of two steps; the third, tried again, has the
// bits of a run in which nothing failed.
void expect_dropped_whole(const Case& which, const SessionOptions& options) {
  Trainee two(which, options);
  for (int step = 0; step < 2; ++step) two.step(step);
  const auto after_two = two.masters();
  two.step(2);
  const auto after_three = two.masters();
  const int calls = two.model->calls;
  int dropped = 0;
  for (int call = 0; call < calls; ++call) {
    SCOPED_TRACE("call " + std::to_string(call) + " of " + std::to_string(calls));
    Trainee run(which, options);
    for (int step = 0; step < 2; ++step) run.step(step);
    try {
      run.step(2, {call, call + 1});
      FAIL() << "the step was to be dropped";
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::memory);
      EXPECT_NE(std::string(error.what()).find("--micro-batch"), std::string::npos) << error.what();
      if (!run.session.intact()) {
        EXPECT_NE(std::string(error.what()).find("torn"), std::string::npos) << error.what();
        EXPECT_FALSE(options.clip || options.deferred_share == 1) << "with all gradients waiting nothing is torn";
        continue;
      }
    }
    ++dropped;
    if (call % 2 == 0) {
      EXPECT_TRUE(run.masters() == after_two);
    }
    EXPECT_EQ(run.step(2).step, 3);
    EXPECT_TRUE(run.masters() == after_three);
  }
  // Without clipping the forward passes and the head, at least, can be dropped.
  EXPECT_GE(dropped, options.clip || options.deferred_share == 1 ? calls : calls / 2);
}

TEST(OutOfMemory, DropsTheStepWhole) {
  for (const auto& clip : kClips) expect_dropped_whole(cases("0.1").front(), in_memory(2, clip));
  for (const double share : {0.5, 1.0}) {
    SessionOptions options = in_memory(1, std::nullopt);
    options.deferred_share = share;
    options.device_update_share = 1 - share;
    expect_dropped_whole(cases("0.1").front(), options);
  }
}

TEST(OutOfMemory, DropsTheStepWholeWhenItStreams) {
  const Folder folder;
  for (const auto& clip : kClips) {
    SessionOptions options = streamed(in_memory(1, clip), folder);
    options.chaos_seed = 9;
    // One session at a time holds the folder.
    const Case llama = cases("0.1").front();
    std::vector<std::vector<float>> after_two;
    {
      Trainee run(llama, options);
      for (int step = 0; step < 2; ++step) run.step(step);
      after_two = run.masters();
    }
    Trainee run(llama, options);
    for (int step = 0; step < 2; ++step) run.step(step);
    EXPECT_THROW(run.step(2, {3, 4}), Exception);
    EXPECT_TRUE(run.session.intact());
    EXPECT_TRUE(run.masters() == after_two);
  }
}

// What a micro-batch takes is then estimated from smaller ones, or with a little more memory.
TEST(OutOfMemory, WhileMemoryIsMeasuredIsNoEnd) {
  const Case llama = cases("0.1").front();
  const SessionOptions options = in_memory(1, 1.0);
  Trainee plain(llama, options);
  const int measuring = plain.model->calls;
  ASSERT_GT(measuring, 4);
  const double expected = plain.step(0).loss;
  for (const bool of_a_library : {false, true})
    for (int call = 0; call < measuring; ++call) {
      SCOPED_TRACE("call " + std::to_string(call) + " of " + std::to_string(measuring));
      const auto model = std::make_shared<Failing>(make_model(parse_model_spec(llama.json, llama.name, {})));
      model->of_a_library = of_a_library;
      model->failures = {call};
      Trainee run(model, options);
      EXPECT_GT(model->calls, call);
      EXPECT_EQ(run.step(0).loss, expected);
    }
}

TEST(OutOfMemory, AnEvaluationLeavesTheSessionIntact) {
  Trainee run(cases("0.1").front(), in_memory(1, 1.0));
  const double expected = run.session.evaluate(batches(2, 7)).loss;
  for (const int call : {0, 1, 2, 5}) {
    run.model->calls = 0;
    run.model->failures = {call, call + 1};
    EXPECT_THROW(run.session.evaluate(batches(2, 7)), Exception);
    EXPECT_TRUE(run.session.intact());
  }
  run.model->failures = {};
  EXPECT_EQ(run.session.evaluate(batches(2, 7)).loss, expected);
}

// The real thing: the cap falls below what a step takes.
TEST(OutOfMemory, UnderACapThatIsTooLow) {
  DeviceMemory& memory = DeviceMemory::install();
  Trainee run(cases("0.1").front(), in_memory(1, 1.0));
  memory.release_kept();
  memory.reset_peak();
  const std::uint64_t before = memory.stats().used;
  run.step(0);
  const std::uint64_t needed = memory.stats().peak_used - before;
  const auto after_one = run.masters();
  const auto second = batches(1, 1);
  for (const std::uint64_t room : {std::uint64_t{0}, needed / 4, needed / 2, needed * 3 / 4}) {
    memory.release_kept();
    memory.set_cap(memory.stats().held + room);
    EXPECT_THROW(run.session.step(second), Exception);
    memory.set_cap(64 * kMiB);
    ASSERT_TRUE(run.session.intact());
    ASSERT_TRUE(run.masters() == after_one);
  }
  EXPECT_EQ(run.step(1).step, 2);
}

// Each session's budget counts; what is computed after all of them has all memory.
TEST(OutOfMemory, TheCapIsThatOfAllSessions) {
  const auto take = [](std::int64_t mib) { torch::empty({mib * static_cast<std::int64_t>(kMiB)}, torch::kByte); };
  {
    const Trainee outer(cases("0.1").front(), in_memory(1, 1.0));
    {
      const Trainee inner(cases("0.1").front(), in_memory(1, 1.0));
      EXPECT_NO_THROW(take(96));
      EXPECT_THROW(take(128), c10::OutOfMemoryError);
    }
    EXPECT_THROW(take(96), c10::OutOfMemoryError);
  }
  EXPECT_NO_THROW(take(128));
}

// What else torch throws is no lack of memory.
TEST(OutOfMemory, OtherErrorsEndTheSession) {
  Trainee run(cases("0.1").front(), in_memory(1, 1.0));
  run.model->wrong = true;
  EXPECT_THROW(run.session.step(batches(1, 0)), Exception);
  EXPECT_FALSE(run.session.intact());
}

// On the host, before anything is computed: on a GPU the lookup would end the use of the card.
TEST(Tokens, BeyondTheVocabularyAreNamedBeforeTheStep) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    for (torch::Tensor MicroBatch::*which : {&MicroBatch::ids, &MicroBatch::labels}) {
      Trainee run(cases().front(), in_memory(2, 1.0), tiling);
      run.model->calls = 0;
      auto wrong = batches(2, 0);
      (wrong[1].*which)[0][3] = 1000;
      try {
        run.session.step(wrong);
        ADD_FAILURE() << "it took a token that does not exist";
      } catch (const Exception& error) {
        EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
        EXPECT_THAT(error.error().detail, ::testing::AllOf(::testing::StartsWith("micro-batch 1: "),
                                                           ::testing::HasSubstr("1000 of token 3 in row 0")));
      }
      EXPECT_EQ(run.model->calls, 0);
    }
    Trainee run(cases().front(), in_memory(1, 1.0), tiling);
    auto wrong = batches(1, 0);
    wrong[0].ids[0][0] = -1;
    EXPECT_THROW(run.session.evaluate(wrong), Exception);
  }
}

// In a mixture of experts nearly each product has a shape of its own, for which oneDNN compiles code.
TEST(DeviceMemory, CodeForManyShapesDoesNotPileUp) {
#ifdef TIERFLOW_ADDRESSES_SANITIZED
  GTEST_SKIP() << "the sanitizer keeps freed memory for a while";
#endif
  DeviceMemory::install();
  const auto multiply = [weight = torch::ones({64, 64}, torch::kBFloat16)](int rows) {
    torch::mm(torch::ones({rows, 64}, torch::kBFloat16), weight);
  };
  for (int rows = 1; rows <= 200; ++rows) multiply(rows);
  const std::uint64_t before = resident_set();
  for (int rows = 201; rows <= 1200; ++rows) multiply(rows);
  EXPECT_LT(resident_set() - std::min(before, resident_set()), 64 * kMiB);
}

TEST(AttentionThatRan, IsNamed) {
  Trainee run(cases().front(), in_memory(1, 1.0));
  EXPECT_EQ(run.session.attention(), "");
  run.step(0);
  EXPECT_EQ(run.session.attention(), "blocks");
}

}  // namespace
}  // namespace tierflow::testing
