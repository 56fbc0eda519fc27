// What was measured and how far it is trusted: readings, what narrow models say of wide ones, and what a run corrects.
#include "runtime/planning/correction.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/base/load_meter.h"
#include "runtime/planning/probed_model.h"
#include "runtime/planning/repeat.h"
#include "runtime/spec/stage_class.h"

namespace tierflow {
namespace {

TEST(Readings, TellASteadyMachineFromABusyOne) {
  EXPECT_TRUE((Readings{.spread = 0.1, .other_cores = 0.2}.steady(2)));
  EXPECT_FALSE((Readings{.spread = 0.3, .other_cores = 0}.steady(2)));
  EXPECT_FALSE((Readings{.spread = 0, .other_cores = 1}.steady(2)));
  EXPECT_TRUE((Readings{.spread = 0, .other_cores = 1}.steady(64)));
  EXPECT_TRUE((Readings{.spread = 1, .other_cores = 2, .corrected = true}.steady(2)));

  const Reading even = reading_of({2, 2, 2, 2, 9});
  EXPECT_EQ(even.seconds, 2);
  EXPECT_EQ(even.spread, 0);  // one that was interrupted does not count
  const Reading apart = reading_of({1, 3, 2});
  EXPECT_EQ(apart.seconds, 2);
  EXPECT_EQ(apart.spread, 1);
  int prepared = 0, worked = 0;
  repeat(
      {.fewest = 3, .most = 5, .seconds = 100}, [&] { ++prepared; }, [&] { ++worked; });
  EXPECT_EQ(prepared, 5);
  EXPECT_EQ(worked, 5);
  repeat(
      {.fewest = 3, .most = 5, .seconds = 0}, [] {}, [&] { ++worked; });
  EXPECT_EQ(worked, 8);
}

double seconds_of(clockid_t clock) {
  timespec at{};
  ::clock_gettime(clock, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

// What this process computes is no other program's; what a child computes is. Others may run meanwhile.
TEST(LoadMeter, CountsWhatOtherProgramsTake) {
  const auto compute = [] {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(800);
    while (std::chrono::steady_clock::now() < until) continue;
  };
  constexpr double kTicks = 0.1;  // the system counts in hundredths of a second
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const double own = seconds_of(CLOCK_PROCESS_CPUTIME_ID), since = seconds_of(CLOCK_MONOTONIC);
  const LoadMeter beside_threads;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < cores; ++i) threads.emplace_back(compute);
  for (std::thread& thread : threads) thread.join();
  const double others = beside_threads.other_cores();
  const double own_cores = (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - own) / (seconds_of(CLOCK_MONOTONIC) - since);
  EXPECT_LE(others, cores - own_cores + kTicks);

  const double started = seconds_of(CLOCK_MONOTONIC);
  const LoadMeter beside_child;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    compute();
    ::_exit(0);
  }
  rusage used{};
  ASSERT_EQ(::wait4(child, nullptr, 0, &used), child);
  const double of_child = static_cast<double>(used.ru_utime.tv_sec) + 1e-6 * static_cast<double>(used.ru_utime.tv_usec);
  EXPECT_GE(beside_child.other_cores(), of_child / (seconds_of(CLOCK_MONOTONIC) - started) - kTicks);
}

ModelSpec opt_of(int heads, const Tiling& tiling = {}) {
  return parse_model_spec(R"({"architectures":["OPTForCausalLM"],"model_type":"opt","vocab_size":512,"hidden_size":)" +
                              std::to_string(64 * heads) + R"(,"ffn_dim":)" + std::to_string(256 * heads) +
                              R"(,"num_hidden_layers":2,"num_attention_heads":)" + std::to_string(heads) +
                              R"(,"max_position_embeddings":128,"tie_word_embeddings":true})",
                          "config.json", tiling);
}

// Narrow models have the same stages, and products in proportion to the square of the width.
TEST(NarrowModels, HaveTheStagesOfTheWideOne) {
  const ModelSpec wide = opt_of(12, {.vocabulary_elements = 128 * 64 * 12, .block_elements = 1 << 20});
  ASSERT_EQ(width_parts(wide), 12);
  ModelSpec grouped = wide;
  grouped.config.kv_heads = 4;
  EXPECT_EQ(width_parts(grouped), 4);  // heads in groups stay in groups
  for (const int parts : {1, 3, 6}) {
    const ModelSpec narrow = narrowed(wide, parts);
    ASSERT_EQ(narrow.stages.size(), wide.stages.size());
    for (std::size_t stage = 0; stage < wide.stages.size(); ++stage) {
      EXPECT_EQ(narrow.stages[stage].kind, wide.stages[stage].kind);
      EXPECT_EQ(narrow.stages[stage].first_row, wide.stages[stage].first_row);
    }
    EXPECT_EQ(narrow.config.hidden_size, 64 * parts);
    EXPECT_EQ(narrow.config.heads, parts);
  }
  const auto operations = [](const ModelSpec& spec, StageKind kind) {
    for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage)
      if (spec.stages[stage].kind == kind) return stage_operations(spec, stage, 2, 128);
    return 0.0;
  };
  const ModelSpec narrow = narrowed(wide, 6);
  const double tokens = 2 * 128, h = 64 * 12;
  EXPECT_NEAR(operations(wide, StageKind::mlp), tokens * 2 * 8 * h * h, 0.01 * tokens * 16 * h * h);
  EXPECT_NEAR(operations(wide, StageKind::attention), tokens * (8 * h * h + 2 * 128 * h), 0.01 * tokens * 8 * h * h);
  EXPECT_NEAR(operations(wide, StageKind::head_tile), tokens * 2 * 128 * h, 0.01 * tokens * 256 * h);
  // Of the last tile of the embedding, which this one is tied to, its rows alone: not the positions.
  EXPECT_NEAR(operations(wide, StageKind::head), tokens * 2 * 128 * h, 0.01 * tokens * 256 * h);
  EXPECT_NEAR(operations(wide, StageKind::mlp) / operations(narrow, StageKind::mlp), 4, 0.01);
  EXPECT_NEAR(operations(wide, StageKind::embedding) / operations(narrow, StageKind::embedding), 2, 1e-9);
}

// Bytes that grow as a constant, the width and its square do, and times as the operations do.
TEST(NarrowModels, SayWhatTheWideOneTakes) {
  const ModelSpec wide = opt_of(12);
  const auto probe = [&](int parts) {
    const ModelSpec spec = parts == 12 ? wide : narrowed(wide, parts);
    const auto w = static_cast<std::uint64_t>(parts);
    ProbedModel probed;
    for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) {
      probed.needs.carry_bytes.push_back(stage == 0 ? 0 : 1000 * w);
      probed.needs.activation_bytes.push_back(stage == 1 ? 50'000 + 7000 * w : 0);
      probed.needs.swapped_bytes.push_back(stage == 1 ? 7000 * w : 0);
      // The head's is constant and the largest of the narrow ones; the blocks' is the largest of the wide one.
      probed.stage_peaks.push_back(stage == 3 ? 900'000 : 10'000 + 500 * w + 9000 * w * w);
      probed.keeping_peaks.push_back(stage == 1 ? 3000 * w : 0);
      const double operations = stage_operations(spec, stage, 2, 128);
      probed.seconds.push_back({.forward = 1e-12 * operations,
                                .backward = 2e-12 * operations,
                                .head = 3e-12 * operations,
                                .evaluate = 4e-12 * operations,
                                .forward_keeping = 5e-12 * operations,
                                .backward_kept = 6e-12 * operations,
                                .forward_swapping = 7e-12 * operations,
                                .backward_swapped = 8e-12 * operations});
    }
    probed.needs.stage_peak = *std::max_element(probed.stage_peaks.begin(), probed.stage_peaks.end());
    probed.needs.keeping_peak = *std::max_element(probed.keeping_peaks.begin(), probed.keeping_peaks.end());
    probed.needs.micro_batch_bytes = 4096 + 2000 * w;
    probed.needs.device_fixed = 77;
    probed.needs.held_peak = 2 * probed.needs.stage_peak;
    probed.spread = 0.125;
    return probed;
  };
  const ProbedModel found = widened(wide, {{{1, probe(1)}, {3, probe(3)}, {6, probe(6)}}}, 2, 128), right = probe(12);
  EXPECT_EQ(found.needs.carry_bytes, right.needs.carry_bytes);
  EXPECT_EQ(found.needs.activation_bytes, right.needs.activation_bytes);
  EXPECT_EQ(found.needs.swapped_bytes, right.needs.swapped_bytes);
  EXPECT_EQ(found.needs.stage_peak, right.needs.stage_peak);
  EXPECT_EQ(found.needs.keeping_peak, right.needs.keeping_peak);
  EXPECT_EQ(found.needs.micro_batch_bytes, right.needs.micro_batch_bytes);
  EXPECT_EQ(found.needs.device_fixed, right.needs.device_fixed);
  EXPECT_EQ(found.needs.held_peak, right.needs.held_peak);
  EXPECT_EQ(found.spread, 0.125);
  for (std::size_t stage = 0; stage < right.seconds.size(); ++stage) {
    const swap::StageSeconds &a = found.seconds[stage], &b = right.seconds[stage];
    for (const auto member :
         {&swap::StageSeconds::forward, &swap::StageSeconds::backward, &swap::StageSeconds::head,
          &swap::StageSeconds::evaluate, &swap::StageSeconds::forward_keeping, &swap::StageSeconds::backward_kept,
          &swap::StageSeconds::forward_swapping, &swap::StageSeconds::backward_swapped})
      EXPECT_NEAR(a.*member, b.*member, 1e-9 * b.*member) << stage;
  }
  // What the narrow ones find where memory ends early is bounded by what they did find.
  ProbedModel odd = probe(6);
  odd.stage_peaks[3] = 1;
  EXPECT_GE(widened(wide, {{{1, probe(1)}, {3, probe(3)}, {6, odd}}}, 2, 128).stage_peaks[3], 1U);
  EXPECT_LE(widened(wide, {{{1, probe(1)}, {3, probe(3)}, {6, odd}}}, 2, 128).stage_peaks[3], 4U);
}

// A run that streams, and steps that take what another profile predicts of it.
class Corrections : public ::testing::Test {
 protected:
  Corrections() {
    options_.clip.reset();
    profile_.model = {.stage_peak = 1 << 20, .micro_batch_bytes = 1 << 16, .held_peak = 1 << 20};
    for (int stage = 0; stage < static_cast<int>(spec_.stages.size()); ++stage)
      profile_.model.stages[stage_class(spec_, stage)] = {
          .carry_bytes = 8192, .seconds = {.forward = 1e-3, .backward = 2e-3, .head = 4e-3, .evaluate = 1e-3}};
    profile_.machine.rates = {.disk_read = 2e9,
                              .disk_write = 1e9,
                              .disk_mixed = 1.5e9,
                              .upload = 5e9,
                              .download = 5e9,
                              .cast = 1e9,
                              .measure = 1e9,
                              .checksum = 5e9,
                              .cores = 2,
                              .threads = 2};
    for (const char* name : {"fp32-master+adam8", "fp32-master+adam32"})
      profile_.machine.update[name] = profile_.machine.device_update[name] = 3e8;
    plan_ = plan_session(spec_, options_, profile_.model.needs(spec_));
  }
  double step(const Profile& profile) const { return predict(plan_, rates_of(spec_, profile)).step_seconds; }
  std::vector<StepShown> steps_of(const Profile& truth, double spread = 0) const {
    const Prediction shown = predict(plan_, rates_of(spec_, truth));
    std::vector<StepShown> steps;
    for (const double factor : {1.0, 1 - spread, 1 + spread, 1 + spread, 1 - spread}) {
      steps.push_back({.seconds = factor * shown.step_seconds, .busy_seconds = shown.step.busy_seconds});
      for (double& busy : steps.back().busy_seconds) busy *= factor;
    }
    return steps;
  }

