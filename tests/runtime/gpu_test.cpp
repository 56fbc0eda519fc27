// Streamed is resident on the GPU too, in deterministic mode. Skips without one.
#include <gtest/gtest.h>

#include "runtime/device_memory.h"
#include "runtime/init.h"
#include "runtime/session.h"
#include "swap/device.h"
#include "tests/runtime/models_fixture.h"

namespace tierflow::testing {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
};

Outcome run(const Case& which, bool stream, std::optional<double> clip) {
  SessionOptions options{.device = "cuda",
                         .device_memory = 1024 * kMiB,
                         .host_memory = 64 * kMiB,
                         .clip = clip,
                         .micro_batch = 2,
                         .micro_batches = 2,
                         .sequence_length = 16};
  if (stream) {
    options.storage = {std::filesystem::current_path() / "gpu-test"};
    options.allow_buffered = options.allow_any_filesystem = true;
    options.host_memory = 150 * 1024;
  }
  Session session({make_model(parse_model_spec(which.json, which.name)),
                   [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                     initial_values(tensor, 11, first, out);
                   }},
                  options, {.lr = 3e-3});
  Outcome outcome;
  for (int step = 0; step < 4; ++step) {
    std::vector<MicroBatch> batches;
    for (int i = 0; i < 2; ++i) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + i);
      const auto tokens = torch::randint(96, {2, 17}, generator, torch::kLong);
      batches.push_back({.ids = tokens.narrow(1, 0, 16).contiguous(), .labels = tokens.narrow(1, 1, 16).contiguous()});
    }
    const StepResult result = session.step(batches);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  const ModelSpec& spec = session.model().spec();
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t tensor = 0; tensor < spec.units[unit].tensors.size(); ++tensor)
      outcome.masters.push_back(session.master(static_cast<int>(unit), static_cast<int>(tensor)));
  return outcome;
}

class OnGpu : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
    DeviceMemory::install();
    DeviceMemory::cuda();
    at::globalContext().setDeterministicAlgorithms(true, false);
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);
  }
};

TEST_P(OnGpu, StreamedIsResident) {
  for (const std::optional<double> clip : {std::optional<double>(0.05), std::optional<double>()}) {
    const Outcome expected = run(GetParam(), false, clip), streamed = run(GetParam(), true, clip);
    EXPECT_EQ(streamed.losses, expected.losses);
    EXPECT_EQ(streamed.norms, expected.norms);
    EXPECT_EQ(streamed.masters, expected.masters);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, OnGpu, ::testing::ValuesIn(cases("0.1")), case_name);

}  // namespace
}  // namespace tierflow::testing
