// What a profile keeps comes back, each number in its place, and reaches the plan.
#include "runtime/planning/profile.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "runtime/spec/stage_class.h"
#include "tests/runtime/expect.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

ModelSpec small() {
  return parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"vocab_size":512,"hidden_size":64,"intermediate_size":96,)"
      R"("num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2})",
      "config.json");
}

// No two numbers are equal, but that an evaluation takes as long as a forward.
ModelProfile distinct(const ModelSpec& spec) {
  ModelProfile profile{.stage_peak = 101,
                       .keeping_peak = 102,
                       .micro_batch_bytes = 103,
                       .device_fixed = 104,
                       .held_peak = 105,
                       .process_bytes = 106,
                       .width = 0.107,
                       .seconds_allowed = 108.5,
                       .readings = {.spread = 0.109, .other_cores = 110.5, .corrected = true}};
  std::uint64_t n = 1000;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage, n += 100)
    profile.stages[stage_class(spec, stage)] = {.carry_bytes = n + 1,
                                                .activation_bytes = n + 2,
                                                .swapped_bytes = n + 3,
                                                .seconds = {.forward = n + 0.1,
                                                            .backward = n + 0.2,
                                                            .head = n + 0.3,
                                                            .evaluate = n + 0.1,  // a forward
                                                            .forward_keeping = n + 0.5,
                                                            .backward_kept = n + 0.6,
                                                            .forward_swapping = n + 0.7,
                                                            .backward_swapped = n + 0.8}};
  return profile;
}

void expect_equal(const swap::StageSeconds& a, const swap::StageSeconds& b) {
  EXPECT_EQ(a.forward, b.forward);
  EXPECT_EQ(a.backward, b.backward);
  EXPECT_EQ(a.head, b.head);
  EXPECT_EQ(a.evaluate, b.evaluate);
  EXPECT_EQ(a.forward_keeping, b.forward_keeping);
  EXPECT_EQ(a.backward_kept, b.backward_kept);
  EXPECT_EQ(a.forward_swapping, b.forward_swapping);
  EXPECT_EQ(a.backward_swapped, b.backward_swapped);
}

void expect_equal(const Readings& a, const Readings& b) {
  EXPECT_EQ(a.spread, b.spread);
  EXPECT_EQ(a.other_cores, b.other_cores);
  EXPECT_EQ(a.corrected, b.corrected);
}

TEST(Profile, EveryNumberOfAModelReachesThePlan) {
  const ModelSpec spec = small();
  const ModelProfile profile = distinct(spec);
  const ComputeNeeds needs = profile.needs(spec);
  EXPECT_EQ(needs.stage_peak, 101U);
  EXPECT_EQ(needs.keeping_peak, 102U);
  EXPECT_EQ(needs.micro_batch_bytes, 103U);
  EXPECT_EQ(needs.device_fixed, 104U);
  EXPECT_EQ(needs.held_peak, 105U);
  const auto seconds = profile.seconds(spec);
  ASSERT_EQ(needs.carry_bytes.size(), spec.stages.size());
  ASSERT_EQ(needs.activation_bytes.size(), spec.stages.size());
  ASSERT_EQ(needs.swapped_bytes.size(), spec.stages.size());
  ASSERT_EQ(seconds.size(), spec.stages.size());
  for (std::size_t stage = 0; stage < spec.stages.size(); ++stage) {
    const ModelProfile::Stage& of = profile.stages.at(stage_class(spec, static_cast<int>(stage)));
    EXPECT_EQ(needs.carry_bytes[stage], of.carry_bytes);
    EXPECT_EQ(needs.activation_bytes[stage], of.activation_bytes);
    EXPECT_EQ(needs.swapped_bytes[stage], of.swapped_bytes);
    expect_equal(seconds[stage], of.seconds);
  }
  EXPECT_TRUE(profile.covers(spec));
  ModelProfile without = profile;
  without.stages.erase(without.stages.begin());
  EXPECT_FALSE(without.covers(spec));
}

