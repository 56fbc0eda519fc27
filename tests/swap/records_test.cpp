// What a run says of its tasks: which ones they were, when they ran, what they moved.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/faulty_store.h"
#include "tests/swap/no_work.h"
#include "tests/swap/sparse_stages.h"

namespace tierflow::swap {
namespace {

using std::chrono::milliseconds;
using testing::Fault;

struct MaybeZeros final : NoWork {
  bool zeros = false;
  std::vector<ElementRange> zero_gradient(const Chunk& chunk) const override {
    return zeros ? std::vector<ElementRange>{{0, chunk.elements}} : std::vector<ElementRange>{};
  }
};

// Its clock is set long after the executor's.
struct SlowToBegin final : testing::ForwardingDevice {
  io::Result<io::Buffer> allocate(std::size_t bytes) override {
    std::this_thread::sleep_for(milliseconds{50});
    return ForwardingDevice::allocate(bytes);
  }
};

class Records : public ::testing::Test {
 protected:
  void prepare(std::uint64_t host_budget) {
    arrangement_ =
        arrange(layout_, {.host_budget = host_budget, .device_budget = 64 << 20, .micro_batches = 2}).value();
    store_ = Store::create(over_faults(folder_.path(), plan_, 2), layout_).value();
    executor_ = Executor::create(device_, store_.get(), layout_, arrangement_, {.record = true}).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
    for (const Chunk& chunk : layout_.chunks())
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        ASSERT_FALSE(executor_->access(kind, chunk.id, true, [](std::span<std::byte>) {}));
  }
  void compute() {
    for (const auto& [stage, pass] : {std::pair{0, Pass::forward}, {1, Pass::head}, {0, Pass::backward}})
      for (const int micro_batch : {0, 1}) {
        ASSERT_TRUE(executor_->enter(stage, pass, micro_batch).ok());
        ASSERT_FALSE(executor_->leave());
      }
  }
  LaneCounters of(Lane lane) const { return executor_->counters()[static_cast<int>(lane)]; }

