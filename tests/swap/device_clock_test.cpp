// Computation that is enqueued and not waited for: a recorded run tells when the device did it, not when it was asked.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/swap/no_work.h"

namespace tierflow::swap {
namespace {

struct QuickWork final : NoWork {
  io::Error update_on_device(const Chunk&, Device& device, const DeviceUpdate&) override {
    return device.synchronize(device.record(StreamId::update));
  }
};

// A CPU device whose compute stream has a clock of its own, which a test sets.
class ClockedDevice final : public testing::ForwardingDevice {
 public:
  std::string name() const override { return "clocked"; }
  io::Error synchronize(const Event& event) override {
    return time_of(event) ? io::Error{} : ForwardingDevice::synchronize(event);
  }
  Event record_timed(StreamId stream) override {
    if (stream != StreamId::compute) return ForwardingDevice::record_timed(stream);
    const auto time = std::make_shared<double>(clock);
    std::lock_guard lock(mutex_);
    times_[time.get()] = time;
    return Event(time);
  }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    const auto begin = time_of(from), end = time_of(to);
    if (!begin && !end) return ForwardingDevice::seconds_between(from, to);
    return begin && end ? std::optional(*end - *begin) : std::nullopt;
  }
  void wait(StreamId stream, const Event& event) override {
    if (!time_of(event)) ForwardingDevice::wait(stream, event);
  }
  double clock = 1000;

 private:
  std::optional<double> time_of(const Event& event) {
    std::lock_guard lock(mutex_);
    const auto found = times_.find(event.state());
    return found == times_.end() ? std::nullopt : std::optional(*found->second);
  }
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<double>> times_;
};

Layout two_stages() {
  return Layout({{.name = "first", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}},
                 {.name = "last", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}}},
                {{.units = {0}}, {.units = {1}, .carry_bytes = 4096}}, kChunkQuantum);
}

// An evaluation of both stages, each of which does `compute`. The device may still be at it.
struct Evaluation {
  Evaluation(Device& device, const std::function<void()>& compute)
      : executor(Executor::create(device, nullptr, layout, arrangement, {.record = true}).value()) {
    executor->append(Planner(layout, arrangement).evaluate(1), nullptr);
    for (const int stage : {0, 1}) {
      EXPECT_TRUE(executor->enter(stage, Pass::evaluate, 0).ok());
      compute();
      EXPECT_FALSE(executor->leave());
    }
  }
  const Layout layout = two_stages();
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false, .train = false}).value();
  const std::unique_ptr<Executor> executor;
};

std::vector<TaskRecord> computed(Device& device, const std::function<void()>& compute) {
  const Evaluation evaluation(device, compute);
  EXPECT_FALSE(evaluation.executor->drain());
  std::vector<TaskRecord> tasks;
  for (const TaskRecord& record : evaluation.executor->take_records())
    if (record.lane == Lane::compute) tasks.push_back(record);
  EXPECT_TRUE(evaluation.executor->take_records().empty());
  return tasks;
}

TEST(DeviceClock, SaysWhenTheDeviceComputed) {
  ClockedDevice device;
  const auto tasks = computed(device, [&] { device.clock += 7; });
  ASSERT_EQ(tasks.size(), 2U);
  for (const TaskRecord& task : tasks) EXPECT_NEAR(task.end - task.begin, 7, 1e-9);
  EXPECT_NEAR(tasks[1].begin, tasks[0].end, 1e-9);
}

TEST(DeviceClock, OfTheCallingThreadIsTheCallers) {
  const auto device = open_cpu_device();
  const auto tasks = computed(*device, [] {});
  ASSERT_EQ(tasks.size(), 2U);
  for (const TaskRecord& task : tasks) EXPECT_LT(task.end - task.begin, 5);
}

TEST(DeviceClock, FinishUpdatesWaitsForWhatTheDeviceComputes) {
  const auto device = open_cpu_device({.async_compute = true});
  std::atomic<int> computed = 0;
  const Evaluation evaluation(*device, [&] {
    device->enqueue(StreamId::compute, [&](const DeviceQueue&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++computed;
    });
  });
  ASSERT_FALSE(evaluation.executor->finish_updates());
  EXPECT_EQ(computed, 2);
  EXPECT_FALSE(evaluation.executor->drain());
}

