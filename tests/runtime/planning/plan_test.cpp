// Planning without torch: which stages count as one, and what the cache gives back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>

#include "runtime/base/files.h"
#include "runtime/planning/break_even.h"
#include "runtime/planning/prediction.h"
#include "runtime/planning/profile.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/stage_class.h"
#include "support/temp_dir.h"

namespace tierflow {
namespace {

ModelSpec spec_of(int layers, const Tiling& tiling = {}) {
  return parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":64,)"
      R"("intermediate_size":96,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":)" +
          std::to_string(layers) + "}",
      "config.json", tiling);
}

std::set<std::string> classes(const ModelSpec& spec) {
  std::set<std::string> all;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) all.insert(stage_class(spec, stage));
  return all;
}

TEST(StageClass, DepthDoesNotMatterAndTilesOfOtherInputsDiffer) {
  EXPECT_EQ(classes(spec_of(2)), classes(spec_of(40)));
  EXPECT_EQ(classes(spec_of(2)).size(), 3U);
  const ModelSpec tiled = spec_of(2, {.vocabulary_elements = 128 * 64, .block_elements = 1000});
  // Embedding tiles: the first has no input. Head tiles: the first follows the norm; the last gives the loss.
  EXPECT_EQ(classes(tiled).size(), 2U + 2U + 1U + 2U + 1U);
}

ModelProfile profile_of(const ModelSpec& spec) {
  ModelProfile profile{.stage_peak = 1 << 20, .micro_batch_bytes = 1 << 16, .held_peak = 1 << 20};
  for (const std::string& name : classes(spec))
    profile.stages[name] = {.carry_bytes = 8192,
                            .seconds = {.forward = 1e-3, .backward = 2e-3, .head = 4e-3, .evaluate = 1e-3}};
  return profile;
}

Profile on_any_machine(const ModelProfile& model) {
  Profile profile;
  profile.model = model;
  return profile;
}

TEST(ProfileCache, GivesBackWhatItKeptForTheSameMachineModelAndBuildAlone) {
  const testing::TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  int warnings = 0;
  const auto warn = [&](const std::string&) { ++warnings; };
  const ModelSpec spec = spec_of(2);
  const SessionOptions options{.storage = {folder.path()}};
  const ProfileCache cache(spec, options, "build", warn);
  EXPECT_FALSE(cache.machine() || cache.model());
  MachineProfile machine{.rates = {.disk_read = 3e9, .cast = 0.1, .cores = 8, .threads = 4},
                         .update = {{"p", 1e9 / 3}},
                         .device_update = {{"p", 1e10 / 3}},
                         .readings = {.spread = 0.25, .other_cores = 1.5, .corrected = true}};
  cache.keep(machine);
  ModelProfile narrow = profile_of(spec);
  narrow.width = 0.25;
  narrow.seconds_allowed = 60;
  narrow.readings = {.spread = 0.125, .other_cores = 0.5};
  cache.keep(narrow);
  ASSERT_TRUE(cache.machine() && cache.model());
  EXPECT_EQ(cache.machine()->rates.cast, 0.1);
  EXPECT_EQ(cache.machine()->rates.threads, 4);
  EXPECT_EQ(cache.machine()->update, machine.update);
  EXPECT_EQ(cache.machine()->device_update, machine.device_update);
  EXPECT_EQ(cache.machine()->readings.spread, 0.25);
  EXPECT_EQ(cache.machine()->readings.other_cores, 1.5);
  EXPECT_TRUE(cache.machine()->readings.corrected);
  EXPECT_EQ(cache.model()->width, 0.25);
  EXPECT_EQ(cache.model()->seconds_allowed, 60);
  EXPECT_EQ(cache.model()->readings.spread, 0.125);
  EXPECT_FALSE(cache.model()->readings.corrected);
  EXPECT_TRUE(ProfileCache(spec_of(40), options, "build", warn).model()->covers(spec_of(40)));

  EXPECT_FALSE(ProfileCache(spec, options, "other", warn).machine());
  SessionOptions threads = options, longer = options, larger = options;
  threads.update_threads = 3;
  longer.sequence_length = 1024;
  larger.host_memory = std::uint64_t{1} << 30;  // in larger chunks
  EXPECT_FALSE(ProfileCache(spec, larger, "build", warn).machine());
  EXPECT_TRUE(ProfileCache(spec, larger, "build", warn).model());
  EXPECT_FALSE(ProfileCache(spec, threads, "build", warn).machine());
  EXPECT_FALSE(ProfileCache(spec, longer, "build", warn).model());
  EXPECT_TRUE(ProfileCache(spec, longer, "build", warn).machine());
  EXPECT_EQ(warnings, 0);
}

