// The CUDA device over the stand-in for its runtime: what only CUDA has, and every call and every work failing once.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <numeric>
#include <vector>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/host_memory.h"
#include "swap/pinning.h"
#include "swap/planner.h"
#include "tests/support/cuda/standin.h"
#include "tests/swap/devices_under_test.h"

namespace tierflow::swap {
namespace {

namespace cuda = testing::cuda;
using namespace std::chrono_literals;

constexpr std::size_t kMiB = 1 << 20;
constexpr int kDevice = cuda::kDevices - 1;

std::vector<float> some_floats(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 8191) * 1.0009765625F - 3;
  return values;
}

// Holds a stream up until it is opened, or for 20 s, so that a failure is no hang.
class Gate {
 public:
  Gate(Device& device, StreamId stream) {
    compute_on(device, stream, [opened = opened_.get_future().share()] { opened.wait_for(20s); });
  }
  ~Gate() { open(); }
  void open() {
    if (!std::exchange(is_open_, true)) opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  bool is_open_ = false;
};

TEST(CudaDevice, CopiesDoNotWaitForComputationNorForEachOther) {
  const auto device = open_toy_device(0);
  const auto memory = HostMemory::create(std::vector<std::size_t>(2, kMiB), *device).value();
  const io::Buffer arena = device->allocate(2 * kMiB).value();
  const Gate computation(*device, StreamId::compute), update(*device, StreamId::update);
  std::ranges::fill(memory->buffer(0), std::byte{1});
  const auto in_time = [&](StreamId stream) {
    const Event moved = device->record(stream);
    auto waits = std::async(std::launch::async, [&] { return device->synchronize(moved); });
    return waits.wait_for(10s) == std::future_status::ready && !waits.get();
  };
  device->copy_to_device(StreamId::upload, arena.data(), memory->buffer(0).data(), kMiB);
  EXPECT_TRUE(in_time(StreamId::upload));
  const Gate uploads(*device, StreamId::upload);
  device->copy_to_host(StreamId::download, memory->buffer(1).data(), arena.data(), kMiB);
  EXPECT_TRUE(in_time(StreamId::download));
  EXPECT_EQ(memory->buffer(1).back(), std::byte{1});
}

// The event's place in its stream is where it was recorded, whatever is enqueued later, and whoever waits for it waits
// on the device: this thread goes on.
TEST(CudaDevice, AStreamWaitsForAnEventAndTheHostDoesNot) {
  const auto device = open_toy_device(3);
  const auto memory = HostMemory::create(std::vector<std::size_t>(1, kMiB), *device).value();
  const io::Buffer arena = device->allocate(kMiB).value();
  for (int round = 1; round <= 20; ++round) {
    Gate computation(*device, StreamId::compute);
    compute_on(*device, StreamId::compute, [&arena, round] { std::memset(arena.data(), round, kMiB); });
    device->wait(StreamId::download, device->record(StreamId::compute));
    device->copy_to_host(StreamId::download, memory->buffer(0).data(), arena.data(), kMiB);
    const Event arrived = device->record(StreamId::download);
    computation.open();
    ASSERT_FALSE(device->synchronize(arrived));
    ASSERT_EQ(memory->buffer(0).front(), static_cast<std::byte>(round));
    ASSERT_EQ(memory->buffer(0).back(), static_cast<std::byte>(round));
  }
}

TEST(CudaDevice, GradientsLargerThanTheBounceBuffer) {
  const auto device = open_toy_device(2);
  const std::size_t elements = (std::size_t{9} << 20) + 3;
  const io::Buffer arena = device->allocate(4 * elements).value();
  const std::vector<float> values = some_floats(elements);
  std::vector<std::uint16_t> rounded(elements);
  device->copy_to_device(StreamId::upload, arena.data(), reinterpret_cast<const std::byte*>(values.data()),
                         4 * elements);
  ASSERT_FALSE(device->synchronize(device->record(StreamId::upload)));
  const std::uint64_t before = cuda_bytes_free(kDevice);
  device->gradient_to_host(StreamId::download, rounded.data(), reinterpret_cast<const float*>(arena.data()), elements);
  ASSERT_FALSE(device->synchronize(device->record(StreamId::download)));
  EXPECT_EQ(before - cuda_bytes_free(kDevice), kBounceBytes) << "no more than the device budget is told";
  for (std::size_t i = 0; i < elements; ++i) ASSERT_EQ(rounded[i], gradient_to_bf16(values[i])) << i;
}

// The kernel's body, each of its threads in turn: numbers of elements around eight a thread, a thread block and a grid.
TEST(CudaDevice, TheRoundingKernelWritesEachElementOnceAndNothingElse) {
  const auto device = open_toy_device(0);
  const std::size_t thread = 8, block = 256 * thread, grid = 64 * block;
  const std::vector<float> values = some_floats(2 * grid + 17);
  const io::Buffer from = device->allocate(4 * values.size()).value();
  device->copy_to_device(StreamId::upload, from.data(), reinterpret_cast<const std::byte*>(values.data()),
                         4 * values.size());
  ASSERT_FALSE(device->synchronize(device->record(StreamId::upload)));
  for (const std::size_t around : {thread, block, grid, 2 * grid})
    for (const std::size_t elements : {around - 1, around, around + 1, around + 7, around + 9}) {
      const io::Buffer to = device->allocate(2 * (elements + 64)).value();
      device->round_gradient(StreamId::update, reinterpret_cast<std::uint16_t*>(to.data()),
                             reinterpret_cast<const float*>(from.data()), elements);
      ASSERT_FALSE(device->synchronize(device->record(StreamId::update)));
      const auto* words = reinterpret_cast<const std::uint16_t*>(to.data());
      for (std::size_t i = 0; i < elements; ++i)
        ASSERT_EQ(words[i], gradient_to_bf16(values[i])) << i << " of " << elements;
      for (std::size_t i = elements; i < elements + 64; ++i) ASSERT_EQ(words[i], 0xffff) << i << " of " << elements;
    }
}

// A mixture's gradient is cut where experts without tokens begin, which may be any element.
TEST(CudaDevice, APartOfAGradientThatBeginsAnywhereIsRounded) {
  cuda::start({.seed = 7});
  const auto device = open_cuda_device(kDevice).value();
  const auto memory = HostMemory::create(std::vector<std::size_t>{kMiB}, *device).value();
  const std::vector<float> values = some_floats(100);
  const io::Buffer from = device->allocate(4 * values.size()).value();
  device->copy_to_device(StreamId::download, from.data(), reinterpret_cast<const std::byte*>(values.data()),
                         4 * values.size());
  auto* to = reinterpret_cast<std::uint16_t*>(memory->buffer(0).data());
  for (std::size_t begin = 0; begin < 9; ++begin) {
    std::fill_n(to, values.size(), std::uint16_t{0x1234});
    device->gradient_to_host(StreamId::download, to + begin, reinterpret_cast<const float*>(from.data()) + begin, 61);
    ASSERT_FALSE(device->synchronize(device->record(StreamId::download)));
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(to[i], i >= begin && i < begin + 61 ? gradient_to_bf16(values[i]) : 0x1234) << i << " of " << begin;
  }
}

// A kernel of default priority waits for a wave of the matrix product that fills the device. Copies need none.
TEST(CudaDevice, StreamsWithKernelsHavePriority) {
  const auto device = open_toy_device(0);
  for (const StreamId stream : {StreamId::upload, StreamId::download, StreamId::update, StreamId::round}) {
    int priority = 1;
    device->enqueue(stream, [&](const DeviceQueue& queue) {
      EXPECT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(queue.stream), &priority), cudaSuccess);
    });
    const bool kernels = stream == StreamId::update || stream == StreamId::round;
    EXPECT_EQ(priority, kernels ? cuda::kGreatestPriority : 0) << static_cast<int>(stream);
  }
}

