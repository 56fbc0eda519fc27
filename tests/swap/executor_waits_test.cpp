// What the executor waits for where the device computes while its client goes on.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/swap/no_work.h"

namespace tierflow::swap {
namespace {

// Numbers the events of computation, and keeps what uploads wait for.
struct NotingDevice final : testing::ForwardingDevice {
  NotingDevice() : ForwardingDevice(open_cpu_device({.async_compute = true})) {}
  Event record_timed(StreamId stream) override {
    Event event = ForwardingDevice::record_timed(stream);
    std::lock_guard lock(mutex_);
    if (stream == StreamId::compute) computed_.push_back(event);
    return event;
  }
  void wait(StreamId stream, const Event& event) override {
    {
      std::lock_guard lock(mutex_);
      for (std::size_t number = 0; number < computed_.size() && stream == StreamId::upload; ++number)
        if (computed_[number].state() == event.state()) uploads_wait_for.push_back(number);
    }
    ForwardingDevice::wait(stream, event);
  }
  std::vector<std::size_t> uploads_wait_for;

 private:
  std::mutex mutex_;
  std::vector<Event> computed_;
};

Layout one_stage(std::uint64_t elements = 4096) {
  return {{{.name = "unit", .groups = {{.elements = elements, .state_bytes_element = 4, .precision = "a"}}}},
          {{.units = {0}}},
          kChunkQuantum};
}

TEST(ExecutorWaits, ACopyFollowsTheNewestOfItsComputations) {
  const Layout layout = one_stage();
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 1 << 20, .device_budget = 1 << 20, .storage = false, .train = false}).value();
  NotingDevice device;
  const auto executor = Executor::create(device, nullptr, layout, arrangement).value();
  Plan plan{.visits = {{.pass = Pass::evaluate, .weights = {0}}}};
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
    plan.tasks.push_back({.pass = Pass::evaluate, .stage = 0, .micro_batch = micro_batch, .visit = 0});
  plan.tasks.push_back({.kind = TaskKind::upload_hi,
                        .lane = Lane::upload,
                        .chunk = 0,
                        .words = resident_place(ExtentKind::hi, 0),
                        .bytes = 8192,
                        .dependencies = {0, 1}});
  executor->append(std::move(plan), nullptr);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    ASSERT_TRUE(executor->enter(0, Pass::evaluate, micro_batch).ok());
    // So that it has not left when the copy begins.
    device.enqueue(StreamId::compute,
                   [](const DeviceQueue&) { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
    ASSERT_FALSE(executor->leave());
  }
  ASSERT_FALSE(executor->drain());
  // Each has an event at its beginning and one at its end.
  EXPECT_EQ(device.uploads_wait_for, std::vector<std::size_t>{3});
}

// What was found in a slot, of a gradient that is zeros in part too, is taken before another gradient is rounded and
// measured there.
TEST(ExecutorWaits, ASlotIsFreeWhenWhatWasMeasuredInItIsTaken) {
  struct Work final : NoWork {
    void enqueue_measuring(const Chunk&, Device&, StreamId, const std::uint16_t*, std::byte*) override { ++measuring; }
    io::Error take_measured(const Chunk&, std::span<const std::byte>) override {
      if (++taken == 1) may_take.get_future().wait();
      return {};
    }
    std::vector<ElementRange> zero_gradient(const Chunk& chunk) const override {
      return chunk.id == 1 ? std::vector<ElementRange>{{5, 100}} : std::vector<ElementRange>{};
    }
    std::atomic<int> measuring = 0, taken = 0;
    std::promise<void> may_take;
  };
  const Layout layout = one_stage(4 * kChunkQuantum);
  const Arrangement arrangement = arrange(layout, {.host_budget = 64 << 20,
                                                   .device_budget = 64 << 20,
                                                   .gradient_slots = true,
                                                   .measured_bytes = 24,
                                                   .storage = false})
                                      .value();
  const auto device = open_cpu_device();
  const auto executor = Executor::create(*device, nullptr, layout, arrangement).value();
  const auto work = std::make_shared<Work>();
  executor->append(Planner(layout, arrangement).train_step(false), work);
  ASSERT_TRUE(executor->enter(0, Pass::head, 0).ok());
  ASSERT_FALSE(executor->leave());
  for (int i = 0; i < 2000 && work->measuring < kGradientSlots; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(work->measuring, kGradientSlots);
  work->may_take.set_value();
  ASSERT_FALSE(executor->drain());
  EXPECT_EQ(work->measuring, static_cast<int>(layout.chunks().size()));
  EXPECT_EQ(work->taken, static_cast<int>(layout.chunks().size()));
}

// Whoever looks at the counters finds no update of the device half noted: the thread sanitizer says so.
TEST(ExecutorWaits, CountersAreLookedAtWhileTheDeviceUpdates) {
  struct Work final : NoWork {
    io::Error update_on_device(const Chunk&, Device&, const DeviceUpdate&) override {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      ++updated;
      return {};
    }
    std::atomic<int> updated = 0;
  };
  const Layout layout = one_stage(16 * kChunkQuantum);
  const Arrangement arrangement = arrange(layout, {.host_budget = 64 << 20,
                                                   .device_budget = 64 << 20,
                                                   .staged = false,
                                                   .device_update_share = 1,
                                                   .storage = false})
                                      .value();
  const auto device = open_cpu_device();
  const auto executor = Executor::create(*device, nullptr, layout, arrangement).value();
  const auto work = std::make_shared<Work>();
  executor->append(Planner(layout, arrangement).train_step(false), work);
  ASSERT_TRUE(executor->enter(0, Pass::head, 0).ok());
  ASSERT_FALSE(executor->leave());
  const auto updates = [&] { return executor->counters()[static_cast<int>(Lane::update)]; };
  for (const double ends = executor->now() + 20; updates().tasks < 16 && executor->now() < ends;)
    EXPECT_LE(updates().busy_seconds, executor->now());
  ASSERT_FALSE(executor->drain());
  EXPECT_EQ(work->updated, 16);
}

TEST(ExecutorWaits, RecordsAreOfAllThatWasEntered) {
  const Layout layout = one_stage();
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 1 << 20, .device_budget = 1 << 20, .storage = false, .train = false}).value();
  NotingDevice device;
  const auto executor = Executor::create(device, nullptr, layout, arrangement, {.record = true}).value();
  executor->append(Planner(layout, arrangement).evaluate(1), nullptr);
  ASSERT_TRUE(executor->enter(0, Pass::evaluate, 0).ok());
  device.enqueue(StreamId::compute,
                 [](const DeviceQueue&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  ASSERT_FALSE(executor->leave());
  int computed = 0;
  for (const TaskRecord& record : executor->take_records()) computed += record.lane == Lane::compute ? 1 : 0;
  EXPECT_EQ(computed, 1);
  EXPECT_FALSE(executor->drain());
}

}  // namespace
}  // namespace tierflow::swap