// A file under the right name whose key or version is another's is as good as none.
TEST(ProfileCache, BelievesNoFileOfAnotherKeyOrVersion) {
  const testing::TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  int warnings = 0;
  const auto warn = [&](const std::string&) { ++warnings; };
  const ModelSpec spec = spec_of(2);
  const SessionOptions options{.storage = {folder.path()}};
  const ProfileCache one(spec, options, "one", warn), other(spec, options, "other", warn);
  one.keep(MachineProfile{.rates = {.disk_read = 1}});
  const auto only_file = [&] { return std::filesystem::directory_iterator(folder.path() / "tierflow")->path(); };
  const std::filesystem::path of_one = only_file();
  const std::string content = read_text(of_one, 1 << 20);
  std::filesystem::remove(of_one);
  other.keep(MachineProfile{.rates = {.disk_read = 2}});
  ASSERT_TRUE(other.machine());
  const std::filesystem::path of_other = only_file();
  ASSERT_NE(of_other, of_one);
  std::ofstream(of_other) << content;
  EXPECT_FALSE(other.machine());
  std::ofstream(of_one) << content;
  ASSERT_TRUE(one.machine());
  const std::string version = "\"version\":";
  ASSERT_EQ(content.substr(1, version.size()), version);
  std::ofstream(of_one) << "{" << version << "1" << content.substr(content.find(',', version.size()));
  EXPECT_FALSE(one.machine());
  EXPECT_EQ(warnings, 0);
}

// Everything resident and no rate but the stages': a step takes what they take, micro-batch by micro-batch.
TEST(Prediction, AddsUpTheStages) {
  const ModelSpec spec = spec_of(3);
  SessionOptions options{.device_memory = 64 << 20, .host_memory = 64 << 20, .micro_batches = 2};
  const ModelProfile profile = profile_of(spec);
  const SessionPlan plan = plan_session(spec, options, profile.needs(spec));
  EXPECT_FALSE(plan.stored);
  EXPECT_NO_THROW(prove(plan, true));
  const Prediction prediction = predict(plan, rates_of(spec, on_any_machine(profile)));
  EXPECT_NEAR(prediction.step_seconds, 2 * (4 * 1e-3 + 4e-3 + 4 * 2e-3), 1e-9);
  EXPECT_EQ(prediction.bytes[static_cast<int>(swap::Lane::disk_read)], 0U);

  // A loss of pairs has the head compute every log-probability before the gradients: a third more.
  options.loss.kind = LossKind::simpo;
  EXPECT_NEAR(
      predict(plan_session(spec, options, profile.needs(spec)), rates_of(spec, on_any_machine(profile))).step_seconds,
      prediction.step_seconds + 2 * 4e-3 / 3, 1e-9);
}

// Blocks that keep their activations take the time that was measured of keeping.
TEST(Prediction, KnowsWhichStagesKeep) {
  const ModelSpec spec = spec_of(3);
  SessionOptions options{.device_memory = 64 << 20, .host_memory = 64 << 20, .micro_batches = 2};
  ModelProfile profile = profile_of(spec);
  ModelProfile::Stage& block = profile.stages.at(stage_class(spec, 1));
  block.activation_bytes = 1 << 20;
  block.seconds.forward_keeping = 1.5e-3;
  block.seconds.backward_kept = 0.5e-3;
  const SessionPlan plan = plan_session(spec, options, profile.needs(spec));
  for (int item = 0; item < static_cast<int>(plan.arrangement.items.size()); ++item)
    EXPECT_EQ(plan.arrangement.items[item].activations == swap::Activations::keep, item >= 2 && item < 8) << item;
  EXPECT_NEAR(predict(plan, rates_of(spec, on_any_machine(profile))).step_seconds,
              2 * (1e-3 + 3 * 1.5e-3 + 4e-3 + 3 * 0.5e-3 + 2e-3), 1e-9);
}

