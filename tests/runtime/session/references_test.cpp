// DPO whose reference is the base: computed in the visits of a step, it is to the bit that of a pass before the first
// step.
#include <gtest/gtest.h>

#include "runtime/models/pair_batch.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 3;

// Two pairs a micro-batch; answers begin behind half of the row.
std::vector<MicroBatch> pairs(int count, int step) {
  std::vector<MicroBatch> all = batches(count, step);
  for (MicroBatch& batch : all) {
    batch.ids = torch::cat({batch.ids, batch.ids.flip(1)});
    batch.labels = torch::cat({batch.labels, batch.labels.flip(1)});
    batch.labels.narrow(1, 0, 8).fill_(-100);
  }
  return all;
}

SessionOptions of_pairs(SessionOptions options, bool base_is_reference) {
  options.micro_batch = 4;
  options.loss = {.kind = LossKind::dpo, .beta = 0.5, .base_is_reference = base_is_reference};
  return options;
}

Model adapted(const Case& which, const AdapterConfig& config) {
  return with_adapters(plain_model(which), config, 5);
}

struct Course {
  std::vector<double> losses, held_out, references;
  std::vector<std::vector<float>> masters;
  std::uint64_t peak = 0, budget = 0;
  std::int64_t computed_again = 0;
};

void note(std::vector<double>& all, const std::vector<double>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// Where each batch brings its reference, it is what the session finds before its first step.
Course trained(const Model& model, const SessionOptions& options) {
  Session session(model, options);
  std::vector<std::vector<MicroBatch>> steps;
  for (int step = 0; step <= kSteps; ++step) {  // the last are held out
    steps.push_back(pairs(options.micro_batches, step));
    if (options.loss.base_is_reference) continue;
    session.evaluate(
        options.micro_batches, [&](std::int64_t index) { return steps.back()[index]; },
        [&](std::int64_t index, const MicroBatch& batch, const HeadScores& scores) {
          steps.back()[index].reference = row_log_probabilities(batch, scores.losses);
        });
  }
  Course run;
  for (int step = 0; step < kSteps; ++step) {
    const StepResult result = session.step(steps[step], 1e-2);
    run.losses.push_back(result.loss);
    run.computed_again += result.computed_again;
  }
  session.evaluate(
      options.micro_batches, [&](std::int64_t index) { return steps.back()[index]; },
      [&](std::int64_t index, const MicroBatch& batch, const HeadScores& scores) {
        note(run.held_out, row_log_probabilities(batch, scores.losses));
        note(run.references, options.loss.base_is_reference ? row_log_probabilities(batch, scores.reference_losses)
                                                            : steps.back()[index].reference);
      });
  run.masters = masters_of(session);
  run.peak = session.memory().device_peak;
  run.budget = session.memory().device_budget;
  return run;
}

void expect_same(const Course& found, const Course& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.references, expected.references);
  EXPECT_EQ(found.held_out, expected.held_out);
  EXPECT_NE(found.held_out, found.references);  // it has learned
  EXPECT_TRUE(found.masters == expected.masters);
}

const AdapterConfig kPlain{.rank = 4, .alpha = 8};

class References : public ::testing::TestWithParam<Case> {
 protected:
  const Folder folder_;
};

TEST_P(References, OfTheVisitAreThoseOfAPassBefore) {
  const Model model = adapted(GetParam(), kPlain);
  const Course expected = trained(model, of_pairs(resident(2), false));
  expect_same(trained(model, of_pairs(resident(2), true)), expected);
  SessionOptions small = streamed(resident(2), folder_);
  small.chaos_seed = 7;
  expect_same(trained(model, of_pairs(small, true)), expected);
}

INSTANTIATE_TEST_SUITE_P(Models, References, ::testing::ValuesIn(cases()), case_name);

TEST(ReferencesOfAdapters, ThatBeginWithTheBasesFactorsAndWithMagnitudes) {
  AdapterConfig pissa = kPlain, dora = kPlain;
  pissa.init = AdapterInit::pissa;
  dora.dora = true;
  for (const AdapterConfig& config : {pissa, dora}) {
    const Model model = adapted(case_called("llama"), config);
    expect_same(trained(model, of_pairs(resident(2), true)), trained(model, of_pairs(resident(2), false)));
  }
}

TEST(ReferencesOfAdapters, InTheLeastDeviceMemoryOverABaseInFourBits) {
  const Model model = with_base_format(adapted(case_called("llama"), kPlain), WeightFormat::nf4);
  SessionOptions least = of_pairs(resident(4), true);
  const Course expected = trained(model, of_pairs(resident(4), false));
  least.device_memory = 1;
  try {
    const Session refused(model, least);
  } catch (const Exception& error) {
    const std::string said = "the smallest that works is ", text = error.what();
    least.device_memory = std::stoull(text.substr(text.find(said) + said.size())) * 1024;
  }
  const Course found = trained(model, least);
  expect_same(found, expected);
  EXPECT_LE(found.peak, found.budget);
  EXPECT_EQ(found.computed_again, 0);
}

TEST(ReferencesOfAdapters, AreRefusedWhereTheBaseIsTrainedOrNothingTakesThem) {
  const Case& which = case_called("llama");
  const auto refused = [](const Model& model, const SessionOptions& options) {
    expect_refusal(io::ErrorKind::usage, {"a reference that is the base is for dpo with adapters"},
                   [&] { const Session session(model, options); });
  };
  refused(plain_model(which), of_pairs(resident(2), true));
  AdapterConfig saving = kPlain;
  saving.saved = {"lm_head"};
  refused(adapted(which, saving), of_pairs(resident(2), true));
  SessionOptions simpo = of_pairs(resident(2), true);
  simpo.loss.kind = LossKind::simpo;
  refused(adapted(which, kPlain), simpo);
}

}  // namespace
}  // namespace tierflow::testing