// Both micro-batches of two stages, forward and backward, enqueued long before the device computes them: what the
// copies and updates wait for is no part of what they take.
TEST(DeviceClock, ACopyTakesWhatItTakesHoweverLongItWaitsForComputation) {
  static constexpr std::chrono::milliseconds kComputes{150};
  for (const double on_device : {0.0, 1.0}) {
    const auto device = open_cpu_device({.async_compute = true});
    const Layout layout = two_stages();
    const Arrangement arrangement = arrange(layout, {.host_budget = 64 << 20,
                                                     .device_budget = 64 << 20,
                                                     .micro_batches = 2,
                                                     .staged = false,
                                                     .device_update_share = on_device,
                                                     .storage = false})
                                        .value();
    const auto executor = Executor::create(*device, nullptr, layout, arrangement, {.record = true}).value();
    Planner planner(layout, arrangement);
    executor->append(planner.train_step(false), std::make_shared<QuickWork>());
    int computations = 0;
    const auto compute = [&](int stage, Pass pass) {
      for (const int micro_batch : {0, 1}) {
        ASSERT_TRUE(executor->enter(stage, pass, micro_batch).ok());
        device->enqueue(StreamId::compute, [](const DeviceQueue&) { std::this_thread::sleep_for(kComputes); });
        ASSERT_FALSE(executor->leave());
        ++computations;
      }
    };
    const double began = executor->now();
    compute(0, Pass::forward);
    compute(1, Pass::head);
    compute(0, Pass::backward);
    const double computing = std::chrono::duration<double>(kComputes).count() * computations;
    EXPECT_LT(executor->now() - began, 0.8 * computing) << "the host did not run ahead";
    ASSERT_FALSE(executor->finish_updates());
    ASSERT_FALSE(executor->drain());
    EXPECT_GE(executor->now() - began, computing);
    const auto counters = executor->counters();
    EXPECT_GE(counters[static_cast<int>(Lane::compute)].busy_seconds, computing);
    for (const Lane lane : {Lane::upload, Lane::download, Lane::update}) {
      EXPECT_GT(counters[static_cast<int>(lane)].tasks, 0U) << lane_name(lane);
      EXPECT_LT(counters[static_cast<int>(lane)].busy_seconds, computing / 10) << lane_name(lane);
    }
    double last_computed = 0;
    const auto records = executor->take_records();
    for (const TaskRecord& record : records) {
      if (record.lane != Lane::compute) continue;
      EXPECT_GE(record.end - record.begin, computing / computations);
      EXPECT_GE(record.begin, last_computed);
      last_computed = record.end;
    }
    for (const TaskRecord& record : records)  // what left the device was computed before
      if (record.kind == TaskKind::download_gradient || record.kind == TaskKind::update_on_device) {
        EXPECT_LT(record.end - record.begin, computing / 10);
        EXPECT_GE(record.begin, computing / computations * 4);
      }
  }
}

// The lane hands the device the next copy before the first is there, and no third one.
TEST(DeviceClock, TwoCopiesAreInFlightOnALink) {
  struct CountingDevice final : testing::ForwardingDevice {
    void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
      {
        std::lock_guard lock(mutex);
        ++enqueued;
        wakes.notify_all();
      }
      enqueue(stream, [this](const DeviceQueue&) {
        std::unique_lock lock(mutex);
        wakes.wait(lock, [this] { return open; });
      });
      ForwardingDevice::copy_to_device(stream, to, from, bytes);
    }
    std::mutex mutex;
    std::condition_variable wakes;
    int enqueued = 0;
    bool open = false;
  };
  CountingDevice device;
  const Layout layout(
      {{.name = "first", .groups = {{.elements = 4 * kChunkQuantum, .state_bytes_element = 4, .precision = "a"}}}},
      {{.units = {0}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false, .train = false}).value();
  const auto executor = Executor::create(device, nullptr, layout, arrangement).value();
  Planner planner(layout, arrangement);
  executor->append(planner.evaluate(1), nullptr);
  std::unique_lock lock(device.mutex);
  EXPECT_TRUE(device.wakes.wait_for(lock, std::chrono::seconds(20), [&] { return device.enqueued == 2; }));
  EXPECT_FALSE(device.wakes.wait_for(lock, std::chrono::milliseconds(200), [&] { return device.enqueued > 2; }));
  device.open = true;
  device.wakes.notify_all();
  lock.unlock();
  EXPECT_TRUE(executor->enter(0, Pass::evaluate, 0).ok());
  EXPECT_EQ(device.enqueued, 4);
  EXPECT_FALSE(executor->leave());
  EXPECT_FALSE(executor->drain());
}

}  // namespace
}  // namespace tierflow::swap