  const Layout layout_ = sparse_stages();
  const testing::TempDir folder_;
  std::shared_ptr<testing::FaultPlan> plan_ = std::make_shared<testing::FaultPlan>();
  SlowToBegin device_;
  Arrangement arrangement_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::shared_ptr<MaybeZeros> work_ = std::make_shared<MaybeZeros>();
};

TEST_F(Records, AreOfTheTasksOfThePlan) {
  ASSERT_NO_FATAL_FAILURE(prepare(700 << 10));
  for (const bool pending : {false, true}) {
    Plan plan = planner_->train_step(pending);
    const std::vector<Task> tasks = plan.tasks;
    const TaskId first = plan.first_id;
    const double began = executor_->now();
    executor_->append(std::move(plan), work_);
    ASSERT_NO_FATAL_FAILURE(compute());
    ASSERT_FALSE(executor_->drain());
    const double ended = executor_->now();
    std::set<TaskId> seen;
    for (const TaskRecord& record : executor_->take_records()) {
      ASSERT_LT(record.id - first, tasks.size());
      EXPECT_TRUE(seen.insert(record.id).second);
      const Task& task = tasks[record.id - first];
      EXPECT_EQ(record.kind, task.kind);
      EXPECT_EQ(record.lane, task.lane);
      EXPECT_EQ(record.pass, task.pass);
      EXPECT_EQ(record.stage, task.stage);
      EXPECT_EQ(record.micro_batch, task.micro_batch);
      EXPECT_EQ(record.chunk, task.chunk);
      EXPECT_EQ(record.bytes, task.bytes);
      EXPECT_EQ(record.dependencies, task.dependencies);
      // By one clock, though the device's has another beginning.
      EXPECT_GE(record.begin, began - 0.02) << task_name(record.kind);
      EXPECT_LE(record.begin, record.end) << task_name(record.kind);
      EXPECT_LE(record.end, ended + 1) << task_name(record.kind);
    }
    EXPECT_EQ(seen.size(), tasks.size());
  }
}

TEST_F(Records, OfAllTasksTheLanesCountNumberAndBytes) {
  ASSERT_NO_FATAL_FAILURE(prepare(700 << 10));
  std::map<Lane, LaneCounters> expected;
  for (const bool pending : {false, true}) {
    Plan plan = planner_->train_step(pending);
    for (const Task& task : plan.tasks) {
      ++expected[task.lane].tasks;
      expected[task.lane].bytes += task.bytes;
    }
    executor_->append(std::move(plan), work_);
    ASSERT_NO_FATAL_FAILURE(compute());
    ASSERT_FALSE(executor_->drain());
  }
  EXPECT_GE(expected.size(), 6U);
  for (const auto& [lane, counters] : expected) {
    EXPECT_EQ(of(lane).tasks, counters.tasks) << lane_name(lane);
    EXPECT_EQ(of(lane).bytes, counters.bytes) << lane_name(lane);
  }
}

// Gradients that are zeros, and what the store has already.
TEST_F(Records, WhatIsNotMovedIsNotCounted) {
  ASSERT_NO_FATAL_FAILURE(prepare(700 << 10));
  work_->zeros = true;
  std::map<Lane, std::uint64_t> planned;
  for (const bool pending : {false, true}) {
    Plan plan = planner_->train_step(pending);
    for (const Task& task : plan.tasks) planned[task.lane] += task.bytes;
    executor_->append(std::move(plan), work_);
    ASSERT_NO_FATAL_FAILURE(compute());
    ASSERT_FALSE(executor_->drain());
  }
  for (const Lane lane : {Lane::disk_read, Lane::disk_write, Lane::download}) {
    EXPECT_GT(of(lane).left_out, 0U) << lane_name(lane);
    EXPECT_EQ(of(lane).bytes + of(lane).left_out, planned[lane]) << lane_name(lane);
  }
  std::uint64_t left_out = 0;
  for (const TaskRecord& record : executor_->take_records())
    if (record.kind == TaskKind::read_gradient || record.kind == TaskKind::write_gradient ||
        record.kind == TaskKind::download_gradient)
      left_out += record.bytes;
  EXPECT_EQ(left_out, 0U);

  store_->remove_files();
  executor_.reset();
  ASSERT_NO_FATAL_FAILURE(prepare(64 << 20));
  ASSERT_FALSE(executor_->write_back());
  const std::uint64_t before = store_->drives().front().bytes_written;
  executor_->append(planner_->train_step(false, /*commits=*/true), work_);
  ASSERT_NO_FATAL_FAILURE(compute());
  ASSERT_FALSE(executor_->drain());
  EXPECT_EQ(store_->generation(), 1U);
  EXPECT_LT(store_->drives().front().bytes_written - before, 64U << 10) << "the manifest and its superblock";
  EXPECT_GT(of(Lane::disk_write).tasks, 0U);
  EXPECT_EQ(of(Lane::disk_write).bytes, 0U);
}

// A request of the drive, of which the rest of the run takes little, and another one beside it.
TEST_F(Records, ADriveIsBusyAsLongAsItMovesSomethingAndCountsOnce) {
  static constexpr double kHeld = 0.06;
  for (const auto& [lane, action] :
       {std::pair{Lane::disk_read, io::Action::read}, {Lane::disk_write, io::Action::write}}) {
    executor_.reset();
    if (store_ != nullptr) store_->remove_files();
    ASSERT_NO_FATAL_FAILURE(prepare(700 << 10));
    ASSERT_FALSE(executor_->write_back());
    const bool reads = lane == Lane::disk_read;
    Plan plan;
    plan.tasks.push_back({.kind = reads ? TaskKind::read_hi : TaskKind::write_hi,
                          .lane = lane,
                          .chunk = 0,
                          .words = {HostRef::Where::word_buffer, 0},
                          .bytes = layout_.chunks()[0].word_bytes()});
    Plan another{.first_id = 1, .tasks = plan.tasks};
    another.tasks[0].chunk = 1;
    another.tasks[0].words.index = 1;
    another.tasks[0].bytes = layout_.chunks()[1].word_bytes();
    plan_->set({.kind = Fault::Kind::hold, .action = action, .sticky = true});
    const double began = executor_->now();
    executor_->append(std::move(plan), nullptr);
    std::this_thread::sleep_for(std::chrono::duration<double>(kHeld));
    EXPECT_GE(of(lane).busy_seconds, kHeld / 2) << "it is at it";
    EXPECT_LE(of(lane).busy_seconds, executor_->now() - began) << lane_name(lane);
    executor_->append(std::move(another), nullptr);
    for (int i = 0; i < 2000 && plan_->hits() < 2; ++i) std::this_thread::sleep_for(milliseconds{1});
    EXPECT_EQ(plan_->hits(), 2U);
    EXPECT_GE(of(lane).busy_seconds, kHeld / 2) << "it still is, with another one beside it";
    plan_->release();
    ASSERT_FALSE(executor_->drain());
    EXPECT_GE(of(lane).busy_seconds, kHeld / 2) << lane_name(lane);
    EXPECT_LE(of(lane).busy_seconds, executor_->now() - began) << lane_name(lane);
    EXPECT_EQ(of(reads ? Lane::disk_write : Lane::disk_read).busy_seconds, 0);
  }
}

// Only while it runs: not an update that waits for computation, nor one that is done while what is before it is not.
TEST_F(Records, OnlyAnUpdateThatRunsIsBusy) {
  ASSERT_NO_FATAL_FAILURE(prepare(64 << 20));
  const auto measures = [](int chunk, std::vector<TaskId> dependencies) {
    return Task{.kind = TaskKind::measure,
                .lane = Lane::update,
                .chunk = chunk,
                .gradient = resident_place(ExtentKind::gradient, chunk),
                .dependencies = std::move(dependencies)};
  };
  Plan plan{.visits = {{.pass = Pass::evaluate, .weights = {0}}}};
  plan.tasks = {{.pass = Pass::evaluate, .stage = 0, .micro_batch = 0, .visit = 0}, measures(0, {}), measures(1, {0})};
  std::this_thread::sleep_for(milliseconds{100});
  executor_->append(std::move(plan), work_);
  for (int i = 0; i < 2000 && of(Lane::update).tasks == 0; ++i) std::this_thread::sleep_for(milliseconds{1});
  ASSERT_EQ(of(Lane::update).tasks, 1U);
  const double busy = of(Lane::update).busy_seconds;
  std::this_thread::sleep_for(milliseconds{2});
  EXPECT_EQ(of(Lane::update).busy_seconds, busy);
  EXPECT_LT(busy, executor_->now() / 2);
  ASSERT_TRUE(executor_->enter(0, Pass::evaluate, 0).ok());
  ASSERT_FALSE(executor_->leave());
  ASSERT_FALSE(executor_->drain());
  EXPECT_EQ(of(Lane::update).tasks, 2U);
}

TEST(RecordsOfMemory, WhyItIsNotPinnedIsHandedOn) {
  struct Refusing final : testing::ForwardingDevice {
    std::string pin(std::span<const std::span<std::byte>>) override { return "the system keeps it"; }
  } device;
  const Layout layout = sparse_stages();
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false}).value();
  EXPECT_EQ(Executor::create(device, nullptr, layout, arrangement).value()->pin_note(), "the system keeps it");
}

}  // namespace
}  // namespace tierflow::swap
