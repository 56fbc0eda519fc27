// What `tierflow plan` measures and how often, with measurements that are made up.
#include "runtime/program/plan_command.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "runtime/base/files.h"
#include "runtime/program/session_settings.h"
#include "runtime/spec/stage_class.h"
#include "tests/runtime/expect.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

TEST(SessionSettings, ABudgetThatTheCardHasNotIsRefused) {
  constexpr std::uint64_t GiB = std::uint64_t{1} << 30;
  EXPECT_NO_THROW(check_device_memory(24 * GiB, 2 * GiB, 22 * GiB)) << "what the device's use took is part of a budget";
  EXPECT_NO_THROW(check_device_memory(24 * GiB, 0, 0)) << "nobody knows what is free";
  expect_refusal(io::ErrorKind::usage, {"--device-memory asks for 40.0 GiB", "the card has 22.5 GiB free"},
                 [] { check_device_memory(40 * GiB, GiB / 2, 22 * GiB); });
}

// The machine is one and the same for every shape of the step; each micro-batch has stages of its own.
TEST(PlanCommand, MeasuresTheMachineOnceForAllShapesOfAStep) {
  const TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  PlanOptions options;
  options.config = folder.path() / "config.json";
  write_text(options.config,
             R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":64,)"
             R"("intermediate_size":96,"num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,)"
             R"("max_position_embeddings":128,"rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu"})");
  options.device = "cpu";
  options.device_memory = options.host_memory = 32 << 20;
  options.storage = {folder.path()};
  options.sequence_length = 64;
  options.tokens_per_step = 4 * 64;
  options.json = true;
  int machines = 0, models = 0;
  const auto measure = [&](const ProfileJob& job) {
    if (job.machine != nullptr) {
      ++machines;
      job.machine->rates = {.disk_read = 2e9 + machines, .disk_write = 1e9, .upload = 5e9, .cores = 2, .threads = 2};
    }
    if (job.model == nullptr) return;
    ++models;
    *job.model = {.stage_peak = 1 << 20, .micro_batch_bytes = 1 << 16, .held_peak = 1 << 20};
    for (int stage = 0; stage < static_cast<int>(job.spec.stages.size()); ++stage)
      job.model->stages[stage_class(job.spec, stage)] = {
          .carry_bytes = 8192, .seconds = {.forward = 1e-3, .backward = 2e-3, .head = 4e-3, .evaluate = 1e-3}};
  };
  const auto plan = [&] {
    ::testing::internal::CaptureStdout();
    const int code = run_plan(options, measure);
    const auto report = nlohmann::json::parse(::testing::internal::GetCapturedStdout());
    EXPECT_EQ(code, 0);
    EXPECT_EQ(report["step_shapes"].size(), 3U);  // 1, 2 and 4 sequences
    return report;
  };
  EXPECT_EQ(plan()["machine"]["disk_read"], 2e9 + 1);
  EXPECT_EQ(machines, 1);
  EXPECT_EQ(models, 3);
  options.refresh_profile = true;
  EXPECT_EQ(plan()["machine"]["disk_read"], 2e9 + 2);
  EXPECT_EQ(machines, 2);
  EXPECT_EQ(models, 6);
  options.refresh_profile = false;
  EXPECT_EQ(plan()["machine"]["disk_read"], 2e9 + 2);
  EXPECT_EQ(machines, 2);
  EXPECT_EQ(models, 6);
}

}  // namespace
}  // namespace tierflow::testing