// Blocks of 4M parameters whose updates take longer than the backward and less than a step: some of them wait.
TEST(Prediction, DefersUpdatesThatTheBackwardHasNoTimeFor) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":512,)"
      R"("intermediate_size":2048,"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":12})",
      "config.json");
  SessionOptions options{.device_memory = 256 << 20, .host_memory = 2ULL << 30, .chunk_elements = 1 << 18};
  options.clip.reset();
  Profile profile = on_any_machine(profile_of(spec));
  profile.machine.rates.compute_on_cores = false;
  for (auto& [name, stage] : profile.model.stages)
    stage.seconds = {.forward = 10e-3, .backward = 20e-3, .head = 30e-3, .evaluate = 10e-3};
  const auto choose = [&](double update_seconds) {
    for (const char* name : {"fp32-master+adam8", "fp32-master+adam32"})
      profile.machine.update[name] = update_seconds == 0 ? 0 : 4.2e6 / update_seconds;  // a block's in so many seconds
    return choose_placement(spec, options, profile);
  };
  const Placement fast = choose(0);
  EXPECT_EQ(options.deferred_share, 0);
  EXPECT_EQ(fast.prediction.step_seconds, fast.step_seconds_plain_updates);
  const Placement slow = choose(28e-3);
  EXPECT_GT(options.deferred_share, 0);
  EXPECT_LT(options.deferred_share, 1);
  EXPECT_EQ(options.device_update_share, 0);  // no rate of it is known
  EXPECT_LT(slow.prediction.step_seconds, 0.9 * slow.step_seconds_plain_updates);
  // What was chosen is what a session with that share is predicted to take.
  const SessionPlan plan = plan_session(spec, options, profile.model.needs(spec));
  EXPECT_NO_THROW(prove(plan, true));
  EXPECT_NEAR(static_cast<double>(plan.deferred_parameters),
              options.deferred_share * static_cast<double>(plan.packed.trainable_parameters),
              0.05 * static_cast<double>(plan.packed.trainable_parameters));
}

// So a download takes nothing of its processors while it crosses the link.
TEST(SessionPlan, GradientsAreRoundedInSlotsOfAGpu) {
  const ModelSpec spec = spec_of(3);
  SessionOptions options{.device = "cuda", .device_memory = 64 << 20, .host_memory = 64 << 20};
  const auto slot_of = [&] {
    return plan_session(spec, options, profile_of(spec).needs(spec)).arrangement.gradient_slot;
  };
  EXPECT_GT(slot_of(), 0U);
  EXPECT_NO_THROW(prove(plan_session(spec, options, profile_of(spec).needs(spec)), true));
  options.train = false;
  EXPECT_EQ(slot_of(), 0U);
  options.train = true;
  options.device = "cpu";
  EXPECT_EQ(slot_of(), 0U);
}