  const ModelSpec spec_ = parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":512,)"
      R"("intermediate_size":2048,"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":6})",
      "config.json");
  SessionOptions options_{.device_memory = 64 << 20, .host_memory = 24 << 20, .storage = {"somewhere"}};
  Profile profile_;
  SessionPlan plan_;
};

TEST_F(Corrections, AreNotMadeWhereThePredictionStands) {
  ASSERT_TRUE(plan_.stored);
  Profile truth = profile_;
  for (auto& [name, stage] : truth.model.stages) stage.seconds.backward *= 1.05;
  const Verdict verdict = judge(spec_, plan_, profile_, steps_of(truth), 0);
  EXPECT_FALSE(verdict.corrected);
  EXPECT_EQ(verdict.line, "");
}

TEST_F(Corrections, MakeTheProfileThatOfTheRun) {
  Profile truth = profile_;
  for (auto& [name, stage] : truth.model.stages) {
    stage.seconds.forward *= 6;
    stage.seconds.backward *= 6;
    stage.seconds.head *= 6;
  }
  const auto corrected = [&] {
    const Verdict verdict = judge(spec_, plan_, profile_, steps_of(truth), 0.1);
    EXPECT_NE(verdict.line.find("the profile is corrected"), std::string::npos) << verdict.line;
    EXPECT_EQ(std::count(verdict.line.begin(), verdict.line.end(), '\n'), 0);
    return verdict.corrected.value_or(profile_);
  };
  Profile now = corrected();
  EXPECT_NEAR(step(now), step(truth), 0.03 * step(truth));
  EXPECT_NEAR(now.model.stages.begin()->second.seconds.forward, truth.model.stages.begin()->second.seconds.forward,
              0.1 * truth.model.stages.begin()->second.seconds.forward);
  EXPECT_TRUE(now.machine.readings.corrected && now.model.readings.corrected);
  EXPECT_EQ(now.model.readings.other_cores, 0.1);

  // A drive and an update that are slower than they were measured.
  truth = profile_;
  truth.machine.rates.disk_read /= 5;
  truth.machine.rates.disk_write /= 5;
  truth.machine.rates.disk_mixed /= 5;
  now = corrected();
  EXPECT_NEAR(step(now), step(truth), 0.05 * step(truth));
  EXPECT_LT(now.machine.rates.disk_read, 0.5 * profile_.machine.rates.disk_read);
  EXPECT_LT(now.machine.rates.disk_write, 0.5 * profile_.machine.rates.disk_write);
  EXPECT_LT(now.machine.rates.disk_mixed, 0.5 * profile_.machine.rates.disk_mixed);
  truth = profile_;
  for (auto& [name, rate] : truth.machine.update) rate /= 20;
  now = corrected();
  EXPECT_NEAR(step(now), step(truth), 0.05 * step(truth));
  EXPECT_LT(now.machine.update.at("fp32-master+adam8"), 0.1 * profile_.machine.update.at("fp32-master+adam8"));
  // One lane's updates are those of the device too, and its copies from there those that round on the way.
  EXPECT_LT(now.machine.device_update.at("fp32-master+adam8"),
            0.1 * profile_.machine.device_update.at("fp32-master+adam8"));
  truth = profile_;
  truth.machine.rates.download /= 100;
  truth.machine.rates.cast /= 100;
  now = corrected();
  EXPECT_LT(now.machine.rates.download, 0.1 * profile_.machine.rates.download);
  EXPECT_LT(now.machine.rates.cast, 0.1 * profile_.machine.rates.cast);
}

