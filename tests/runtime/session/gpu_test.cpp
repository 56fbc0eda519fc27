// What only a GPU can show: streamed is resident in deterministic mode, nothing leaks, memory that runs out costs a
// step at most. Skips without one; what the CPU device can show of it runs everywhere.
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/utils.h>
#include <unistd.h>

#include <chrono>
#include <fstream>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/key_value_cache.h"
#include "runtime/optimizer/adamw8bit.h"
#include "runtime/session/profiler.h"
#include "runtime/session/session.h"
#include "swap/device.h"
#include "tests/runtime/models/fixture.h"

// Null where no sanitizer is linked.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes() __attribute__((weak));

namespace tierflow::testing {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
};

std::vector<MicroBatch> batches(int step) {
  std::vector<MicroBatch> all;
  for (int i = 0; i < 2; ++i) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + i);
    const auto tokens = torch::randint(96, {2, 17}, generator, torch::kLong);
    all.push_back({.ids = tokens.narrow(1, 0, 16).contiguous(), .labels = tokens.narrow(1, 1, 16).contiguous()});
  }
  return all;
}

std::unique_ptr<Session> session_of(const Case& which, const SessionOptions& options) {
  return std::make_unique<Session>(Model{make_model(parse_model_spec(which.json, which.name)),
                                         [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                                           initial_values(tensor, 11, first, out);
                                         }},
                                   options, AdamW{.lr = 3e-3});
}

// uses_spare_device_memory: as in SessionOptions; where not, state is the host's.
Outcome run(const Case& which, bool stream, std::optional<double> clip, double device_update_share = 0,
            bool uses_spare_device_memory = true) {
  SessionOptions options{.device = "cuda",
                         .device_memory = 2048 * kMiB,  // the context counts
                         .host_memory = 64 * kMiB,
                         .clip = clip,
                         .device_update_share = device_update_share,
                         .uses_spare_device_memory = uses_spare_device_memory,
                         .micro_batch = 2,
                         .micro_batches = 2,
                         .sequence_length = 16};
  if (stream) {
    options.storage = {std::filesystem::current_path() / "gpu-test"};
    options.allow_buffered = options.allow_any_filesystem = true;
    options.host_memory = 150 * 1024;
  }
  const auto session = session_of(which, options);
  Outcome outcome;
  for (int step = 0; step < 4; ++step) {
    const StepResult result = session->step(batches(step));
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  const ModelSpec& spec = session->model().spec();
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t tensor = 0; tensor < spec.units[unit].tensors.size(); ++tensor)
      outcome.masters.push_back(session->master(static_cast<int>(unit), static_cast<int>(tensor)));
  return outcome;
}

bool install_memory(const std::string& device) {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);  // read when cuBLAS is first used
  DeviceMemory::install();
  at::globalContext().setDeterministicAlgorithms(false, false);
  if (device == "cuda") {
    if (!swap::cuda_available()) return false;
    DeviceMemory::cuda();
  }
  return true;
}

DeviceMemory& memory_of(const std::string& device) {
  return device == "cuda" ? DeviceMemory::cuda() : DeviceMemory::install();
}

// Room for the context of a card, which counts against the budget.
std::uint64_t device_budget(const std::string& device) {
  return (device == "cuda" ? 2048 : 64) * kMiB;
}

std::unique_ptr<Session> small_session(const std::string& device, const std::filesystem::path& storage = {}) {
  const Case llama = cases("0.1").front();
  SessionOptions options{.device = device,
                         .device_memory = device_budget(device),
                         .host_memory = 64 * kMiB,
                         .micro_batch = 2,
                         .micro_batches = 2,
                         .sequence_length = 16};
  if (!storage.empty()) {
    options.storage = {storage};
    options.allow_buffered = options.allow_any_filesystem = true;
    options.host_memory = 150 * 1024;
  }
  return session_of(llama, options);
}

bool sanitized() {
  return __sanitizer_get_current_allocated_bytes != nullptr;
}

// Bytes in live allocations. Under a sanitizer resident memory grows without a leak: freed blocks are held back.
std::uint64_t live_bytes() {
  if (sanitized()) return __sanitizer_get_current_allocated_bytes();
  const struct mallinfo2 heap = mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

std::uint64_t resident_pages() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident;
}

class Devices : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!install_memory(GetParam())) GTEST_SKIP() << "no CUDA device here";
  }
};