// Beside all else that a step takes; a smaller budget has none, and RAM has it.
TEST(SessionPlan, StateStaysOnAGpuThatHoldsAllWeights) {
  const ModelSpec spec = spec_of(3);
  const ComputeNeeds needs = profile_of(spec).needs(spec);
  for (const std::optional<double> clip : {std::optional<double>(1.0), std::optional<double>()}) {
    SessionOptions options{.device = "cuda", .device_memory = 64 << 20, .host_memory = 64 << 20, .clip = clip};
    const SessionPlan there = plan_session(spec, options, needs);
    EXPECT_GT(there.device_state_parameters, there.packed.trainable_parameters / 2);
    EXPECT_EQ(there.device_updated_parameters, there.device_state_parameters);
    EXPECT_LE(there.arrangement.device_bytes() + there.workspace, options.device_memory);
    EXPECT_NO_THROW(prove(there, true));
    options.storage = {"unused"};
    options.commit_every = 1;
    EXPECT_NO_THROW(prove(plan_session(spec, options, needs), true));
    options.storage.clear();
    options.commit_every = 0;
    options.device_memory = there.arrangement.device_bytes() - there.arrangement.device_resident + there.workspace;
    const SessionPlan smaller = plan_session(spec, options, needs);
    EXPECT_EQ(smaller.device_state_parameters, 0U);
    EXPECT_GT(smaller.arrangement.resident_bytes(*smaller.layout), there.arrangement.resident_bytes(*there.layout));
    options.device_memory = 64 << 20;
    options.device = "cpu";
    EXPECT_EQ(plan_session(spec, options, needs).device_state_parameters, 0U);
  }
}

// Blocks of 4M parameters, stored in chunks that the budget has no buffers for, in some that serve, and in tiny ones.
TEST(Prediction, PlansWithTheChunksThatARunWhichGoesOnHas) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":512,)"
      R"("intermediate_size":2048,"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":12})",
      "config.json");
  const Profile profile = on_any_machine(profile_of(spec));
  const auto cut_of = [&](std::uint64_t stored, std::uint64_t host_mib, bool resume = true) {
    SessionOptions options{.device_memory = 256 << 20,
                           .host_memory = host_mib << 20,
                           .storage = {"unused"},
                           .resume = resume,
                           .chunk_elements = stored};
    EXPECT_EQ(choose_placement(spec, options, profile).plan.layout->chunk_elements(), options.chunk_elements);
    return options.chunk_elements;
  };
  EXPECT_EQ(cut_of(8 << 20, 24), 1U << 16);
  EXPECT_EQ(cut_of(1 << 19, 24), 1U << 19);
  EXPECT_EQ(cut_of(1 << 16, 64), 1U << 16);
  EXPECT_EQ(cut_of(1 << 16, 192), 15U << 16);
  EXPECT_EQ(cut_of(1 << 16, 192, false), 1U << 16);
}

// Updates far slower than the computation, a device that is fast at them, and links with time to spare: they go there,
// clipped or not. Over a slow link they stay.
TEST(Prediction, UpdatesOnTheDeviceWhereTheCpuIsTheLimit) {
  const ModelSpec spec = spec_of(12);
  SessionOptions options{.device_memory = 64 << 20, .host_memory = 64 << 20};
  Profile profile = on_any_machine(profile_of(spec));
  for (const char* name : {"fp32-master+adam8", "fp32-master+adam32"}) {
    profile.machine.update[name] = 3e6;
    profile.machine.device_update[name] = 3e9;
  }
  const auto choose = [&](double link) {
    profile.machine.rates = {.upload = link, .download = link, .compute_on_cores = false};
    return choose_placement(spec, options, profile);
  };
  for (const std::optional<double> clip : {std::optional<double>(1.0), std::optional<double>()}) {
    options.clip = clip;
    choose(1e6);
    EXPECT_EQ(options.device_update_share, 0);
    const Placement fast = choose(1e10);
    EXPECT_GT(options.device_update_share, 0);
    EXPECT_LT(fast.prediction.step_seconds, 0.7 * fast.step_seconds_plain_updates);
    const SessionPlan plan = plan_session(spec, options, profile.model.needs(spec));
    EXPECT_GT(plan.device_updated_parameters, 0U);
    EXPECT_NO_THROW(prove(plan, true));
  }
}

// Of blocks whose activations are large and quickly moved.
Profile profile_that_swaps(const ModelSpec& spec, std::uint64_t swapped_bytes) {
  Profile profile = on_any_machine(profile_of(spec));
  ModelProfile::Stage& block = profile.model.stages.at(stage_class(spec, 1));
  block.activation_bytes = 3 << 20;
  block.swapped_bytes = swapped_bytes;
  block.seconds.forward_keeping = block.seconds.backward_kept = 1e-3;
  block.seconds.forward_swapping = block.seconds.backward_swapped = 1e-3;
  profile.machine.rates = {
      .disk_read = 10e9, .disk_write = 10e9, .upload = 10e9, .download = 10e9, .compute_on_cores = false};
  return profile;
}