// The refused allocation is the caller's to handle; the next launch on this thread has not failed.
TEST(CudaDevice, ARefusedAllocationLeavesNoErrorBehind) {
  cuda::start({.device_bytes = 64 * kMiB});
  const auto device = open_cuda_device(kDevice).value();
  const io::Buffer held = device->allocate(16 * kMiB).value();
  const auto refused = device->allocate(128 * kMiB);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, io::ErrorKind::memory);
  EXPECT_NE(refused.error().message().find("50331648 bytes are free: give a smaller device budget"), std::string::npos)
      << refused.error().message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaDevice, NothingToRoundLaunchesNothing) {
  const auto device = open_toy_device(0);
  const io::Buffer arena = device->allocate(64).value();
  device->round_gradient(StreamId::update, reinterpret_cast<std::uint16_t*>(arena.data()), nullptr, 0);
  EXPECT_FALSE(device->synchronize(device->record(StreamId::update)));
}

// The system grants 100 MiB of 192: the first 64 are pinned, and copies across the border are cut there.
TEST(CudaDevice, CopiesOfMemoryThatIsPinnedInPart) {
  cuda::start({.seed = 4, .pinned_bytes = 100 * kMiB});
  const auto device = open_cuda_device(kDevice).value();
  const auto memory = HostMemory::create(std::vector<std::size_t>{192 * kMiB}, *device).value();
  EXPECT_NE(memory->pin_note().find("64 MiB could be pinned (cudaErrorMemoryAllocation)"), std::string::npos)
      << memory->pin_note();
  const io::Buffer arena = device->allocate(4 * kMiB).value();
  const auto around = memory->buffer(0).subspan(62 * kMiB, 4 * kMiB);
  for (std::size_t i = 0; i < around.size(); ++i) around[i] = static_cast<std::byte>(i * 11 >> 3);
  const std::vector<std::byte> before(around.begin(), around.end());
  device->copy_to_device(StreamId::upload, arena.data(), around.data(), around.size());
  ASSERT_FALSE(device->synchronize(device->record(StreamId::upload)));
  std::ranges::fill(around, std::byte{0});
  device->copy_to_host(StreamId::download, around.data(), arena.data(), around.size());
  ASSERT_FALSE(device->synchronize(device->record(StreamId::download)));
  EXPECT_EQ(std::memcmp(before.data(), around.data(), before.size()), 0);
  device->gradient_to_host(StreamId::download, reinterpret_cast<std::uint16_t*>(around.data() + kMiB),
                           reinterpret_cast<const float*>(arena.data()), kMiB);
  ASSERT_FALSE(device->synchronize(device->record(StreamId::download)));
  for (std::size_t i = 0; i < kMiB; ++i) {
    float value = 0;
    std::uint16_t word = 0;
    std::memcpy(&value, before.data() + 4 * i, 4);
    std::memcpy(&word, around.data() + kMiB + 2 * i, 2);
    ASSERT_EQ(word, gradient_to_bf16(value)) << i;
  }
}

