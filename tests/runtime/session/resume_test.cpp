// A session that goes on with what another left has the bits of one that was never interrupted, under other budgets
// too, and refuses what is another run.
#include <gtest/gtest.h>

#include <fstream>

#include "runtime/base/exception.h"
#include "runtime/planning/moved_store.h"
#include "runtime/session/layers.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 6;

struct Steps {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
};

// frozen: every other tensor is not trained.
Model model_of(const Case& which, bool frozen = false) {
  ModelSpec spec = parse_model_spec(which.json, which.name);
  int tensors = 0;
  for (UnitSpec& unit : spec.units)
    for (TensorSpec& tensor : unit.tensors) tensor.trainable = !frozen || ++tensors % 2 == 0;
  return {make_model(std::move(spec)), initial(11)};
}
double rate(std::int64_t step) {
  return 1e-3 * static_cast<double>(1 + step);
}
void train(Session& session, const SessionOptions& options, std::int64_t up_to, Steps& seen) {
  while (session.steps() < up_to) {
    const auto step = session.steps();
    const StepResult result = session.step(batches(options.micro_batches, static_cast<int>(step)), rate(step));
    EXPECT_EQ(result.step, step + 1);
    seen.losses.resize(step);
    seen.norms.resize(step);
    seen.losses.push_back(result.loss);
    seen.norms.push_back(result.grad_norm);
    session.remember("after " + std::to_string(session.steps()));
  }
}
Steps uninterrupted(const Case& which, const SessionOptions& options, bool frozen = false) {
  Session session(model_of(which, frozen), options, {.weight_decay = 0.1});
  Steps all;
  train(session, options, kSteps, all);
  all.masters = masters_of(session);
  return all;
}

class Resume : public ::testing::TestWithParam<Case> {
 protected:
  SessionOptions small(bool clipped, double share) const {
    SessionOptions options = resident(2);
    if (!clipped) {
      options.clip.reset();
      options.deferred_share = share;
    }
    options = streamed(options, folder_);
    options.commit_every = 1;
    options.run = R"({"data":"a"})";
    return options;
  }
  const Folder folder_;
};

TEST_P(Resume, HasTheBitsOfARunThatWasNeverInterrupted) {
  for (const auto& [clipped, share] : {std::pair{true, 0.0}, std::pair{false, 0.0}, std::pair{false, 0.5}}) {
    SCOPED_TRACE(std::to_string(clipped) + " " + std::to_string(share));
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    const Steps expected = uninterrupted(GetParam(), options);
    Steps seen;
    options = small(clipped, share);
    // Each session is destroyed in the middle of what it does; the next has other budgets, engine and chaos.
    std::int64_t least = 0;
    for (int round = 0; round < 3; ++round) {
      SessionOptions with = options;
      with.resume = round > 0;
      with.engine = round == 1 ? io::EngineKind::threads : io::EngineKind::automatic;
      with.chaos_seed = round;
      if (round > 0) with.chunk_elements = 0;
      if (round == 1) with.host_memory = 300 * 1024;
      if (round == 2) with.host_memory = with.device_memory = 64 * kMiB;
      Session session(model_of(GetParam()), with, {.weight_decay = 0.1});
      const std::int64_t begun = session.steps();
      if (round > 0) {
        // The commit of a step runs beside the next one, and ends before that one's own: of three steps before, one at
        // least is there.
        EXPECT_GE(begun, least);
        EXPECT_EQ(session.remembered(), begun == 0 ? "" : "after " + std::to_string(begun));
      }
      train(session, with, round == 2 ? kSteps : begun + 3, seen);
      least = begun + 1;
      if (round == 2) {
        seen.masters = masters_of(session);
        session.discard();
      }
    }
    EXPECT_EQ(seen.losses, expected.losses);
    EXPECT_EQ(seen.norms, expected.norms);
    EXPECT_TRUE(seen.masters == expected.masters);
    EXPECT_FALSE(std::filesystem::exists(folder_.path / "state.tfv"));
  }
}
INSTANTIATE_TEST_SUITE_P(Models, Resume, ::testing::ValuesIn(cases("0.1")), case_name);

class Resumed : public Resume {};