// Where the device has no room for activations they are swapped if that is faster than computing them again: to the
// host while it has room, then to storage; not at all where the links are slow.
TEST(Prediction, SwapsWhatIsFasterToMoveThanToComputeAgain) {
  const ModelSpec spec = spec_of(6);
  SessionOptions options{
      .device_memory = 8 << 20, .host_memory = 64 << 20, .storage = {"somewhere"}, .micro_batches = 2};
  Profile profile = profile_that_swaps(spec, 1 << 20);
  const auto planned = [&] {
    SessionPlan plan = plan_session(spec, options, profile.model.needs(spec));
    EXPECT_NO_THROW(prove(plan, true));
    return plan;
  };
  const Placement to_host = choose_placement(spec, options, profile);
  EXPECT_GE(options.swap_to_host, 12);
  EXPECT_EQ(options.swap_to_storage, 0);
  EXPECT_LT(to_host.prediction.step_seconds, 0.8 * to_host.step_seconds_without_swaps);
  const SessionPlan on_host = planned();
  EXPECT_EQ(on_host.arrangement.saved_on_host(), 12U << 20);
  EXPECT_EQ(to_host.plan.arrangement.items, on_host.arrangement.items);
  EXPECT_NEAR(predict(on_host, rates_of(spec, profile)).step_seconds, to_host.prediction.step_seconds, 1e-12);

  options.host_memory = 1000 << 10;
  profile = profile_that_swaps(spec, 64 << 10);
  const Placement to_storage = choose_placement(spec, options, profile);
  const SessionPlan on_storage = planned();
  EXPECT_GT(on_storage.writes.activations, 0U);
  EXPECT_EQ(to_storage.plan.writes.activations, on_storage.writes.activations);
  EXPECT_LE(on_storage.arrangement.host_bytes(*on_storage.layout), options.host_memory);
  EXPECT_LT(to_storage.prediction.step_seconds, 0.9 * to_storage.step_seconds_without_swaps);
  // The search, which leaves out what it does not need, says the same of the lanes.
  const Prediction again = predict(on_storage, rates_of(spec, profile));
  for (int lane = 0; lane < swap::kLanes; ++lane) {
    EXPECT_NEAR(to_storage.prediction.step.busy_seconds[lane], again.step.busy_seconds[lane], 1e-9) << lane;
    EXPECT_EQ(to_storage.prediction.bytes[lane], again.bytes[lane]) << lane;
  }

  profile.machine.rates.upload = profile.machine.rates.disk_read = 1e7;
  const Placement slow = choose_placement(spec, options, profile);
  EXPECT_EQ(options.swap_to_host + options.swap_to_storage, 0);
  EXPECT_EQ(slow.prediction.step_seconds, slow.step_seconds_without_swaps);
}

// A run whose steps write little, because most of the model is frozen, does not begin to write activations.
TEST(Prediction, SwapsToStorageWhereThatIsWorthWhatItWrites) {
  for (const bool frozen : {false, true}) {
    ModelSpec spec = spec_of(6);
    for (UnitSpec& unit : spec.units)
      for (TensorSpec& tensor : unit.tensors) tensor.trainable = !frozen || &unit == &spec.units.back();
    SessionOptions options{
        .device_memory = 8 << 20, .host_memory = 700 << 10, .storage = {"somewhere"}, .micro_batches = 2};
    const Placement found = choose_placement(spec, options, profile_that_swaps(spec, 64 << 10));
    EXPECT_GT(found.plan.writes.update, 0U);
    EXPECT_EQ(found.plan.writes.activations == 0, frozen);
  }
}

