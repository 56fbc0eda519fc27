// When steps that clip are speculative: the rule of norms, and what the clock and the drives say.
#include "runtime/planning/speculation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/planning/prediction.h"
#include "runtime/spec/stage_class.h"

namespace tierflow {
namespace {

TEST(NormHistory, IsLikelyAfterEightSmallNorms) {
  NormHistory norms(2.0);
  for (int step = 0; step < kNormsSeen; ++step) {
    EXPECT_FALSE(norms.likely()) << step;
    norms.add(1.5, false);
  }
  EXPECT_TRUE(norms.likely());
  norms.add(1.6, false);  // below the clip, and too near
  for (int step = 1; step < kNormsSeen; ++step) {
    EXPECT_FALSE(norms.likely()) << step;
    norms.add(0.1, false);
  }
  EXPECT_FALSE(norms.likely());
  norms.add(0.1, false);
  for (int step = 0; step < 40; ++step) {
    EXPECT_TRUE(norms.likely()) << step;
    norms.add(0.1, false);
  }
  norms.add(NAN, false);
  EXPECT_FALSE(norms.likely());
}

TEST(NormHistory, WaitsSixteenStepsAfterAnUndoneOne) {
  NormHistory norms(1.0);
  for (int step = 0; step < kNormsSeen; ++step) norms.add(0.1, false);
  norms.add(7.0, true);
  for (int step = 0; step < kStepsAfterUndoing; ++step) {
    EXPECT_FALSE(norms.likely()) << step;
    norms.add(0.1, false);
  }
  EXPECT_TRUE(norms.likely());
}

// A drive that is the limit: blocks of 4M parameters whose gradients would be written and read again.
class Chosen : public ::testing::Test {
 protected:
  Chosen() {
    for (int stage = 0; stage < static_cast<int>(spec_.stages.size()); ++stage)
      profile_.model.stages[stage_class(spec_, stage)] = {
          .carry_bytes = 8192, .seconds = {.forward = 10e-3, .backward = 20e-3, .head = 30e-3, .evaluate = 10e-3}};
    profile_.model.stage_peak = profile_.model.held_peak = 1 << 20;
    profile_.model.micro_batch_bytes = 1 << 16;
    profile_.machine.rates = {
        .disk_read = 1e9, .disk_write = 1e9, .upload = 10e9, .download = 10e9, .cast = 10e9, .compute_on_cores = false};
  }
  Placement choose() { return choose_placement(spec_, options_, profile_); }
  void expect_staged(const char* because) {
    const Placement placement = choose();
    EXPECT_EQ(options_.speculation, Speculation::never);
    EXPECT_FALSE(placement.plan.speculates);
    EXPECT_NE(placement.staged_because.find(because), std::string::npos) << placement.staged_because;
  }

  ModelSpec spec_ = parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":512,)"
      R"("intermediate_size":2048,"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":12})",
      "config.json");
  SessionOptions options_{.device_memory = 256 << 20,
                          .host_memory = 24 << 20,
                          .storage = {"somewhere"},
                          .commit_every = 1,
                          .commit_auto = true};
  Profile profile_;
};

TEST_F(Chosen, WhereGradientsWouldGoToTheDrive) {
  const Placement placement = choose();
  EXPECT_EQ(options_.speculation, Speculation::likely);
  EXPECT_TRUE(placement.plan.speculates);
  EXPECT_EQ(placement.staged_because, "");
  ASSERT_TRUE(placement.step_seconds_speculative);
  EXPECT_LT(*placement.step_seconds_speculative, 0.9 * placement.prediction.step_seconds);
  const SessionPlan plan = plan_session(spec_, options_, profile_.model.needs(spec_));
  EXPECT_TRUE(plan.speculates);
  EXPECT_NO_THROW(prove(plan, true));
  // As long as a step that does not clip, whose budgets are as large and which commits too.
  const double unclipped = *step_seconds_unclipped(spec_, options_, profile_);
  EXPECT_LT(*placement.step_seconds_speculative, 1.1 * unclipped);
}

TEST_F(Chosen, NeverWithoutAStateToGoBackTo) {
  options_.commit_every = 0;
  options_.commit_auto = false;
  expect_staged("no second copy");
  EXPECT_FALSE(choose().step_seconds_speculative);
}

// Everything is resident: a commit after every step would write all of it.
TEST_F(Chosen, NeverWhereTheDriveWouldBeWrittenMore) {
  options_.host_memory = 2ULL << 30;
  expect_staged("would write");
}

TEST_F(Chosen, NotWhereItIsNoFaster) {
  profile_.machine.rates.disk_read = profile_.machine.rates.disk_write = 0;  // at once
  expect_staged("not faster");
  EXPECT_TRUE(choose().step_seconds_speculative);
}

TEST_F(Chosen, NotWithoutClipping) {
  options_.clip.reset();
  const Placement placement = choose();
  EXPECT_EQ(options_.speculation, Speculation::never);
  EXPECT_EQ(placement.staged_because, "");
}

}  // namespace
}  // namespace tierflow