ProfileCache cache_in(const TempDir& folder, const ModelSpec& spec, Say warn) {
  EXPECT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  return {spec, {.storage = {folder.path()}}, "build", std::move(warn)};
}

TEST(Profile, EveryNumberIsKept) {
  const TempDir folder;
  std::string said;
  const ModelSpec spec = small();
  const ProfileCache cache = cache_in(folder, spec, [&](const std::string& line) { said += line; });
  ModelProfile model = distinct(spec);
  MachineProfile machine{.rates = {.disk_read = 1.5,
                                   .disk_write = 2.5,
                                   .disk_mixed = 3.5,
                                   .upload = 4.5,
                                   .download = 5.5,
                                   .cast = 6.5,
                                   .fill = 7.5,
                                   .measure = 8.5,
                                   .checksum = 9.5,
                                   .memory = 9.75,
                                   .cores = 10,
                                   .threads = 11,
                                   .compute_on_cores = true},
                         .update = {{"a", 12.5}, {"b", 13.5}},
                         .device_update = {{"a", 14.5}},
                         .readings = {.spread = 15.5, .other_cores = 16.5}};
  for (const bool yes : {true, false}) {  // what is no number
    machine.rates.compute_on_cores = yes;
    machine.readings.corrected = yes;
    model.readings.corrected = !yes;
    cache.keep(model);
    cache.keep(machine);
    const auto kept = cache.model();
    ASSERT_TRUE(kept) << said;
    EXPECT_EQ(kept->stage_peak, 101U);
    EXPECT_EQ(kept->keeping_peak, 102U);
    EXPECT_EQ(kept->micro_batch_bytes, 103U);
    EXPECT_EQ(kept->device_fixed, 104U);
    EXPECT_EQ(kept->held_peak, 105U);
    EXPECT_EQ(kept->process_bytes, 106U);
    EXPECT_EQ(kept->width, 0.107);
    EXPECT_EQ(kept->seconds_allowed, 108.5);
    expect_equal(kept->readings, model.readings);
    ASSERT_EQ(kept->stages.size(), model.stages.size());
    for (const auto& [name, stage] : model.stages) {
      EXPECT_EQ(kept->stages.at(name).carry_bytes, stage.carry_bytes);
      EXPECT_EQ(kept->stages.at(name).activation_bytes, stage.activation_bytes);
      EXPECT_EQ(kept->stages.at(name).swapped_bytes, stage.swapped_bytes);
      expect_equal(kept->stages.at(name).seconds, stage.seconds);
    }
    const auto again = cache.machine();
    ASSERT_TRUE(again) << said;
    EXPECT_EQ(again->rates.disk_read, 1.5);
    EXPECT_EQ(again->rates.disk_write, 2.5);
    EXPECT_EQ(again->rates.disk_mixed, 3.5);
    EXPECT_EQ(again->rates.upload, 4.5);
    EXPECT_EQ(again->rates.download, 5.5);
    EXPECT_EQ(again->rates.cast, 6.5);
    EXPECT_EQ(again->rates.fill, 7.5);
    EXPECT_EQ(again->rates.measure, 8.5);
    EXPECT_EQ(again->rates.checksum, 9.5);
    EXPECT_EQ(again->rates.memory, 9.75);
    EXPECT_EQ(again->rates.cores, 10);
    EXPECT_EQ(again->rates.threads, 11);
    EXPECT_EQ(again->rates.compute_on_cores, yes);
    EXPECT_EQ(again->update, machine.update);
    EXPECT_EQ(again->device_update, machine.device_update);
    expect_equal(again->readings, machine.readings);
  }
  EXPECT_EQ(said, "");
}