// A thousand steps from storage hold no more than a hundred.
TEST_P(Devices, AThousandStepsLeakNothing) {
  const std::filesystem::path storage = std::filesystem::current_path() / ("leak-test-" + std::to_string(::getpid()));
  {
    const auto session = small_session(GetParam(), storage);
    const auto same = batches(0);
    std::uint64_t used = 0, live = 0, pages = 0, free = 0;
    for (int step = 1; step <= 1000; ++step) {
      session->step(same);
      if (step == 100) {
        used = memory_of(GetParam()).stats().used;
        live = live_bytes();
        pages = resident_pages();
        free = swap::cuda_bytes_free(0);
      }
    }
    EXPECT_LE(memory_of(GetParam()).stats().used, used + 64 * 1024);
    EXPECT_LT(live_bytes(), live + kMiB) << "900 steps left " << live_bytes() - live << " bytes allocated";
    if (!sanitized()) {
      EXPECT_LT(resident_pages(), pages + (8 << 20) / 4096)
          << "900 steps took " << resident_pages() - pages << " pages";
    }
    if (GetParam() == "cuda") {
      EXPECT_GE(swap::cuda_bytes_free(0) + 16 * kMiB, free);
    }
  }
  std::filesystem::remove_all(storage);
}

TEST_P(Devices, MemoryThatRunsOutCostsTheStepAlone) {
  const auto session = small_session(GetParam());
  const auto first = batches(0), second = batches(1);
  session->step(first);
  const auto before = session->master(1, 0);
  DeviceMemory& memory = memory_of(GetParam());
  memory.release_kept();
  memory.set_cap(memory.stats().held);
  std::vector<torch::Tensor> room;  // that is left in the blocks of live tensors
  if (GetParam() == "cuda") {
    EXPECT_THROW(for (;;) room.push_back(torch::empty({512}, torch::device(torch::kCUDA).dtype(torch::kByte))),
                 c10::OutOfMemoryError);
  }
  try {
    session->step(second);
    FAIL() << "no memory was left";
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().kind, io::ErrorKind::memory);
  }
  room.clear();
  memory.set_cap(device_budget(GetParam()));
  ASSERT_TRUE(session->intact());
  EXPECT_EQ(session->master(1, 0), before);
  EXPECT_EQ(session->step(second).step, 2);
}

INSTANTIATE_TEST_SUITE_P(All, Devices, ::testing::Values("cpu", "cuda"), [](const auto& info) { return info.param; });

// What deterministic mode costs; said, not judged.
TEST(OneGpu, CostOfDeterminism) {
  if (!install_memory("cuda")) GTEST_SKIP() << "no CUDA device here";
  double seconds[2] = {};
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    const auto session = small_session("cuda");
    const auto same = batches(0);
    for (int i = 0; i < 5; ++i) session->step(same);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 50; ++i) session->step(same);
    seconds[deterministic] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 50;
  }
  std::printf("a step of a small model: %.2f ms, deterministic %.2f ms (%.2f times)\n", 1e3 * seconds[0],
              1e3 * seconds[1], seconds[1] / seconds[0]);
}

TEST(OneGpu, MeasuresItsUpdate) {
  if (!install_memory("cuda")) GTEST_SKIP() << "no CUDA device here";
  const MachineProfile profile = measure_machine({.device = "cuda"}, Length::whole, [](const std::string&) {});
  EXPECT_EQ(profile.device_update.size(), profile.update.size());
  for (const auto& [name, rate] : profile.device_update) {
    EXPECT_GT(rate, 0) << name;
    std::printf("updates of %s: %.2f G/s here, %.2f G/s on the host\n", name.c_str(), rate / 1e9,
                profile.update.at(name) / 1e9);
  }
}