// Where a drive is the limit, what it takes at least is never more than what a step takes, whatever waits, is deferred,
// swaps, commits or stays on the device; nor much less, where little does.
TEST(Prediction, TakesAtLeastWhatTheDrivesDo) {
  const ModelSpec spec = spec_of(6);
  Profile profile = on_any_machine(profile_of(spec));
  profile.model.stages.at(stage_class(spec, 1)).swapped_bytes = 1 << 20;
  profile.model.stages.at(stage_class(spec, 1)).activation_bytes = 3 << 20;
  for (const double mixed : {0.0, 13e6, 20e6})
    for (const std::uint64_t device_memory : {8 << 20, 64 << 20})
      for (const std::uint64_t host_memory : {2 << 20, 8 << 20})
        for (const bool clips : {false, true})
          for (const double deferred : {0.0, 0.5})
            for (const int commit_every : {0, 1}) {
              profile.machine.rates = {.disk_read = 10e6, .disk_write = 7e6, .disk_mixed = mixed, .upload = 1e9};
              SessionOptions options{.device_memory = device_memory,
                                     .host_memory = host_memory,
                                     .storage = {"somewhere"},
                                     .micro_batches = 2,
                                     .commit_every = commit_every};
              options.swap_to_storage = 4 * commit_every;
              options.deferred_share = deferred;
              if (!clips) options.clip.reset();
              const SessionPlan plan = plan_session(spec, options, profile.model.needs(spec));
              const double least = least_on_drives(plan, profile.machine.rates),
                           step = predict(plan, rates_of(spec, profile)).step_seconds;
              EXPECT_LE(least, step * (1 + 1e-9));
              if (commit_every == 1 && device_memory == 8 << 20 && host_memory == 2 << 20) {
                EXPECT_GT(least, 0.4 * step);  // buffers and rings hold much of so small a model
              }
            }
}

// Weights and state cross links that are slow beside a micro-batch's computation. From the number of micro-batches on
// that is expected, compute is the busiest lane, and not much before it; whatever the plan that it was expected from.
TEST(BreakEven, IsWhereAPlanBecomesLimitedByCompute) {
  const ModelSpec spec = spec_of(6);
  const swap::MachineRates links{.disk_read = 10e6,
                                 .disk_write = 7e6,
                                 .upload = 1e9,
                                 .download = 1e9,
                                 .cast = 1e9,
                                 .fill = 1e9,
                                 .compute_on_cores = false};
  Profile profile = on_any_machine(profile_of(spec));
  profile.machine.rates = links;
  struct Planned {
    std::size_t busiest;
    std::optional<BreakEven> expected;
  };
  const auto planned = [&](std::int64_t micro_batches, std::uint64_t device_memory) {
    SessionOptions options{.device_memory = device_memory,
                           .host_memory = 2 << 20,
                           .storage = {"somewhere"},
                           .micro_batches = static_cast<int>(micro_batches)};
    const Placement placement = choose_placement(spec, options, profile);
    const auto& busy = placement.prediction.step.busy_seconds;
    const auto busiest = std::ranges::max_element(busy) - busy.begin();
    return Planned{static_cast<std::size_t>(busiest),
                   break_even(placement.plan, placement.prediction, rates_of(spec, profile))};
  };
  constexpr auto kCompute = static_cast<std::size_t>(swap::Lane::compute),
                 kDiskWrite = static_cast<std::size_t>(swap::Lane::disk_write);
  // Inputs of stages stay on the device.
  const auto expected = planned(1, 64 << 20).expected;
  ASSERT_TRUE(expected);
  ASSERT_GT(expected->micro_batches, 8);
  EXPECT_EQ(expected->last, swap::Lane::disk_write);
  EXPECT_EQ(planned(expected->micro_batches, 64 << 20).busiest, kCompute);
  EXPECT_EQ(planned(expected->micro_batches - 2, 64 << 20).busiest, kDiskWrite);
  for (const int other : {2, 40})
    EXPECT_NEAR(static_cast<double>(planned(other, 64 << 20).expected->micro_batches),
                static_cast<double>(expected->micro_batches), 1)
        << other;

  profile.machine.rates = {.compute_on_cores = false};
  const auto at_once = planned(1, 64 << 20).expected;
  EXPECT_EQ(at_once->micro_batches, 1);
  EXPECT_EQ(at_once->last, swap::Lane::compute);
}

