// Optimizer state that stays on the device, and gradients that are measured there: whatever of them has room, the run
// has the bits of the one on the host, and nothing of the state crosses the link.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/planning/update_scratch.h"
#include "runtime/session/session.h"
#include "runtime/state/optimizer_work.h"
#include "tests/runtime/session/fixture.h"
#include "tests/runtime/session/spoiling_model.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 5;
constexpr auto kState = swap::ExtentKind::state;

struct Outcome {
  std::vector<double> losses, norms;
  double evaluated_between = 0;
  std::vector<std::vector<float>> masters;
  bool operator==(const Outcome&) const = default;
};

double rate(std::int64_t step) {
  return 1e-3 * static_cast<double>(1 + step);
}
std::shared_ptr<Spoiling> model_of(const Case& which) {
  return std::make_shared<Spoiling>(make_model(parse_model_spec(which.json, which.name)));
}

// Steps up to the last, the third with a loss that is not finite, and an evaluation behind the second.
void train(Session& session, Spoiling& model, const SessionOptions& options, std::int64_t up_to, Outcome& seen) {
  while (session.steps() < up_to) {
    const auto step = session.steps();
    model.spoiled_loss = step == 2;
    const StepResult result = session.step(batches(options.micro_batches, static_cast<int>(step)), rate(step));
    EXPECT_EQ(result.skipped, step == 2);
    seen.losses.resize(static_cast<std::size_t>(step));
    seen.norms.resize(static_cast<std::size_t>(step));
    seen.losses.push_back(step == 2 ? 0 : result.loss);
    seen.norms.push_back(result.grad_norm);
    if (step == 1) seen.evaluated_between = session.evaluate(batches(2, 77)).loss;
  }
}

enum class Stays : std::uint8_t { none, some, most };

Outcome run(const Case& which, const SessionOptions& options, Stays stays = Stays::none) {
  const auto model = model_of(which);
  Session session({model, initial(11)}, options, {.weight_decay = 0.1});
  const swap::Arrangement& at = session.plan().arrangement;
  const std::uint64_t kept = session.plan().device_state_parameters, all = session.plan().packed.trainable_parameters;
  EXPECT_EQ(at.measured_bytes != 0, options.uses_spare_device_memory.value_or(false));
  EXPECT_EQ(kept != 0, stays != Stays::none);
  if (stays == Stays::some) {
    EXPECT_LT(kept, all / 2);
  }
  if (stays == Stays::most) {
    EXPECT_GT(kept, all / 2);
  }
  Outcome outcome;
  train(session, *model, options, kSteps, outcome);
  EXPECT_LE(session.memory().device_peak, options.device_memory);
  outcome.masters = masters_of(session);
  return outcome;
}

SessionOptions on_host(bool clipped, double deferred = 0) {
  SessionOptions options = resident(2);
  options.deferred_share = deferred;
  options.clip = clipped ? std::optional(0.05) : std::nullopt;
  return options;
}

constexpr std::uint64_t kRoomStep = 64 * 1024;
// The smallest budget of the device, in such steps, with which some state stays there.
SessionOptions with_little_room(const Case& which, SessionOptions options) {
  const auto model = model_of(which);
  const auto has_room = [&](std::uint64_t steps) {
    options.device_memory = steps * kRoomStep;
    try {
      return Session({model, initial(11)}, options).plan().device_state_parameters != 0;
    } catch (const Exception&) {
      return false;  // too little for a step
    }
  };
  std::uint64_t too_little = 1, enough = 16 * kMiB / kRoomStep;
  while (enough - too_little > 1) {
    const std::uint64_t middle = (too_little + enough) / 2;
    (has_room(middle) ? enough : too_little) = middle;
  }
  EXPECT_TRUE(has_room(enough));
  return options;
}