// Memory may go as soon as it is no longer pinned: what is under way ends first.
TEST(CudaDevice, UnpinningWaitsForCopies) {
  const auto device = open_toy_device(6);
  const io::Buffer arena = device->allocate(kMiB).value();
  for (const StreamId stream : {StreamId::upload, StreamId::download, StreamId::update}) {
    const auto memory = HostMemory::create(std::vector<std::size_t>(1, kMiB), *device).value();
    if (stream == StreamId::upload)
      device->copy_to_device(stream, arena.data(), memory->buffer(0).data(), kMiB);
    else
      device->copy_to_host(stream, memory->buffer(0).data(), arena.data(), kMiB);
  }
}

TEST(CudaDevice, TimesWhatWasRecordedWithTime) {
  const auto device = open_toy_device(0);
  const Event begin = device->record_timed(StreamId::compute), untimed = device->record(StreamId::compute);
  compute_on(*device, StreamId::compute, [] { std::this_thread::sleep_for(20ms); });
  const Event end = device->record_timed(StreamId::compute);
  ASSERT_FALSE(device->synchronize(end));
  EXPECT_GE(device->seconds_between(begin, end).value(), 0.02);
  EXPECT_LT(device->seconds_between(begin, end).value(), 20);
  EXPECT_FALSE(device->seconds_between(untimed, end).has_value());
  EXPECT_FALSE(device->seconds_between(begin, {}).has_value());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaDevice, SaysWhatItIs) {
  EXPECT_TRUE(cuda_available());
  const CudaDeviceInfo info = cuda_device_info(kDevice).value();
  EXPECT_EQ(info.name, "stand-in");
  EXPECT_EQ(info.pci_bus, "0000:66:00.0");
  EXPECT_EQ(info.bytes, std::uint64_t{1} << 30);
  const auto device = open_toy_device(0);
  const io::Buffer arena = device->allocate(kMiB).value();
  EXPECT_EQ(cuda_bytes_free(kDevice), info.bytes - kMiB);
  EXPECT_EQ(open_cuda_device(cuda::kDevices).error().kind, io::ErrorKind::environment);
  EXPECT_EQ(device->allocate(std::size_t{2} << 30).error().kind, io::ErrorKind::memory);
}