// What is saved for items grows with the micro-batches; zeroing gradients does not.
TEST(BreakEven, SeparatesWhatEachMicroBatchTakesFromWhatAStepTakes) {
  const ModelSpec spec = spec_of(2);
  const SessionOptions options{.device_memory = 64 << 20, .host_memory = 64 << 20, .micro_batches = 2};
  const SessionPlan plan = plan_session(spec, options, profile_of(spec).needs(spec));
  constexpr auto kCompute = static_cast<std::size_t>(swap::Lane::compute),
                 kDiskRead = static_cast<std::size_t>(swap::Lane::disk_read);
  swap::Rates rates;
  Prediction prediction;
  prediction.step.busy_seconds[kCompute] = 4;
  prediction.step.busy_seconds[kDiskRead] = 10;
  prediction.bytes[kDiskRead] = 100;
  const auto expected = [&](std::uint64_t item_bytes) {
    prediction.item_bytes[kDiskRead] = item_bytes;
    const auto found = break_even(plan, prediction, rates);
    return found ? found->micro_batches : 0;
  };
  EXPECT_EQ(expected(0), 5);   // 10 s a step; compute takes 2 s a micro-batch
  EXPECT_EQ(expected(20), 8);  // 8 s, and 1 s a micro-batch
  EXPECT_EQ(expected(40), 0);  // 2 s a micro-batch: compute never catches up
  std::uint64_t gradients = 0;
  for (int unit = 0; unit < static_cast<int>(plan.layout->units().size()); ++unit)
    gradients += plan.layout->gradient_bytes(unit);
  rates.machine.fill = static_cast<double>(gradients) / 2;
  EXPECT_EQ(expected(0), 8);  // 2 s of zeros, and 1 s a micro-batch
}

// Adapters are small beside the base that a step visits: they stay in RAM, nothing of them is written by a step, and
// each step is committed all the same. A whole model in RAM is committed seldom.
TEST(Commits, ComeEachStepWhereTheyAreSmallBesideWhatAStepVisits) {
  const auto planned = [](const std::optional<AdapterConfig>& adapters, std::uint64_t host_memory) {
    ModelSpec spec = parse_model_spec(
        R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":512,)"
        R"("intermediate_size":2048,"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":128,)"
        R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":6})",
        "config.json");
    if (adapters) add_adapters(spec, *adapters);
    const SessionOptions options{.device_memory = 256 << 20,
                                 .host_memory = host_memory,
                                 .storage = {"somewhere"},
                                 .commit_every = 1,
                                 .commit_auto = true,
                                 .chunk_elements = 1 << 18};
    return plan_session(spec, options, profile_of(spec).needs(spec));
  };
  for (const std::uint64_t host_memory : {20ULL << 20, 1ULL << 30}) {
    const SessionPlan plan = planned(AdapterConfig{.rank = 4, .alpha = 8}, host_memory);
    EXPECT_EQ(plan.writes.update + plan.writes.gradients, 0U);
    EXPECT_GT(plan.writes.commit, 0U);
    EXPECT_LT(plan.writes.commit, 3ULL << 20);  // nothing of the base
    EXPECT_GT(plan.writes.load, 45ULL << 20);   // which is written once
    EXPECT_EQ(plan.commit_every, 1) << host_memory;
    EXPECT_NO_THROW(prove(plan, true));
  }
  // Adapters half as large as the base: what a commit adds is a tenth of what a step moves.
  const SessionPlan large = planned(AdapterConfig{.rank = 128, .alpha = 8}, 1ULL << 30);
  EXPECT_GT(large.commit_every, 2);
  EXPECT_LT(large.commit_every, 20);
  EXPECT_EQ(planned({}, 1ULL << 30).commit_every, 50);
}

}  // namespace
}  // namespace tierflow