TEST(OneGpu, AdamW8bitHasTheBitsOfTheCpu) {
  if (!install_memory("cuda")) GTEST_SKIP() << "no CUDA device here";
  for (const auto type : {torch::kFloat32, torch::kBFloat16}) {
    torch::manual_seed(1);
    torch::Tensor here = torch::randn({3 * 64 * 1024 + 777}).to(type).requires_grad_(),
                  few = torch::randn({100}).to(type).requires_grad_();
    torch::Tensor there = here.detach().to(torch::kCUDA).requires_grad_(),
                  few_there = few.detach().to(torch::kCUDA).requires_grad_();
    AdamW8bit on_cpu({here, few}, AdamW8bitOptions(1e-2)), on_gpu({there, few_there}, AdamW8bitOptions(1e-2));
    for (int step = 0; step < 5; ++step) {
      here.mutable_grad() = torch::randn(here.sizes()).to(type);
      few.mutable_grad() = torch::randn(few.sizes()).to(type);
      if (step == 3) here.mutable_grad()[77] = INFINITY;  // skips the step
      there.mutable_grad() = here.grad().to(torch::kCUDA);
      few_there.mutable_grad() = few.grad().to(torch::kCUDA);
      on_cpu.step();
      on_gpu.step();
      EXPECT_TRUE(torch::equal(there.detach().cpu(), here.detach())) << step;
      EXPECT_TRUE(torch::equal(few_there.detach().cpu(), few.detach())) << step;
    }
    EXPECT_EQ(on_cpu.skipped_steps(), 1);
    EXPECT_EQ(on_gpu.skipped_steps(), 1);
  }
}

class OnGpu : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!install_memory("cuda")) GTEST_SKIP() << "no CUDA device here";
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
};

// A step's loss and norm, and the logits behind a prompt, token by token.
TEST_P(OnGpu, ComputesWhatTheCpuDoes) {
  const Case which = case_called(GetParam().name);  // without dropout, whose masks are each device's own
  std::vector<StepResult> steps;
  std::vector<torch::Tensor> logits;
  for (const char* device : {"cpu", "cuda"}) {
    const auto session = session_of(which, {.device = device,
                                            .device_memory = device_budget(device),
                                            .host_memory = 64 * kMiB,
                                            .micro_batch = 2,
                                            .micro_batches = 2,
                                            .sequence_length = 16});
    steps.push_back(session->step(batches(0)));
    const auto generates = session_of(which, {.device = device,
                                              .device_memory = device_budget(device),
                                              .host_memory = 64 * kMiB,
                                              .sequence_length = 16,
                                              .train = false});
    KeyValueCache cache(generates->model().spec(), {8});
    for (const auto& [begin, end] : {std::pair{0, 5}, {5, 6}, {6, 7}, {7, 8}})
      logits.push_back(generates
                           ->next_logits({{.ids = torch::arange(begin, end).unsqueeze(0),
                                           .spans = {{.sequence = 0, .length = end - begin, .before = begin}},
                                           .cache = &cache}})
                           .at(0)[0]
                           .cpu()
                           .to(torch::kDouble));
  }
  EXPECT_NEAR(steps[1].loss, steps[0].loss, 1e-2 * steps[0].loss);
  EXPECT_NEAR(steps[1].grad_norm, steps[0].grad_norm, 3e-2 * steps[0].grad_norm);
  for (std::size_t i = 0; i < logits.size() / 2; ++i) {
    const torch::Tensor here = logits[i], there = logits[i + logits.size() / 2];
    EXPECT_LT((there - here).norm().item<double>(), 3e-2 * here.norm().item<double>()) << i;
  }
}

TEST_P(OnGpu, StreamedIsResident) {
  for (const std::optional<double> clip : {std::optional<double>(0.05), std::optional<double>()}) {
    const Outcome expected = run(GetParam(), false, clip), streamed = run(GetParam(), true, clip);
    EXPECT_EQ(streamed.losses, expected.losses);
    EXPECT_EQ(streamed.norms, expected.norms);
    EXPECT_EQ(streamed.masters, expected.masters);
  }
}

// Updates on the card have the bits of those on the host, in memory and streamed, and where state stays on the card.
TEST_P(OnGpu, UpdatesHaveTheBitsOfTheHost) {
  for (const std::optional<double> clip : {std::optional<double>(0.05), std::optional<double>()}) {
    const Outcome expected = run(GetParam(), false, clip, 0, /*uses_spare_device_memory=*/false);
    for (const bool stream : {false, true})
      for (const bool stays : {false, true}) {
        const Outcome there = run(GetParam(), stream, clip, stays ? 0 : 1, stays);
        EXPECT_EQ(there.losses, expected.losses);
        EXPECT_EQ(there.norms, expected.norms);
        EXPECT_EQ(there.masters, expected.masters);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, OnGpu, ::testing::ValuesIn(cases_with_balance("0.1")), case_name);

}  // namespace
}  // namespace tierflow::testing
