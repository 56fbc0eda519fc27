// What goes wrong in a lane is the run's error: exceptions, events, and what cannot be written back.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/faulty_store.h"

namespace tierflow::swap {
namespace {

using testing::Fault;
using testing::FaultPlan;

Layout small_layout() {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 3; ++unit) {
    units.push_back({.name = "unit", .groups = {{.elements = 70 * 1024, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}, .carry_bytes = unit == 0 ? 0 : kSector});
  }
  return Layout(std::move(units), std::move(stages), kChunkQuantum);
}

struct Work final : UpdateWork {
  std::function<void()> measuring = [] {};
  std::function<void()> committing = [] {};
  std::function<void()> updating = [] {};
  io::Error measure(const Chunk&, std::span<const std::byte>) override {
    measuring();
    return {};
  }
  io::Error update(const Chunk&, std::span<const std::byte>, std::span<std::byte>, std::span<std::byte>) override {
    updating();
    return {};
  }
  std::string progress() const override {
    committing();
    return {};
  }
};

struct ThrowingDevice final : testing::ForwardingDevice {
  bool up = false, down = false;
  void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    if (up) throw std::runtime_error("the upload broke");
    ForwardingDevice::copy_to_device(stream, to, from, bytes);
  }
  void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    if (down) throw std::runtime_error("the download broke");
    ForwardingDevice::gradient_to_host(stream, to, from, elements);
  }
};

struct FullDevice final : testing::ForwardingDevice {
  io::Result<io::Buffer> allocate(std::size_t) override {
    return io::Error{.kind = io::ErrorKind::environment, .detail = "the device is full"};
  }
};

class Lanes : public ::testing::Test {
 protected:
  void prepare(std::uint64_t host_budget, std::function<void(const io::Notice&)> on_notice = {}) {
    arrangement_ = arrange(layout_, {.host_budget = host_budget, .device_budget = 8 << 20, .micro_batches = 1}).value();
    StoreOptions options = over_faults(folder_.path(), plan_, 2);
    options.volume.on_notice = std::move(on_notice);
    auto store = Store::create(std::move(options), layout_);
    ASSERT_TRUE(store.ok()) << store.error().message();
    store_ = std::move(store).value();
    executor_ = std::move(Executor::create(device_, store_.get(), layout_, arrangement_)).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
    for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id)
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        ASSERT_FALSE(executor_->access(
            kind, id, true, [&](std::span<std::byte> bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{1}); }));
  }
  io::Error step(bool pending, bool commits = false) {
    executor_->append(planner_->train_step(pending, commits), work_);
    const int last = static_cast<int>(layout_.stages().size()) - 1;
    for (int order = 0; order <= 2 * last; ++order) {
      const int stage = order <= last ? order : 2 * last - order;
      const Pass pass = order < last ? Pass::forward : order == last ? Pass::head : Pass::backward;
      const auto entered = executor_->enter(stage, pass, 0);
      if (!entered.ok()) return entered.error();
      if (io::Error error = executor_->leave()) return error;
    }
    return executor_->finish_updates();
  }
  // One step, another one that applies the first one's gradients.
  io::Error run() {
    if (io::Error error = step(false)) return error;
    if (io::Error error = step(true)) return error;
    return executor_->drain();
  }
  void expect_over(io::ErrorKind kind, const std::string& text) {
    const io::Error error = run();
    EXPECT_EQ(error.kind, kind) << error.message();
    EXPECT_NE(error.message().find(text), std::string::npos) << error.message();
    EXPECT_TRUE(executor_->failed());
    EXPECT_EQ(executor_->drain().message(), error.message());
    EXPECT_EQ(executor_->write_back().message(), error.message());
    EXPECT_EQ(executor_->enter(0, Pass::forward, 0).error().message(), error.message());
    executor_.reset();  // nothing hangs
  }

  void expect_refused(Device& device) {
    const auto executor = Executor::create(device, store_.get(), layout_, arrangement_);
    ASSERT_FALSE(executor.ok());
    EXPECT_EQ(executor.error().detail, "the device is full");
  }

  testing::TempDir folder_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  const Layout layout_ = small_layout();
  Arrangement arrangement_;
  ThrowingDevice device_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::shared_ptr<Work> work_ = std::make_shared<Work>();
};

