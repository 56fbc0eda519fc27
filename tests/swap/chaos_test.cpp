// What makes a missing wait show in the tests: memory that nothing has come to holds no old bytes, and all comes late.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/faulty_store.h"
#include "tests/swap/no_work.h"
#include "tests/swap/sparse_stages.h"

namespace tierflow::swap {
namespace {

using testing::Fault;

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
}

TEST(Chaos, DeviceMemoryBeginsPoisoned) {
  const auto device = open_cpu_device({.chaos_seed = 1});
  const io::Buffer memory = device->allocate(64 << 10).value();
  EXPECT_TRUE(all_are({memory.data(), memory.size()}, std::byte{0xff}));
}

// Each takes some time more, 200 microseconds in the mean on a stream of the device and 250 on a lane.
TEST(Chaos, StreamsAndLanesAreLate) {
  const auto seconds_since = [](std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  auto began = std::chrono::steady_clock::now();
  const auto device = open_cpu_device({.chaos_seed = 1});
  for (int i = 0; i < 200; ++i) device->record(StreamId::upload);
  ASSERT_FALSE(device->synchronize(device->record(StreamId::upload)));
  EXPECT_GT(seconds_since(began), 0.02);

  const Layout layout = sparse_stages();
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false}).value();
  const auto plain = open_cpu_device();
  const auto executor = Executor::create(*plain, nullptr, layout, arrangement, {.chaos_seed = 1}).value();
  Plan plan;
  for (int i = 0; i < 200; ++i)
    plan.tasks.push_back({.kind = TaskKind::measure,
                          .lane = Lane::update,
                          .chunk = 0,
                          .gradient = resident_place(ExtentKind::gradient, 0)});
  began = std::chrono::steady_clock::now();
  executor->append(std::move(plan), std::make_shared<NoWork>());
  ASSERT_FALSE(executor->drain());
  EXPECT_GT(seconds_since(began), 0.025);
}

TEST(Chaos, AHostBufferIsPoisonedUntilItsReadEnds) {
  const Layout layout = sparse_stages();
  const testing::TempDir folder;
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = Store::create(over_faults(folder.path(), plan), layout).value();
  const Arrangement arrangement = arrange(layout, {.host_budget = 600 << 10, .device_budget = 64 << 20}).value();
  const auto device = open_cpu_device();
  for (const std::uint64_t seed : {0, 1}) {
    const auto executor = Executor::create(*device, store.get(), layout, arrangement, {.chaos_seed = seed}).value();
    std::span<std::byte> buffer;  // the first one
    int chunk = 0;
    while (arrangement.hi_resident[chunk]) ++chunk;
    ASSERT_FALSE(executor->access(ExtentKind::hi, chunk, /*writes=*/true, [&](std::span<std::byte> bytes) {
      buffer = bytes;
      std::ranges::fill(bytes, std::byte{7});
    }));
    plan->set({.kind = Fault::Kind::hold, .action = io::Action::read});
    Plan reads;
    reads.tasks.push_back({.kind = TaskKind::read_hi,
                           .lane = Lane::disk_read,
                           .chunk = chunk,
                           .words = {HostRef::Where::word_buffer, 0},
                           .bytes = buffer.size()});
    executor->append(std::move(reads), nullptr);
    for (int i = 0; i < 2000 && plan->hits() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds{1});
    ASSERT_EQ(plan->hits(), 1U);
    EXPECT_TRUE(all_are(buffer, seed == 0 ? std::byte{7} : std::byte{0xff}));
    plan->release();
    ASSERT_FALSE(executor->drain());
    EXPECT_TRUE(all_are(buffer, std::byte{7}));
  }
}

}  // namespace
}  // namespace tierflow::swap
