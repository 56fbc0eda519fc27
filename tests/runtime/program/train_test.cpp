// `tierflow train` in this process: device memory that runs out, and what its log tells of a card.
#include "runtime/program/train.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"
#include "runtime/program/run_record.h"
#include "runtime/program/training_log.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

namespace fs = std::filesystem;

TEST(TrainOutOfMemory, WritesWhatWasTrained) {
  const fs::path folder = fs::current_path() / ("train-memory-test-" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 300,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "model_type": "llama"})";
  std::ofstream data(folder / "data.txt");
  for (int i = 0; i < 5000; ++i) data << "line " << i * i << '\n';
  data.close();

  TrainOptions options;
  options.config = folder / "config.json";
  options.data = {folder / "data.txt"};
  options.out = folder / "out";
  options.log_json = folder / "log.jsonl";
  options.device = "cpu";
  options.device_memory = options.host_memory = std::uint64_t{64} << 20;
  options.sequence_length = 32;
  options.steps = 1'000'000;

  // Takes the memory away once some steps are done.
  std::atomic<bool> done = false;
  std::thread other([&] {
    const auto steps_logged = [&] {
      std::ifstream log(options.log_json);
      std::string line;
      int steps = 0;
      while (std::getline(log, line)) steps += line.find("tokens_per_s") != std::string::npos;
      return steps;
    };
    while (!done && steps_logged() < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    DeviceMemory::install().set_cap(0);
    while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  ::testing::internal::CaptureStderr();
  const int code = run_train(options);
  const std::string said = ::testing::internal::GetCapturedStderr();
  done = true;
  other.join();
  DeviceMemory::install().set_cap(DeviceMemory::kNoCap);
  EXPECT_EQ(code, static_cast<int>(io::ErrorKind::memory)) << said;
  EXPECT_NE(said.find("stopped after step "), std::string::npos) << said;
  EXPECT_NE(said.find("the device budget leaves"), std::string::npos) << said;
  EXPECT_TRUE(fs::exists(folder / "out" / "model.safetensors")) << said;
  fs::remove_all(folder);
}

TEST(TrainingLogOfAGpu, StepsTellPowerAndEnergyOfEachToken) {
  DeviceMemory::install();
  constexpr std::uint64_t room = std::uint64_t{64} << 20;
  const Session session({make_model(parse_model_spec(cases().front().json, "llama")),
                         [](const TensorSpec&, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 0.0F); }},
                        {.device_memory = room, .host_memory = room, .sequence_length = 16});
  const fs::path path = fs::current_path() / ("gpu-log-test-" + std::to_string(::getpid()));
  {
    TrainingLog log(path, false);
    log.begin();
    log.step({.step = 1, .tokens = 16, .seconds = 1}, 3, 1e-3, session);
    log.watch(GpuMonitor::open("0000:65:00.0", TIERFLOW_FAKE_NVML));
    log.step({.step = 2, .tokens = 16, .seconds = 1}, 3, 1e-3, session);
    log.evaluation(2, Evaluation{.loss = 1.0}, session);  // takes energy of its own
    log.step({.step = 3, .tokens = 16, .seconds = 1}, 3, 1e-3, session);
  }
  std::ifstream file(path);
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(file, line);)
    if (const auto object = nlohmann::json::parse(line); object.contains("tokens_per_s")) steps.push_back(object);
  fs::remove(path);
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_FALSE(steps[0].contains("gpu"));
  for (const int step : {1, 2})
    EXPECT_EQ(steps[step]["gpu"],
              nlohmann::json(
                  {{"utilisation", 0.87}, {"power_w", 123.4}, {"energy_j", 6.0}, {"energy_per_token_j", 6.0 / 16}}));
}

TEST(BestEvaluation, CountsThoseThatAreNoBetterByTheThreshold) {
  BestEvaluation best;
  const auto take = [&](std::int64_t step, double loss, double threshold) {
    best.take(step, loss, threshold);
    return best.step == step;
  };
  EXPECT_TRUE(take(10, 4.0, 0.5));
  EXPECT_TRUE(take(20, 3.8, 0.5));  // the best so far, but not by enough
  EXPECT_EQ(best.since, 1);
  EXPECT_FALSE(take(30, 3.9, 0.5));
  EXPECT_FALSE(take(40, NAN, 0.5));
  EXPECT_EQ(best.since, 3);
  EXPECT_EQ(best.step, 20);
  EXPECT_TRUE(take(50, 3.2, 0.5));
  EXPECT_EQ(best.since, 0);
  EXPECT_EQ(best.loss, 3.2);
  EXPECT_FALSE(take(60, 3.2, 0));
  EXPECT_EQ(best.since, 1);
}

TEST(RunRecord, IsReadBack) {
  const RunRecord record{.configuration = "0123456789abcdef",
                         .skipped_in_a_row = 3,
                         .held_out_before = 5.25,
                         .last_loss = NAN,
                         .best = {.loss = 4.5, .step = 20, .since = 2},
                         .evaluated = 40,
                         .evaluated_sequences = 64,
                         .exported = 10,
                         .exported_loss = 4.75};
  EXPECT_EQ(RunRecord::parse(record.json()).json(), record.json());
  // What an earlier version wrote, or nobody.
  EXPECT_EQ(RunRecord::parse(R"({"skipped_in_a_row": 1, "held_out_before": 2.5, "last_loss": 3})").skipped_in_a_row, 1);
  EXPECT_EQ(RunRecord::parse("").json(), RunRecord().json());
}

}  // namespace
}  // namespace tierflow::testing
