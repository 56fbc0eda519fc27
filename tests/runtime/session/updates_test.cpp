// When and where updates run: whichever share waits for the next forward, and whichever runs on the device, the run has
// the bits of the one in which none does.
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/device/device_memory.h"
#include "runtime/session/session.h"
#include "tests/runtime/session/fixture.h"
#include "tests/runtime/session/spoiling_model.h"

namespace tierflow::testing {
namespace {

struct Outcome {
  std::vector<double> losses, norms;
  double evaluated_between = 0;
  std::vector<std::vector<float>> masters;
  bool operator==(const Outcome&) const = default;
};

// Five steps with a learning rate of their own each, an evaluation after the second, and a third whose loss is not
// finite.
Outcome run(const Case& which, const SessionOptions& options) {
  auto model = std::make_shared<Spoiling>(make_model(parse_model_spec(which.json, which.name)));
  Session session({model, [](const TensorSpec& tensor, std::uint64_t first,
                             std::span<float> out) { initial_values(tensor, 11, first, out); }},
                  options, {.weight_decay = 0.1});
  EXPECT_EQ(session.plan().device_updated_parameters != 0, options.device_update_share != 0);
  Outcome outcome;
  for (int step = 0; step < 5; ++step) {
    model->spoiled_loss = step == 2;
    const StepResult result = session.step(batches(options.micro_batches, step), 1e-3 * (1 + step));
    EXPECT_EQ(result.skipped, step == 2);
    if (step != 2) outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
    if (step == 1) outcome.evaluated_between = session.evaluate(batches(2, 77)).loss;
  }
  EXPECT_EQ(session.skipped_steps(), 1U);
  outcome.masters = masters_of(session);
  return outcome;
}

SessionOptions unclipped(int micro_batches, double share) {
  DeviceMemory::install();
  SessionOptions options = resident(micro_batches);
  options.clip.reset();
  options.deferred_share = share;
  return options;
}

class Deferred : public ::testing::TestWithParam<Case> {};

TEST_P(Deferred, EveryShareHasTheSameBits) {
  const Folder folder;
  const Outcome expected = run(GetParam(), unclipped(2, 0));
  ASSERT_FALSE(expected.masters.empty());
  for (const double share : {0.5, 1.0}) {
    SCOPED_TRACE(share);
    EXPECT_TRUE(run(GetParam(), unclipped(2, share)) == expected);
    SessionOptions small = streamed(unclipped(2, share), folder);
    EXPECT_TRUE(run(GetParam(), small) == expected);
    small.engine = io::EngineKind::threads;
    for (const std::uint64_t seed : {5, 6}) {
      small.chaos_seed = seed;
      EXPECT_TRUE(run(GetParam(), small) == expected) << "chaos " << seed;
    }
  }
}

std::vector<Case> some() {
  std::vector<Case> chosen;
  for (const Case& which : cases("0.1"))
    if (which.name == "llama" || which.name == "gpt2") chosen.push_back(which);
  return chosen;
}
INSTANTIATE_TEST_SUITE_P(Models, Deferred, ::testing::ValuesIn(some()), case_name);

TEST(Deferred, EveryPrecisionHasTheSameBits) {
  const Folder folder;
  for (const Precision precision : {Precision::fp32_master_adam32, Precision::bf16_sr_adam8}) {
    SessionOptions at_once = unclipped(1, 0), half = unclipped(1, 0.5);
    at_once.precision = half.precision = precision;
    EXPECT_TRUE(run(cases().front(), streamed(half, folder)) == run(cases().front(), at_once));
  }
}

class UpdatedOnDevice : public ::testing::TestWithParam<Case> {};

// Clipped and not, in memory and streamed, at once and in the next forward.
TEST_P(UpdatedOnDevice, HasTheBitsOfTheHost) {
  const Folder folder;
  for (const bool clipped : {true, false}) {
    SessionOptions options = unclipped(2, 0);
    if (clipped) options.clip = 0.05;
    const Outcome expected = run(GetParam(), options);
    for (const double share : {0.5, 1.0}) {
      SCOPED_TRACE(::testing::Message() << "clipped " << clipped << ", on the device " << share);
      options.device_update_share = share;
      options.deferred_share = 1 - share;
      EXPECT_TRUE(run(GetParam(), options) == expected);
      SessionOptions small = streamed(options, folder);
      small.device_memory += 4 * kMiB;
      EXPECT_TRUE(run(GetParam(), small) == expected);
      for (const std::uint64_t seed : {5, 6}) {
        small.chaos_seed = seed;
        EXPECT_TRUE(run(GetParam(), small) == expected) << "chaos " << seed;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Models, UpdatedOnDevice, ::testing::ValuesIn(some()), case_name);

TEST(UpdatedOnDevice, EveryPrecisionHasTheBitsOfTheHost) {
  const Folder folder;
  for (const Precision precision : {Precision::fp32_master_adam32, Precision::bf16_sr_adam8})
    for (const bool clipped : {true, false}) {
      SessionOptions host = unclipped(1, 0);
      host.precision = precision;
      if (clipped) host.clip = 0.05;
      SessionOptions device = streamed(host, folder);
      device.device_memory += 4 * kMiB;
      device.device_update_share = 1;
      EXPECT_TRUE(run(cases().front(), device) == run(cases().front(), host));
    }
}

// From the second step on, of what is updated on a device that holds every word, state alone is uploaded; of what is
// not, words.
TEST(UpdatedOnDevice, WordsThatLieThereAreNotUploaded) {
  for (const bool clipped : {true, false})
    for (const double share : {0.0, 0.5, 1.0}) {
      SessionOptions options = unclipped(1, 0);
      if (clipped) options.clip = 0.05;
      options.device_update_share = share;
      Session session({make_model(parse_model_spec(cases().front().json, "llama")),
                       [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                         initial_values(tensor, 11, first, out);
                       }},
                      options);
      const auto uploaded = [&] { return session.lanes()[static_cast<int>(swap::Lane::upload)].bytes; };
      session.step(batches(1, 0));
      session.step(batches(1, 1));
      const std::uint64_t before = uploaded();
      session.step(batches(1, 2));
      std::uint64_t expected = 0;
      const swap::Arrangement& at = session.plan().arrangement;
      for (const swap::Chunk& chunk : session.plan().layout->chunks())
        if (chunk.trainable)
          expected += at.on_device[chunk.id] ? chunk.state_bytes + (at.deferred[chunk.id] ? chunk.word_bytes() : 0)
                                             : chunk.word_bytes();
      EXPECT_EQ(uploaded() - before, expected) << clipped << share;  // of what was deferred gradients, too
    }
}

// The comparisons above are of runs that do update on the device: what the plan says, and what the lanes moved.
TEST(UpdatedOnDevice, StateCrossesTheLinkAndGradientsStay) {
  const auto moved = [](const SessionOptions& options) {
    Session session({make_model(parse_model_spec(cases().front().json, "llama")),
                     [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                       initial_values(tensor, 11, first, out);
                     }},
                    options);
    session.step(batches(1, 0));
    session.evaluate(batches(1, 0));
    const auto lanes = session.lanes();
    EXPECT_EQ(session.plan().device_updated_parameters != 0, options.device_update_share != 0);
    return std::pair{lanes[static_cast<int>(swap::Lane::upload)].bytes, session.plan().packed.trainable_parameters};
  };
  SessionOptions options = unclipped(1, 0);
  const auto [host, parameters] = moved(options);
  options.device_update_share = 1;
  const auto [device, same] = moved(options);
  EXPECT_EQ(parameters, same);
  // lo words and two moments, of all but the embedding.
  EXPECT_GT(device, host + 2 * parameters);
  // A device without room for the slots updates on the host.
  options.device_memory = 1;
  try {
    moved(options);
  } catch (const Exception& error) {
    const std::string said = "the smallest that works is ", text = error.what();
    options.device_memory = std::stoull(text.substr(text.find(said) + said.size())) * 1024;
  }
  const Session smallest({make_model(parse_model_spec(cases().front().json, "llama")),
                          [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                            initial_values(tensor, 11, first, out);
                          }},
                         options);
  EXPECT_EQ(smallest.plan().device_updated_parameters, 0U);
}

// Some wait and some do not, and what is written in a step is what was said before it.
TEST(Deferred, AShareWaitsAndItsWritesAreCounted) {
  const Folder folder;
  for (const double share : {0.0, 0.5, 1.0}) {
    SessionOptions options = streamed(unclipped(1, share), folder);
    options.keep_store = true;
    auto model = make_model(parse_model_spec(cases().front().json, "llama"));
    std::uint64_t expected = 0;
    {
      Session session({std::shared_ptr<LayeredModel>(std::move(model)),
                       [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                         initial_values(tensor, 11, first, out);
                       }},
                      options);
      const SessionPlan& plan = session.plan();
      EXPECT_NEAR(static_cast<double>(plan.deferred_parameters) / static_cast<double>(plan.packed.trainable_parameters),
                  share, 0.2);
      EXPECT_EQ(plan.writes.gradients != 0, share != 0);
      EXPECT_EQ(plan.writes.deferred, share == 1 ? plan.writes.update : plan.writes.deferred);
      session.step(batches(1, 0));
      expected = session.bytes_written_after_next_step();
      session.step(batches(1, 1));
      session.commit();
      // A commit writes its manifest besides.
      EXPECT_GE(session.bytes_written(), expected);
      EXPECT_LT(session.bytes_written(), expected + 64 * 1024);
    }
    export_store(options.storage, folder.path / "out");
    EXPECT_TRUE(std::filesystem::exists(folder.path / "out" / "config.json"));
    std::filesystem::remove_all(folder.path);
  }
}

// Without clipping a gradient that is not finite ends the run, whether its update waits or not.
TEST(Deferred, AGradientThatIsNotFiniteEndsTheRun) {
  for (const double share : {0.0, 0.5, 1.0})
    for (const int stage : {0, 1, 2}) {
      SessionOptions options = unclipped(1, share);
      options.device_update_share = stage == 1 ? 1 : 0;
      auto model = std::make_shared<Spoiling>(make_model(parse_model_spec(cases().front().json, "llama")));
      Session session({model, [](const TensorSpec& tensor, std::uint64_t first,
                                 std::span<float> out) { initial_values(tensor, 11, first, out); }},
                      options);
      session.step(batches(1, 0));
      model->spoiled_stage = stage;
      try {
        session.step(batches(1, 1));
        FAIL() << "the step was to fail";
      } catch (const Exception& error) {
        EXPECT_EQ(error.error().kind, io::ErrorKind::numeric);
        EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos) << error.what();
      }
      EXPECT_FALSE(session.intact());
    }
}

}  // namespace
}  // namespace tierflow::testing