// What was measured beside other programs gives way to a run of its own; what was measured alone does not give way to a
// run beside others.
TEST_F(Corrections, FollowWhatCanBeTrustedMore) {
  Profile truth = profile_;
  for (auto& [name, stage] : truth.model.stages) stage.seconds.backward *= 40;
  const Verdict busy = judge(spec_, plan_, profile_, steps_of(truth), 1.5);
  EXPECT_FALSE(busy.corrected);
  EXPECT_NE(busy.line.find("other programs took 1.5 of the 2 cores"), std::string::npos) << busy.line;
  const Verdict uneven = judge(spec_, plan_, profile_, steps_of(truth, 0.4), 0);
  EXPECT_FALSE(uneven.corrected);
  EXPECT_NE(uneven.line.find("apart"), std::string::npos) << uneven.line;

  Profile of_a_busy_machine = truth;
  of_a_busy_machine.machine.readings.other_cores = of_a_busy_machine.model.readings.other_cores = 1.8;
  const Verdict quiet = judge(spec_, plan_, of_a_busy_machine, steps_of(profile_), 0);
  ASSERT_TRUE(quiet.corrected) << quiet.line;
  EXPECT_NEAR(step(*quiet.corrected), step(profile_), 0.03 * step(profile_));
  EXPECT_TRUE(judge(spec_, plan_, of_a_busy_machine, steps_of(profile_), 1.5).corrected);
}