// Every call of the device and what it answers with, on threads of its own as lanes have: right bytes or an error.
struct Outcome {
  io::Error error;
  bool right = false;
};

Outcome use_everything() {
  static constexpr std::size_t kElements = 3000;
  auto opened = open_cuda_device(kDevice);
  if (!opened.ok()) return {opened.error()};
  Device& device = **opened;
  auto memory = HostMemory::create(std::vector<std::size_t>(3, 4 * 4096), device);
  if (!memory.ok()) return {memory.error()};
  auto arena = device.allocate(16 * kElements);
  if (!arena.ok()) return {arena.error()};
  const std::vector<float> values = some_floats(kElements);
  std::vector<std::uint16_t> pageable(kElements);
  const auto out = (*memory)->buffer(0).first(4 * kElements), back = (*memory)->buffer(1).first(4 * kElements),
             rounded = (*memory)->buffer(2).first(2 * kElements);
  std::memcpy(out.data(), values.data(), out.size());
  std::byte *sums = arena->data(), *on_device = sums + 8 * kElements;
  Event uploaded;
  io::Error failed = std::async(std::launch::async, [&] {
                       const Event begin = device.record_timed(StreamId::upload);
                       device.copy_to_device(StreamId::upload, sums, out.data(), 4 * kElements);
                       uploaded = device.record(StreamId::upload);
                       const Event end = device.record_timed(StreamId::upload);
                       const io::Error error = device.synchronize(end);
                       device.seconds_between(begin, end);
                       return error;
                     }).get();
  if (failed) return {failed};
  failed =
      std::async(std::launch::async, [&] {
        device.wait(StreamId::download, uploaded);
        device.copy_to_host(StreamId::download, back.data(), sums, 4 * kElements);
        const auto* from = reinterpret_cast<const float*>(sums);
        device.gradient_to_host(StreamId::download, reinterpret_cast<std::uint16_t*>(rounded.data()), from, kElements);
        device.gradient_to_host(StreamId::download, pageable.data(), from, kElements);
        return device.synchronize(device.record(StreamId::download));
      }).get();
  if (failed) return {failed};
  device.wait(StreamId::update, uploaded);
  device.round_gradient(StreamId::update, reinterpret_cast<std::uint16_t*>(on_device),
                        reinterpret_cast<const float*>(sums), kElements);
  device.wait(StreamId::compute, device.record(StreamId::update));
  std::atomic<bool> computed = false;
  compute_on(device, StreamId::compute, [&] { computed = true; });
  if (io::Error last = device.synchronize(device.record(StreamId::compute))) {
    cuda::finish();  // before `computed` goes
    return {last};
  }
  Outcome outcome{.right = computed && std::memcmp(out.data(), back.data(), out.size()) == 0};
  for (std::size_t i = 0; i < kElements; ++i) {
    const std::uint16_t expected = gradient_to_bf16(values[i]);
    std::uint16_t mapped = 0, updated = 0;
    std::memcpy(&mapped, rounded.data() + 2 * i, 2);
    std::memcpy(&updated, on_device + 2 * i, 2);
    outcome.right = outcome.right && mapped == expected && updated == expected && pageable[i] == expected;
  }
  return outcome;
}

// A small model, resident in host memory, two steps: its weights after them.
class Work final : public UpdateWork {
 public:
  io::Error measure(const Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte>) override {
    auto* word = reinterpret_cast<std::uint16_t*>(words.data());
    const auto* grad = reinterpret_cast<const std::uint16_t*>(gradient.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) word[i] = static_cast<std::uint16_t>(word[i] * 3 + grad[i]);
    return {};
  }
};