TEST_P(Resumed, AfterACommitNothingIsDoneAgain) {
  const SessionOptions options = small(true, 0);
  Steps seen;
  {
    Session session(model_of(GetParam()), options);
    train(session, options, 3, seen);
    session.commit();
  }
  SessionOptions again = options;
  again.resume = true;
  {
    Session session(model_of(GetParam()), again);
    EXPECT_EQ(session.steps(), 3);
  }
  // Every other step, and the last by hand.
  again.commit_every = 2;
  {
    Session session(model_of(GetParam()), again);
    train(session, again, 6, seen);
  }
  const Session session(model_of(GetParam()), again);
  EXPECT_EQ(session.steps() % 2, 0);
  EXPECT_GE(session.steps(), 4);
}

TEST_P(Resumed, WhatIsFrozenStaysInItsPlace) {
  SessionOptions alone = resident(2);
  alone.clip.reset();
  const Steps expected = uninterrupted(GetParam(), alone, true);
  SessionOptions options = small(false, 0);
  Steps seen;
  for (int round = 0; round < 3; ++round) {
    Session session(model_of(GetParam(), true), options, {.weight_decay = 0.1});
    train(session, options, round == 2 ? kSteps : session.steps() + 2, seen);
    seen.masters = masters_of(session);
    options.resume = true;
  }
  EXPECT_EQ(seen.losses, expected.losses);
  EXPECT_TRUE(seen.masters == expected.masters);
}

TEST_P(Resumed, AnotherRunIsRefusedAndStays) {
  const SessionOptions options = small(true, 0);
  {
    Session session(model_of(GetParam()), options);
    Steps seen;
    train(session, options, 2, seen);
    session.commit();
  }
  const auto refused = [&](SessionOptions with, const Case& which, const char* names) {
    with.resume = true;
    try {
      const Session session(model_of(which), with);
      ADD_FAILURE() << "went on: " << names;
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
      EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
    }
  };
  SessionOptions other = options;
  other.run = R"({"data":"b"})";
  refused(other, GetParam(), "its run is not");
  other = options;
  other.precision = Precision::bf16_sr_adam8;
  refused(other, GetParam(), "its precision is not");
  for (const Case& which : cases("0.1"))
    if (which.name != GetParam().name) {
      refused(options, which, "its model is not");
      break;
    }
  other = options;
  other.resume = true;
  EXPECT_EQ(Session(model_of(GetParam()), other).steps(), 2);
}

TEST_P(Resumed, IsNeverTakenForSomethingElse) {
  SessionOptions options = small(true, 0);
  {
    const Session session(model_of(GetParam()), options);
    EXPECT_EQ(session.commit_every(), 1);
    EXPECT_NE(session.describe().find("every step is committed"), std::string::npos);
  }
  options.commit_every = 0;
  EXPECT_THROW(Session(model_of(GetParam()), options), Exception);
}
INSTANTIATE_TEST_SUITE_P(Models, Resumed, ::testing::Values(cases("0.1").front()), case_name);

// As a loop of one's own does it: whether there is something to go on with, and that it is of these layers.
TEST(ResumedLayers, GoOnAndAreNotTakenForOthers) {
  struct Plain : Layer {
    explicit Plain(std::int64_t width) { weight = register_parameter("weight", torch::ones({width, 8})); }
    Carry forward(const Carry&, const Shared& shared) override { return {(weight * shared.ids.sum()).sum()}; }
    torch::Tensor weight;
  };
  const auto model = [](std::int64_t width) {
    return Layers().repeat(2, "layer", [width] { return std::make_shared<Plain>(width); }).build();
  };
  const Folder folder;
  SessionOptions options = streamed(resident(1), folder);
  options.commit_every = 1;
  EXPECT_FALSE(can_resume(options));
  Session(model(4), options).commit();
  options.resume = can_resume(options);
  EXPECT_TRUE(options.resume);
  expect_refusal(io::ErrorKind::usage, {"its model is not"}, [&] { Session(model(5), options); });
  Session(model(4), options).discard();
  options.resume = can_resume(options);
  EXPECT_FALSE(options.resume);
}

}  // namespace
}  // namespace tierflow::testing