TEST_F(Lanes, ADriveIsBusyWhileItMovesSomething) {
  ASSERT_NO_FATAL_FAILURE(prepare(1 << 20));
  const auto began = std::chrono::steady_clock::now();
  const io::Error error = run();
  ASSERT_FALSE(error) << error.message();
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  for (const Lane lane : {Lane::disk_read, Lane::disk_write}) {
    const LaneCounters of = executor_->counters()[static_cast<int>(lane)];
    EXPECT_GT(of.bytes, 0U) << lane_name(lane);
    EXPECT_GT(of.busy_seconds, 0) << lane_name(lane);
    EXPECT_LE(of.busy_seconds, elapsed) << lane_name(lane);
  }
}

// So what a task takes counts in the steps in which it takes it, not all in the one in which it ends.
TEST_F(Lanes, WhatRunsStillCountsAsBusy) {
  ASSERT_NO_FATAL_FAILURE(prepare(1 << 20));
  std::map<Lane, double> shown;
  const auto look = [&](Lane lane) {
    const auto busy = [&] { return executor_->counters()[static_cast<int>(lane)].busy_seconds; };
    const double before = busy();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    shown[lane] = busy() - before;
  };
  work_->updating = [&] { look(Lane::update); };
  work_->committing = [&] { look(Lane::commit); };
  ASSERT_FALSE(step(false));
  const io::Error error = step(true, true);
  ASSERT_FALSE(error) << error.message();
  ASSERT_FALSE(executor_->drain());
  for (const Lane lane : {Lane::update, Lane::commit}) EXPECT_GE(shown[lane], 0.005) << lane_name(lane);
}

TEST_F(Lanes, ADeviceWithoutRoomIsSaidAtTheBeginning) {
  ASSERT_NO_FATAL_FAILURE(prepare(4 << 20));
  executor_.reset();
  FullDevice full;
  expect_refused(full);
}

TEST_F(Lanes, WithoutATroubleTheRunGoesOn) {
  prepare(1 << 20);
  const io::Error error = run();
  EXPECT_FALSE(error) << error.message();
}
TEST_F(Lanes, WhatTheUpdateThrowsEndsTheRun) {
  prepare(1 << 20);
  work_->updating = [] { throw std::runtime_error("no such thing"); };
  expect_over(io::ErrorKind::internal, "no such thing");
}
TEST_F(Lanes, WhatTheMeasurementThrowsEndsTheRun) {
  prepare(1 << 20);
  work_->measuring = [] { throw 7; };
  expect_over(io::ErrorKind::internal, "measure");
}
TEST_F(Lanes, MemoryThatRanOutIsSaidAsThat) {
  prepare(1 << 20);
  work_->updating = [] { throw std::bad_alloc(); };
  expect_over(io::ErrorKind::memory, "no memory left");
}
TEST_F(Lanes, WhatAnUploadThrowsEndsTheRun) {
  prepare(1 << 20);
  device_.up = true;
  expect_over(io::ErrorKind::internal, "the upload broke");
}
TEST_F(Lanes, WhatADownloadThrowsEndsTheRun) {
  prepare(64 << 20);
  device_.down = true;
  expect_over(io::ErrorKind::internal, "the download broke");
}
TEST_F(Lanes, WhatTheReceiverOfANoticeThrowsEndsTheRun) {
  prepare(1 << 20, [](const io::Notice&) { throw std::runtime_error("said too much"); });
  plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read, .nth = 2});
  expect_over(io::ErrorKind::internal, "said too much");
}