class DeviceState : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceState, HasTheBitsOfTheHost) {
  const Folder folder;
  for (const auto& [clipped, deferred] : {std::pair{true, 0.0}, std::pair{false, 0.0}, std::pair{false, 0.5}}) {
    SCOPED_TRACE(::testing::Message() << "clipped " << clipped << ", deferred " << deferred);
    SessionOptions options = on_host(clipped, deferred);
    const Outcome expected = run(GetParam(), options);
    options.uses_spare_device_memory = true;
    EXPECT_TRUE(run(GetParam(), options, Stays::most) == expected);
    SessionOptions small = streamed(options, folder);
    small = with_little_room(GetParam(), small);
    EXPECT_TRUE(run(GetParam(), small, Stays::some) == expected);
    small.device_memory -= kRoomStep;
    EXPECT_TRUE(run(GetParam(), small) == expected) << "measured on the device alone";
    small.device_memory = options.device_memory;
    for (const std::uint64_t seed : {0, 5}) {
      small.chaos_seed = seed;
      EXPECT_TRUE(run(GetParam(), small, Stays::most) == expected) << "chaos " << seed;
    }
    small.device_update_share = 1;  // of what does not stay
    EXPECT_TRUE(run(GetParam(), small, Stays::most) == expected);
  }
}

// Each session is left in the middle of what it does; the next goes on with another budget of the device.
TEST_P(DeviceState, IsCommittedAndGoesOnUnderOtherBudgets) {
  const Folder folder;
  for (const bool clipped : {true, false}) {
    const Outcome expected = run(GetParam(), on_host(clipped));
    Outcome seen;
    std::int64_t least = 0;
    for (int round = 0; round < 4; ++round) {
      SessionOptions options = streamed(on_host(clipped), folder);
      options.commit_every = 1;
      options.resume = round > 0;
      options.chaos_seed = round;
      options.uses_spare_device_memory = round != 1;
      if (round != 1) options.device_memory = 64 * kMiB;
      if (round == 2) options.host_memory = 64 * kMiB;
      const auto model = model_of(GetParam());
      Session session({model, initial(11)}, options, {.weight_decay = 0.1});
      EXPECT_EQ(session.plan().device_state_parameters != 0, round != 1);
      EXPECT_GE(session.steps(), least);
      least = std::min<std::int64_t>(session.steps() + 1, kSteps - 1);
      train(session, *model, options, round == 3 ? kSteps : std::min<std::int64_t>(session.steps() + 2, kSteps), seen);
      if (round == 2) session.commit();
      if (round != 3) continue;
      seen.masters = masters_of(session);
      session.discard();
    }
    EXPECT_TRUE(seen == expected) << clipped;
  }
}

TEST_P(DeviceState, SpeculativeStepsAreUndoneThereToo) {
  const Folder folder;
  const Outcome expected = run(GetParam(), on_host(true));
  SessionOptions options = streamed(on_host(true), folder);
  options.device_memory = 64 * kMiB;
  options.commit_every = 1;
  options.speculation = Speculation::always;
  options.uses_spare_device_memory = true;
  EXPECT_TRUE(run(GetParam(), options, Stays::most) == expected);
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceState, ::testing::ValuesIn([] {
                           std::vector<Case> chosen;
                           for (const Case& which : cases("0.1"))
                             if (which.name == "llama" || which.name == "gpt2") chosen.push_back(which);
                           return chosen;
                         }()),
                         case_name);

TEST(DeviceState, EveryPrecisionHasTheBitsOfTheHost) {
  for (const Precision precision : {Precision::fp32_master_adam32, Precision::bf16_sr_adam8}) {
    SessionOptions options = on_host(true);
    options.precision = precision;
    const Outcome expected = run(cases().front(), options);
    options.uses_spare_device_memory = true;
    EXPECT_TRUE(run(cases().front(), options, Stays::most) == expected);
  }
}