// Models that differ in the experts of a token alone take different times.
TEST(Profile, IsOfTheExpertsOfAToken) {
  const TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  const auto with = [](const std::string& experts) {
    return parse_model_spec(
        R"({"architectures":["MixtralForCausalLM"],"vocab_size":512,"hidden_size":64,"intermediate_size":96,)"
        R"("num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,"num_local_experts":4,)"
        R"("num_experts_per_tok":)" +
            experts + "}",
        "config.json");
  };
  const SessionOptions options{.storage = {folder.path()}};
  const auto fail = [](const std::string& line) { ADD_FAILURE() << line; };
  ProfileCache(with("1"), options, "build", fail).keep(distinct(with("1")));
  EXPECT_TRUE(ProfileCache(with("1"), options, "build", fail).model());
  EXPECT_FALSE(ProfileCache(with("2"), options, "build", fail).model());
}

// What a stage takes does not depend on where the state lies; what a machine does, depends on it.
TEST(Profile, OfAModelIsOfNoDrive) {
  const TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  const ModelSpec spec = small();
  const auto cache = [&](const SessionOptions& options, const std::string& build = "build") {
    return ProfileCache(spec, options, build, [](const std::string& line) { ADD_FAILURE() << line; });
  };
  const SessionOptions here{.storage = {folder.path()}};
  cache(here).keep(distinct(spec));
  MachineProfile machine;
  machine.rates.cores = machine.rates.threads = 1;
  cache(here).keep(machine);
  ASSERT_TRUE(cache(here).machine() && cache(here).model());
  EXPECT_TRUE(cache({.storage = {folder.path() / "not/made/yet"}}).machine()) << "the same drive";
  const std::vector<std::pair<const char*, SessionOptions>> elsewhere = {
      {"drive", {.storage = {"/proc"}}},
      {"number of drives", {.storage = {folder.path(), "/proc"}}},
      {"no drive", {}},
      {"engine", {.storage = here.storage, .engine = io::EngineKind::threads}},
      {"page cache", {.storage = here.storage, .allow_buffered = true}}};
  for (const auto& [what, options] : elsewhere) {
    EXPECT_TRUE(cache(options).model()) << what;
    EXPECT_FALSE(cache(options).machine()) << what;
  }
  const std::vector<std::pair<const char*, SessionOptions>> otherwise = {
      {"device", {.device = "cuda", .storage = here.storage}},
      {"threads", {.storage = here.storage, .update_threads = 3}},
      {"micro-batch", {.storage = here.storage, .micro_batch = 2}},
      {"sequence length", {.storage = here.storage, .sequence_length = 8}}};
  for (const auto& [what, options] : otherwise) EXPECT_FALSE(cache(options).model()) << what;
  EXPECT_FALSE(cache(here, "another build").model() || cache(here, "another build").machine());
}

// A file that is damaged counts as missing, and is said to be so.
TEST(Profile, ATimeBelowZeroIsMeasuredAgain) {
  const TempDir folder;
  std::string said;
  const ModelSpec spec = small();
  const ProfileCache cache = cache_in(folder, spec, [&](const std::string& line) { said += line; });
  ModelProfile model = distinct(spec);
  model.seconds_allowed = -0.5;
  cache.keep(model);
  EXPECT_FALSE(cache.model());
  EXPECT_NE(said.find("seconds_allowed is missing or negative"), std::string::npos) << said;
}

TEST(Profile, ADamagedFileIsWarnedOfAndMeasuredAgain) {
  const TempDir folder;
  int warnings = 0;
  const ModelSpec spec = small();
  const ProfileCache cache = cache_in(folder, spec, [&](const std::string&) { ++warnings; });
  cache.keep(distinct(spec));
  ASSERT_TRUE(cache.model());
  EXPECT_EQ(warnings, 0);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    if (entry.is_regular_file()) std::filesystem::resize_file(entry.path(), entry.file_size() / 2);
  EXPECT_FALSE(cache.model());
  EXPECT_EQ(warnings, 1);
  cache.keep(distinct(spec));
  EXPECT_TRUE(cache.model());
}

}  // namespace
}  // namespace tierflow::testing