TEST_F(Lanes, WriteBackSaysWhatWasNotWritten) {
  for (const std::uint64_t nth : {1, 2, 5, 9}) {
    plan_->clear();
    executor_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_.path());
    prepare(64 << 20);
    const auto chunks = static_cast<std::uint64_t>(layout_.chunks().size());
    ASSERT_EQ(chunks, 6U);
    ASSERT_FALSE(executor_->write_back());
    ASSERT_FALSE(store_->commit("1"));
    plan_->set({.kind = Fault::Kind::error, .action = io::Action::write, .nth = nth, .sticky = true});
    EXPECT_FALSE(executor_->write_back());  // the store has all of it
    for (int id = 0; id < static_cast<int>(chunks); ++id)
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        ASSERT_FALSE(executor_->access(kind, id, /*writes=*/true, [](std::span<std::byte>) {}));
    const io::Error error = executor_->write_back();
    EXPECT_EQ(error.kind, io::ErrorKind::io) << error.message();
    plan_->clear();
    EXPECT_TRUE(store_->commit("2"));
    EXPECT_EQ(store_->generation(), 1U);
  }
}

TEST_F(Lanes, WriteBackWritesAllThatIsResident) {
  prepare(64 << 20);
  ASSERT_FALSE(executor_->write_back());
  for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id)
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
      const auto bytes = store_->fetch(kind, id);
      ASSERT_TRUE(bytes.ok()) << bytes.error().message();
      EXPECT_EQ(bytes.value().data()[bytes.value().size() - 1], std::byte{1});
    }
}

TEST_F(Lanes, ClientsThatDepartAreTold) {
  prepare(1 << 20);
  EXPECT_EQ(executor_->leave().kind, io::ErrorKind::usage);
  EXPECT_NE(executor_->enter(0, Pass::forward, 0).error().detail.find("at its end"), std::string::npos);
  executor_->append(planner_->train_step(false), work_);
  EXPECT_EQ(executor_->drain().kind, io::ErrorKind::usage);
  for (const auto& [stage, pass, micro_batch] :
       {std::tuple{1, Pass::forward, 0}, std::tuple{0, Pass::evaluate, 0}, std::tuple{0, Pass::forward, 1}})
    EXPECT_NE(executor_->enter(stage, pass, micro_batch).error().detail.find("departs from the plan"),
              std::string::npos);
  EXPECT_EQ(executor_->enter(2, Pass::backward, 1).error().detail,
            "stage 2 backward micro-batch 1 departs from the plan, which has stage 0 forward micro-batch 0");
  ASSERT_TRUE(executor_->enter(0, Pass::forward, 0).ok());
  EXPECT_NE(executor_->enter(1, Pass::forward, 0).error().detail.find("leave() was not called"), std::string::npos);
  EXPECT_FALSE(executor_->leave());
  executor_->fail({.kind = io::ErrorKind::cancelled, .detail = "enough"});
  EXPECT_EQ(executor_->enter(1, Pass::forward, 0).error().kind, io::ErrorKind::cancelled);
  EXPECT_EQ(executor_->finish_updates().kind, io::ErrorKind::cancelled);
}

// Computation whose end the test decides. Its events have numbers: 2 i where the computation i begins, then 2 i + 1.
class EventfulDevice final : public testing::ForwardingDevice {
 public:
  Event record_timed(StreamId stream) override {
    if (stream != StreamId::compute) return ForwardingDevice::record_timed(stream);
    std::lock_guard lock(mutex_);
    const auto state = std::make_shared<int>(static_cast<int>(computed_.size()));
    computed_[state.get()] = state;
    return Event(state);
  }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    if (number_of(from) != -1 || number_of(to) != -1) return 0;
    return ForwardingDevice::seconds_between(from, to);
  }
  void wait(StreamId stream, const Event& event) override {
    const int number = number_of(event);
    if (stream == StreamId::download) {
      std::lock_guard lock(mutex_);
      waited_for_ = number;
      waited_ = true;
      changed_.notify_all();
    }
    if (number == -1) ForwardingDevice::wait(stream, event);
  }
  io::Error synchronize(const Event& event) override {
    const int number = number_of(event);
    return number == -1 ? ForwardingDevice::synchronize(event) : finished(number);
  }
  // -1: for none; -2: nobody came.
  int wait_for_the_download() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [this] { return waited_; }) ? waited_for_ : -2;
  }
  std::function<io::Error(int)> finished = [](int) { return io::Error{}; };

 private:
  int number_of(const Event& event) {
    std::lock_guard lock(mutex_);
    const auto found = computed_.find(event.state());
    return found == computed_.end() ? -1 : *found->second;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, std::shared_ptr<int>> computed_;
  int waited_for_ = -1;
  bool waited_ = false;
};