io::Error train(std::vector<std::uint16_t>& weights) {
  const auto unit = [](const char* name) {
    return UnitShape{.name = name, .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}};
  };
  const Layout layout({unit("first"), unit("middle"), unit("last")},
                      {{.units = {0}, .backward_needs_weights = false},
                       {.units = {1}, .carry_bytes = 4096},
                       {.units = {2}, .carry_bytes = 4096}},
                      kChunkQuantum);
  const Arrangement arrangement = arrange(layout, {.host_budget = 64 * kMiB,
                                                   .device_budget = 64 * kMiB,
                                                   .staged = false,
                                                   .gradient_slots = true,
                                                   .storage = false})
                                      .value();
  auto opened = open_cuda_device(kDevice);
  if (!opened.ok()) return opened.error();
  Device& device = **opened;
  auto executor = Executor::create(device, nullptr, layout, arrangement);
  if (!executor.ok()) return executor.error();
  const int chunks = static_cast<int>(layout.chunks().size());
  for (int id = 0; id < chunks; ++id)
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
      if (io::Error error = (*executor)->access(kind, id, true, [&](std::span<std::byte> bytes) {
            for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 5 + id);
          }))
        return error;
  Planner planner(layout, arrangement);
  const auto work = std::make_shared<Work>();
  for (int step = 0; step < 2; ++step) {
    (*executor)->append(planner.train_step(false), work);
    for (const auto& [stage, pass] :
         {std::pair{0, Pass::forward}, {1, Pass::forward}, {2, Pass::head}, {1, Pass::backward}, {0, Pass::backward}}) {
      auto entered = (*executor)->enter(stage, pass, 0);
      if (!entered.ok()) return entered.error();
      compute_on(device, StreamId::compute,
                 [visit = *entered->visit, arena = entered->arena, forward = pass == Pass::forward] {
                   if (forward) return;
                   auto* gradient = reinterpret_cast<float*>(arena + visit.gradients[0]);
                   const auto* words = visit.weights[0] == kNowhere
                                           ? nullptr
                                           : reinterpret_cast<const std::uint16_t*>(arena + visit.weights[0]);
                   for (int i = 0; i < 4096; ++i)
                     gradient[i] = static_cast<float>(words == nullptr ? i : words[i] & 0x7f);
                 });
      if (io::Error error = (*executor)->leave()) return error;
    }
    if (io::Error error = (*executor)->finish_updates()) return error;
  }
  if (io::Error error = (*executor)->drain()) return error;
  weights.clear();
  for (int id = 0; id < chunks; ++id)
    if (io::Error error = (*executor)->access(ExtentKind::hi, id, false, [&](std::span<std::byte> bytes) {
          const auto* words = reinterpret_cast<const std::uint16_t*>(bytes.data());
          weights.insert(weights.end(), words, words + bytes.size() / 2);
        }))
      return error;
  return {};
}

// `run` under each failure: it says so, or is right all the same; nothing is left behind, nothing hangs.
void expect_each_failure_told(const std::function<Outcome()>& run, std::uint64_t stride) {
  cuda::start({.seed = 7});
  const Outcome whole = run();
  ASSERT_FALSE(whole.error) << whole.error.message();
  ASSERT_TRUE(whole.right);
  const cuda::Report without = cuda::finish();
  ASSERT_GT(without.calls, 40U);
  ASSERT_GT(without.works, 4U);
  for (const auto& [count, field] :
       {std::pair{without.calls, &cuda::Settings::failing_call}, {without.works, &cuda::Settings::failing_work}}) {
    std::uint64_t told = 0, tried = 0;
    for (std::uint64_t n = 1; n <= count; n += stride) {
      cuda::Settings settings{.seed = n};
      settings.*field = n;
      cuda::start(settings);
      const Outcome outcome = run();
      ++tried;
      told += outcome.error ? 1 : 0;
      EXPECT_TRUE(outcome.error || outcome.right) << "failure " << n << " of " << count << " was not told";
      for (const std::string& fault : cuda::finish().faults) ADD_FAILURE() << "after failure " << n << ": " << fault;
    }
    EXPECT_GE(4 * told, tried) << "too few failures matter";
  }
  cuda::start({});
}

TEST(CudaDevice, EachCallAndEachWorkMayFail) {
  expect_each_failure_told(use_everything, 1);
}

TEST(CudaDevice, EachCallAndEachWorkOfATrainingRunMayFail) {
  cuda::start({});
  std::vector<std::uint16_t> expected;
  const io::Error failed = train(expected);
  ASSERT_FALSE(failed) << failed.message();
  ASSERT_EQ(expected.size(), 3U * 4096);
  expect_each_failure_told(
      [&] {
        std::vector<std::uint16_t> weights;
        const io::Error error = train(weights);
        return Outcome{error, weights == expected};
      },
      3);
}

}  // namespace
}  // namespace tierflow::swap