TEST_F(Corrections, TakeAFewStepsAndALaneThatExplainsThem) {
  Profile truth = profile_;
  for (auto& [name, stage] : truth.model.stages) stage.seconds.backward *= 40;
  std::vector<StepShown> steps = steps_of(truth);
  steps.resize(2);
  EXPECT_EQ(judge(spec_, plan_, profile_, steps, 0).line, "");
  steps = steps_of(profile_);
  for (StepShown& step : steps) step.seconds *= 3;  // the lanes took what was predicted
  const Verdict unexplained = judge(spec_, plan_, profile_, steps, 0);
  EXPECT_FALSE(unexplained.corrected);
  EXPECT_NE(unexplained.line.find("no lane"), std::string::npos) << unexplained.line;
}

// Activations that turn out larger than the profile said do not fit the host: the run goes on without swapping.
TEST_F(Corrections, AChoiceThatDoesNotFitIsDropped) {
  ComputeNeeds needs = profile_.model.needs(spec_);
  needs.activation_bytes.assign(spec_.stages.size(), 100 << 20);
  needs.swapped_bytes.assign(spec_.stages.size(), 6 << 20);
  needs.activation_bytes.back() = needs.swapped_bytes.back() = needs.activation_bytes[0] = needs.swapped_bytes[0] = 0;
  SessionOptions options = options_;
  const auto fits = [&](const SessionOptions& tried) {
    try {
      plan_session(spec_, tried, needs);
      return true;
    } catch (const Exception&) {
      return false;
    }
  };
  for (options.host_memory = 64 << 10; !fits(options); options.host_memory += 64 << 10) continue;
  options.swap_to_host = 6;
  options.deferred_share = 0.5;
  ASSERT_FALSE(fits(options));
  const SessionPlan plan = plan_that_fits(spec_, options, needs);
  EXPECT_EQ(plan.arrangement.count(swap::Activations::swap), 0);
  EXPECT_EQ(plan.deferred_parameters, 0U);
  options.host_memory = 64 << 10;  // too small for anything: refused, as ever
  EXPECT_THROW(plan_that_fits(spec_, options, needs), Exception);
}

}  // namespace
}  // namespace tierflow