// A download that starts while the computation that it follows is still on the device waits for that one's end there.
class Events : public ::testing::Test {
 protected:
  static constexpr int kComputations = 30;
  io::Error run() {
    arrangement_ = arrange(layout_, {.host_budget = 64 << 20, .device_budget = 8 << 20, .micro_batches = 1}).value();
    auto executor = std::move(Executor::create(device_, nullptr, layout_, arrangement_)).value();
    Plan plan;
    plan.visits.push_back({.stage = 0});
    for (int i = 0; i < kComputations; ++i) {
      Task& task = plan.tasks.emplace_back();
      task.stage = task.micro_batch = task.visit = 0;
      task.device_offset = kNowhere;
    }
    Task& measure = plan.tasks.emplace_back();
    measure.kind = TaskKind::measure;
    measure.lane = Lane::update;
    measure.chunk = 1;
    measure.gradient = {HostRef::Where::resident_gradient, 1};
    Task& download = plan.tasks.emplace_back();
    download.kind = TaskKind::download_gradient;
    download.lane = Lane::download;
    download.chunk = 0;
    download.gradient = {HostRef::Where::resident_gradient, 0};
    download.device_offset = arrangement_.weight_ring;
    download.bytes = layout_.chunks()[0].word_bytes();
    download.dependencies = {0, kComputations};
    executor->append(std::move(plan), work_);
    for (int i = 0; i < kComputations; ++i) {
      const auto entered = executor->enter(0, Pass::forward, 0);
      if (!entered.ok()) return entered.error();
      if (io::Error error = executor->leave()) return error;
    }
    return executor->drain();
  }

  const Layout layout_ = small_layout();
  Arrangement arrangement_;
  EventfulDevice device_;
  std::shared_ptr<Work> work_ = std::make_shared<Work>();
};

TEST_F(Events, AreForgottenOnlyAfterTheyHappened) {
  std::mutex mutex;
  std::condition_variable changed;
  bool may_download = false;
  work_->measuring = [&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_download; });
  };
  int followed = -3;
  std::vector<int> ended;
  device_.finished = [&](int number) {
    ended.push_back(number);
    if (number == 1) {
      {
        std::lock_guard lock(mutex);
        may_download = true;
      }
      changed.notify_all();
      followed = device_.wait_for_the_download();
    }
    return io::Error{};
  };
  const io::Error error = run();
  EXPECT_FALSE(error) << error.message();
  EXPECT_EQ(followed, 1);
  ASSERT_EQ(ended.size(), static_cast<std::size_t>(kComputations));
  EXPECT_EQ(ended.back(), 2 * kComputations - 1);
}

// The client is told at its next call, or when the run ends.
TEST_F(Events, ThatFailEndTheRun) {
  for (const int failing : {3, 2 * kComputations - 1}) {
    device_.finished = [failing](int number) {
      return number % (2 * kComputations) == failing
                 ? io::Error{.kind = io::ErrorKind::io, .operation = "compute", .detail = "the device is gone"}
                 : io::Error{};
    };
    EXPECT_EQ(run().detail, "the device is gone");
  }
}

}  // namespace
}  // namespace tierflow::swap
