// Steps whose updates run ahead of the norm that may clip them. Whether they stand or are undone, whatever is resident
// and wherever a run breaks off, it has the bits of the run in which every update waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "runtime/device/device_memory.h"
#include "tests/runtime/session/fixture.h"
#include "tests/runtime/session/spoiling_model.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 8, kSpoiledGradient = 3, kSpoiledLoss = 5;

// One that also fails when a test says so.
class Failing final : public Spoiling {
 public:
  using Spoiling::Spoiling;
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    if (stage == 1 && calls_left > 0 && --calls_left == 0) throw std::runtime_error("broken off");
    return Spoiling::forward(stage, weights, carry, shared, training);
  }

  mutable int calls_left = 0;  // of the forward of stage 1, until one fails; 0: none does
};

struct Outcome {
  std::vector<double> losses;  // those of a step that is not finite apart
  std::vector<double> norms;
  std::vector<bool> skipped;
  double evaluated_between = 0;
  std::vector<std::vector<float>> masters;
  bool operator==(const Outcome&) const = default;
};

struct Counted {
  int staged = 0, speculative = 0, undone = 0;
};

SessionOptions far_from_the_clip(const Folder& folder, Speculation speculation) {
  SessionOptions options = streamed(resident(1), folder);
  options.clip = 1e9;
  options.commit_every = 1;
  options.speculation = speculation;
  return options;
}

std::shared_ptr<Failing> model_of(const Case& which) {
  return std::make_shared<Failing>(make_model(parse_model_spec(which.json, which.name)));
}
WeightSource first_values() {
  return [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial_values(tensor, 11, first, out);
  };
}

void train(Session& session, Failing& model, const SessionOptions& options, int up_to, Outcome& outcome,
           Counted& counted) {
  while (session.steps() < up_to) {
    const int step = static_cast<int>(session.steps());
    outcome.losses.resize(std::min<std::size_t>(outcome.losses.size(), step));
    outcome.norms.resize(std::min<std::size_t>(outcome.norms.size(), step));
    outcome.skipped.resize(std::min<std::size_t>(outcome.skipped.size(), step));
    model.spoiled_stage = step == kSpoiledGradient ? 1 : -1;
    model.spoiled_loss = step == kSpoiledLoss;
    const std::uint64_t most = session.bytes_written_after_next_step();
    const StepResult result = session.step(batches(options.micro_batches, step), 1e-3 * (1 + step));
    EXPECT_LE(session.bytes_written(), most);
    outcome.losses.push_back(std::isfinite(result.loss) ? result.loss : 0);
    outcome.norms.push_back(std::isfinite(result.grad_norm) ? result.grad_norm : 0);
    outcome.skipped.push_back(result.skipped);
    counted.staged += result.clipping == Clipping::staged ? 1 : 0;
    counted.speculative += result.clipping == Clipping::speculative ? 1 : 0;
    counted.undone += result.clipping == Clipping::undone ? 1 : 0;
    if (step == 1) outcome.evaluated_between = session.evaluate(batches(2, 77)).loss;
  }
}

Outcome run(const Case& which, const SessionOptions& options, Counted* counted = nullptr) {
  const auto model = model_of(which);
  Session session({model, first_values()}, options, {.weight_decay = 0.1});
  Outcome outcome;
  Counted here;
  train(session, *model, options, kSteps, outcome, here);
  EXPECT_EQ(session.skipped_steps(), 2U);
  outcome.masters = masters_of(session);
  session.discard();
  if (counted != nullptr) *counted = here;
  return outcome;
}

class Speculative : public ::testing::TestWithParam<Case> {
 protected:
  Speculative() { DeviceMemory::install(); }

  // Some of the norms are above it.
  double clip() const {
    SessionOptions options = resident(2);
    options.clip = 1e9;
    std::vector<double> norms = run(GetParam(), options).norms;
    std::erase(norms, 0.0);
    std::ranges::sort(norms);
    return norms[norms.size() / 2] * 1.0001;
  }
  SessionOptions staged(double clip) const {
    SessionOptions options = resident(2);
    options.clip = clip;
    return options;
  }
  SessionOptions speculative(double clip) const {
    SessionOptions options = streamed(staged(clip), folder_);
    options.commit_every = 1;
    options.speculation = Speculation::always;
    options.fresh = true;
    return options;
  }

  const Folder folder_;
};

