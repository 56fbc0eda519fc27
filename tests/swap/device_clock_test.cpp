// Computation that is enqueued and not waited for: a recorded run tells when the device did it, not when it was asked.
#include <gtest/gtest.h>

#include <set>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"

namespace tierflow::swap {
namespace {

// A CPU device with a clock of its own, which a test sets.
class ClockedDevice final : public testing::ForwardingDevice {
 public:
  std::string name() const override { return "clocked"; }
  io::Error synchronize(const Event& event) override {
    return event.state() == nullptr || times_.contains(event.state()) ? io::Error{}
                                                                      : ForwardingDevice::synchronize(event);
  }
  Event record_timed(StreamId) override {
    const auto time = std::make_shared<double>(clock);
    times_.insert(time.get());
    return Event(time);
  }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    return *static_cast<double*>(to.state()) - *static_cast<double*>(from.state());
  }
  double clock = 1000;

 private:
  std::set<void*> times_;
};

std::vector<TaskRecord> computed(Device& device, const std::function<void()>& compute) {
  const Layout layout({{.name = "first", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}},
                       {.name = "last", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}}},
                      {{.units = {0}}, {.units = {1}, .carry_bytes = 4096}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false, .train = false}).value();
  const auto executor = Executor::create(device, nullptr, layout, arrangement, {.record = true}).value();
  Planner planner(layout, arrangement);
  executor->append(planner.evaluate(1), nullptr);
  for (const int stage : {0, 1}) {
    EXPECT_TRUE(executor->enter(stage, Pass::evaluate, 0).ok());
    compute();
    EXPECT_FALSE(executor->leave());
  }
  EXPECT_FALSE(executor->drain());
  std::vector<TaskRecord> tasks;
  for (const TaskRecord& record : executor->take_records())
    if (record.lane == Lane::compute) tasks.push_back(record);
  EXPECT_TRUE(executor->take_records().empty());
  return tasks;
}

TEST(DeviceClock, SaysWhenTheDeviceComputed) {
  ClockedDevice device;
  const auto tasks = computed(device, [&] { device.clock += 7; });
  ASSERT_EQ(tasks.size(), 2U);
  for (const TaskRecord& task : tasks) EXPECT_NEAR(task.end - task.begin, 7, 1e-9);
  EXPECT_NEAR(tasks[1].begin, tasks[0].end, 1e-9);
}

TEST(DeviceClock, WithoutOneTheCallersCounts) {
  const auto device = open_cpu_device();
  const auto tasks = computed(*device, [] {});
  ASSERT_EQ(tasks.size(), 2U);
  for (const TaskRecord& task : tasks) EXPECT_LT(task.end - task.begin, 5);
}

}  // namespace
}  // namespace tierflow::swap