// From the second step on only words go down: they have a place on the host. Of what the host updates, words go up and
// gradients down.
TEST(DeviceState, NeitherStateNorGradientCrossesTheLink) {
  for (const bool clipped : {true, false}) {
    SessionOptions options = on_host(clipped);
    options.uses_spare_device_memory = true;
    const auto model = model_of(cases().front());
    Session session({model, initial(11)}, options);
    const auto moved = [&](swap::Lane lane) { return session.lanes()[static_cast<int>(lane)].bytes; };
    session.step(batches(2, 0), 1e-3);
    session.step(batches(2, 1), 1e-3);
    const std::uint64_t up = moved(swap::Lane::upload), down = moved(swap::Lane::download);
    session.step(batches(2, 2), 1e-3);
    std::uint64_t expected_up = 0, expected_down = 0;
    const swap::Arrangement& at = session.plan().arrangement;
    for (const swap::Chunk& chunk : session.plan().layout->chunks()) {
      expected_down += chunk.word_bytes();
      if (at.device_place(kState, chunk.id) == swap::kNowhere) expected_up += chunk.word_bytes();
      EXPECT_EQ(at.state_resident[chunk.id], at.device_place(kState, chunk.id) == swap::kNowhere);
    }
    EXPECT_EQ(moved(swap::Lane::upload) - up, expected_up) << clipped;
    EXPECT_EQ(moved(swap::Lane::download) - down, expected_down) << clipped;
  }
}

// What a gradient's copy brings is taken as it is: neither measuring nor updating looks for it again.
TEST(DeviceState, AGradientMeasuredThereIsNotReadForIt) {
  const Session session({model_of(cases().front()), initial(11)}, on_host(true));
  const swap::Layout& layout = *session.plan().layout;
  const swap::Chunk& chunk = layout.chunks().front();
  const auto device = swap::open_cpu_device();
  UpdateThreads threads(1);
  std::vector<std::uint16_t> gradient(chunk.elements, 0x3f80);  // ones
  for (const std::uint16_t last : {0x3f80, 0x7f80, 0x7fc0}) {
    gradient.back() = last;
    OptimizerWork work(session.plan().packed, layout, threads, std::vector<bool>(layout.chunks().size()), true, {}, {},
                       0, 3);
    std::vector<std::byte> found(measured_bytes(layout), std::byte{0xff});
    work.enqueue_measuring(chunk, *device, swap::StreamId::round, gradient.data(), found.data());
    EXPECT_FALSE(device->synchronize(device->record(swap::StreamId::round)));
    EXPECT_FALSE(work.take_measured(chunk, found));
    EXPECT_FALSE(work.measure(chunk, {}));
    EXPECT_EQ(work.finite(), last == 0x3f80);
    if (work.finite()) {
      EXPECT_EQ(work.gradient_norm(), std::sqrt(static_cast<double>(chunk.elements)));
    }
  }
}

// A host without room for the state, and no storage: the device has it.
TEST(DeviceState, TheHostNeedsNoRoomForIt) {
  const auto least = [](SessionOptions options) {
    options.host_memory = 1;
    try {
      const Session refused({model_of(cases().front()), initial(11)}, options);
    } catch (const Exception& error) {
      const std::string said = "the smallest that works is ", text = error.what();
      return std::stoull(text.substr(text.find(said) + said.size())) * 1024;
    }
    return 0ULL;
  };
  SessionOptions options = on_host(true);
  const auto host = least(options);
  options.uses_spare_device_memory = true;
  options.host_memory = least(options);
  EXPECT_LT(options.host_memory, host);
  EXPECT_TRUE(run(cases().front(), options, Stays::most) == run(cases().front(), on_host(true)));
}

// What a store has after a commit is the same, and so is what is exported of it.
TEST(DeviceState, AnExportHasTheSameBits) {
  const Folder folder;
  const auto weights = [&](bool there) {
    SessionOptions options = streamed(on_host(true), folder);
    options.keep_store = true;
    if (there) options.uses_spare_device_memory = true;
    if (there) options.device_memory = 64 * kMiB;
    {
      Session session({model_of(cases().front()), initial(11)}, options);
      EXPECT_EQ(session.plan().device_state_parameters != 0, there);
      session.step(batches(2, 0), 1e-3);
      session.step(batches(2, 1), 1e-3);
      session.commit();
    }
    const std::filesystem::path out = folder.path / "out";
    std::filesystem::remove_all(out);
    export_store(options.storage, out);
    std::ifstream file(out / "model.safetensors", std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    std::filesystem::remove_all(folder.path);
    return bytes;
  };
  const std::string expected = weights(false);
  EXPECT_FALSE(expected.empty());
  EXPECT_TRUE(weights(true) == expected);
}

}  // namespace
}  // namespace tierflow::testing