TEST_P(Speculative, HasTheBitsOfAStagedRun) {
  const double norm = clip();
  const Outcome expected = run(GetParam(), staged(norm));
  int above = 0, below = 0;
  for (std::size_t step = 0; step < kSteps; ++step)
    if (!expected.skipped[step]) ++(expected.norms[step] > norm ? above : below);
  ASSERT_GT(above, 0);
  ASSERT_GT(below, 0);
  for (const std::uint64_t host : {150, 400, 64 * 1024}) {
    SessionOptions options = speculative(norm);
    options.host_memory = host * 1024;
    SCOPED_TRACE(host);
    Counted counted;
    EXPECT_TRUE(run(GetParam(), options, &counted) == expected);
    EXPECT_EQ(counted.staged, 0);
    // The one whose loss is not finite changed nothing that had to be undone.
    EXPECT_EQ(counted.speculative, below + 1);
    EXPECT_EQ(counted.undone, above + 1);
    if (host == 150) continue;  // the rounds of the test below have delays there
    options.engine = io::EngineKind::threads;
    options.commit_every = 3;
    options.chaos_seed = host;
    EXPECT_TRUE(run(GetParam(), options) == expected) << "chaos";
  }
}

TEST_P(Speculative, UpdatesOnTheDeviceHaveTheBitsOfTheHost) {
  const double norm = clip();
  const Outcome expected = run(GetParam(), staged(norm));
  for (const double share : {0.5, 1.0}) {
    SessionOptions options = speculative(norm);
    options.device_memory = 12 * kMiB;
    options.device_update_share = share;
    options.chaos_seed = 5;
    Counted counted;
    EXPECT_TRUE(run(GetParam(), options, &counted) == expected) << share;
    EXPECT_GT(counted.undone, 1);
  }
}

// Broken off anywhere, in a step that is done again as well, and gone on with under another budget.
TEST_P(Speculative, GoesOnAfterACrashWithTheSameBits) {
  const double norm = clip();
  const Outcome expected = run(GetParam(), staged(norm));
  Outcome seen;
  Counted counted;
  int broken_off = 0;
  for (int round = 0;; ++round) {
    SessionOptions options = speculative(norm);
    options.fresh = round == 0;
    options.resume = round > 0;
    if (round % 3 == 1) options.host_memory = 400 * 1024;
    if (round % 3 == 2) options.host_memory = 64 * kMiB;
    options.chunk_elements = 0;
    options.chaos_seed = round;
    const auto model = model_of(GetParam());
    Session session({model, first_values()}, options, {.weight_decay = 0.1});
    // Two micro-batches a pass, and an evaluation: in later rounds further on, in the first or the second pass.
    model->calls_left = round < 12 ? 1 + 3 * round : 0;
    try {
      train(session, *model, options, kSteps, seen, counted);
    } catch (const std::runtime_error&) {
      ++broken_off;
      continue;
    }
    seen.masters = masters_of(session);
    EXPECT_EQ(session.skipped_steps(), 2U);
    session.discard();
    break;
  }
  EXPECT_GT(broken_off, 3);
  EXPECT_GT(counted.undone, 2);
  EXPECT_TRUE(seen == expected);
}

INSTANTIATE_TEST_SUITE_P(Models, Speculative, ::testing::ValuesIn([] {
                           std::vector<Case> chosen;
                           for (const Case& which : cases("0.1"))
                             if (which.name == "llama" || which.name == "gpt2") chosen.push_back(which);
                           return chosen;
                         }()),
                         case_name);

TEST(Speculation, EveryPrecisionHasTheSameBits) {
  DeviceMemory::install();
  const Folder folder;
  for (const Precision precision : {Precision::fp32_master_adam32, Precision::bf16_sr_adam8}) {
    SessionOptions options = resident(1);
    options.precision = precision;
    options.clip = 0.5;
    const Outcome expected = run(cases().front(), options);
    SessionOptions small = streamed(options, folder);
    small.commit_every = 1;
    small.speculation = Speculation::always;
    Counted counted;
    EXPECT_TRUE(run(cases().front(), small, &counted) == expected);
    EXPECT_EQ(counted.staged, 0);
  }
}

// While a step is kept nothing but that is committed: steps are staged.
TEST(Speculation, WaitsWhileAStepIsKept) {
  DeviceMemory::install();
  const Folder folder;
  const auto model = model_of(cases().front());
  Session session({model, first_values()}, far_from_the_clip(folder, Speculation::always));
  const auto step = [&] { return session.step(batches(1, static_cast<int>(session.steps()))).clipping; };
  EXPECT_EQ(step(), Clipping::speculative);
  auto kept = session.keep_step();
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(step(), Clipping::speculative);  // it commits the one that is kept
  EXPECT_EQ(step(), Clipping::staged);
  EXPECT_EQ(step(), Clipping::staged);
  kept.reset();
  EXPECT_EQ(step(), Clipping::speculative);
  session.discard();
}

TEST(Speculation, BeginsAfterEightStepsThatDoNotClip) {
  DeviceMemory::install();
  const Folder folder;
  const auto model = model_of(cases().front());
  Session session({model, first_values()}, far_from_the_clip(folder, Speculation::likely));
  EXPECT_NE(session.describe().find("no update waits"), std::string::npos);
  for (int step = 0; step < 11; ++step)
    EXPECT_EQ(session.step(batches(1, step)).clipping, step < 8 ? Clipping::staged : Clipping::speculative) << step;
  session.discard();
}

}  // namespace
}  // namespace tierflow::testing
