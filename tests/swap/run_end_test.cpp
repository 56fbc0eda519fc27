// How a run ends: what the client's work answers with is the run's error, the first error stays, nothing new starts
// after it, and what is in flight ends first.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "swap/visit_planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/faulty_store.h"
#include "tests/swap/no_work.h"
#include "tests/swap/sparse_stages.h"

namespace tierflow::swap {
namespace {

using std::chrono::milliseconds;
using testing::Fault;

// Answers one of its calls with an error.
struct Answering final : UpdateWork {
  std::string fails;
  std::function<void()> measuring = [] {};
  std::atomic<int> measured = 0;

  io::Error answer(const char* call) const {
    if (fails != call) return {};
    return {.kind = io::ErrorKind::io, .operation = call, .detail = "the client's own"};
  }
  io::Error measure(const Chunk&, std::span<const std::byte>) override {
    ++measured;
    measuring();
    return answer("measure");
  }
  io::Error update(const Chunk&, std::span<const std::byte>, std::span<std::byte>, std::span<std::byte>) override {
    return answer("update");
  }
  io::Error catch_up(const Chunk&, std::span<std::byte>, std::span<std::byte>) override { return answer("catch_up"); }
  io::Error update_on_device(const Chunk&, Device&, const DeviceUpdate&) override { return answer("update_on_device"); }
  io::Error keep_gradient(const Chunk&, Device&, const DeviceUpdate&) override { return answer("keep_gradient"); }
  void enqueue_measuring(const Chunk&, Device&, StreamId, const std::uint16_t*, std::byte*) override {}
  io::Error take_measured(const Chunk&, std::span<const std::byte>) override { return answer("take_measured"); }
  io::Error accumulate(const Chunk&, std::span<const std::byte>, std::span<std::byte>, std::span<std::byte>,
                       bool) override {
    return answer("accumulate");
  }
  io::Error round_sum(const Chunk&, std::span<std::byte>, std::span<const std::byte>) override {
    return answer("round_sum");
  }
};

// An event of one stream fails, if `fails` is set.
struct FailingDevice final : testing::ForwardingDevice {
  std::optional<StreamId> fails;

  Event record_timed(StreamId stream) override {
    Event event = ForwardingDevice::record_timed(stream);
    std::lock_guard lock(mutex_);
    if (fails == stream) failing_.insert(event.state());
    return event;
  }
  io::Error synchronize(const Event& event) override {
    if (is_failing(event)) return {.kind = io::ErrorKind::io, .detail = "the device is gone"};
    return ForwardingDevice::synchronize(event);
  }

 private:
  bool is_failing(const Event& event) {
    std::lock_guard lock(mutex_);
    return failing_.contains(event.state());
  }
  std::mutex mutex_;
  std::set<void*> failing_;
};

class RunEnd : public ::testing::Test {
 protected:
  void prepare(ArrangeRequest request = {}, Store* store = nullptr) {
    request.device_budget = 64 << 20;
    if (request.host_budget == 0) request.host_budget = 64 << 20;
    request.storage = store != nullptr;
    executor_.reset();
    arrangement_ = arrange(layout_, request).value();
    executor_ = Executor::create(device_, store, layout_, arrangement_).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
  }
  // In `call`, from the next run on: what runs now may ask for it still, and ends first.
  void work_answers_with_an_error(const std::string& call) {
    executor_.reset();
    work_->fails = call;
  }
  io::Error compute(Pass forward, Pass head) {
    for (const auto& [stage, pass] : {std::pair{0, forward}, {1, head}, {0, Pass::backward}}) {
      if (pass == Pass::backward && head == Pass::evaluate) break;
      if (const auto entered = executor_->enter(stage, pass, 0); !entered.ok()) return entered.error();
      if (io::Error error = executor_->leave()) return error;
    }
    return {};
  }
  // Two steps, and a flush in which a sparse chunk catches up.
  io::Error steps() {
    for (const bool pending : {false, arrangement_.staged}) {
      executor_->append(planner_->train_step(pending), work_);
      if (io::Error error = compute(Pass::forward, Pass::head)) return error;
      if (io::Error error = executor_->finish_updates()) return error;
    }
    SparseChunks sparse;
    sparse.missed.assign(layout_.chunks().size(), false);
    sparse.missed[layout_.sparse_chunks()[0]] = true;
    executor_->append(planner_->flush(false, sparse), work_);
    return executor_->drain();
  }
  // Two visits of the last stage whose gradients add up, and the update.
  io::Error visits() {
    VisitPlanner planner(layout_, arrangement_);
    const VisitRequest request{.stage = 1, .pass = Pass::backward, .gradients = {true}};
    for (int visit = 0; visit < 2; ++visit) {
      executor_->append(planner.visit(request), work_);
      if (const auto entered = executor_->enter(1, Pass::backward, 0); !entered.ok()) return entered.error();
      if (io::Error error = executor_->leave()) return error;
    }
    executor_->append(planner.owe({1}), work_);
    executor_->append(planner.apply_owed(1), work_);
    return executor_->drain();
  }
  // A step that is computed, and whose measurements are all ready but for the first one, which waits for the gate.
  void reach_the_first_measurement() {
    work_->measuring = [this] {
      if (work_->measured == 1) gate_.get_future().wait();
      after_the_gate();
    };
    prepare();
    executor_->append(planner_->train_step(false), work_);
    ASSERT_FALSE(compute(Pass::forward, Pass::head));
    const auto downloaded = [this] { return executor_->counters()[static_cast<int>(Lane::download)].tasks; };
    for (int i = 0; i < 2000 && (downloaded() < layout_.chunks().size() || work_->measured == 0); ++i)
      std::this_thread::sleep_for(milliseconds{1});
    ASSERT_EQ(downloaded(), layout_.chunks().size());
  }
  std::thread opens_soon() {
    return std::thread([this] {
      std::this_thread::sleep_for(milliseconds{10});
      gate_.set_value();
    });
  }

  const Layout layout_ = sparse_stages();
  Arrangement arrangement_;
  FailingDevice device_;
  std::shared_ptr<Answering> work_ = std::make_shared<Answering>();
  std::promise<void> gate_;
  std::function<void()> after_the_gate = [] {};
  std::unique_ptr<Planner> planner_;
  std::unique_ptr<Executor> executor_;
};

TEST_F(RunEnd, WhatTheClientsWorkAnswersIsTheRunsError) {
  const ArrangeRequest staged, at_once{.staged = false}, on_device{.state_on_device = true},
      measured{.gradient_slots = true, .measured_bytes = 24};
  for (const auto& [call, request] : {std::pair{"measure", staged},
                                      {"update", staged},
                                      {"update", at_once},
                                      {"catch_up", staged},
                                      {"keep_gradient", on_device},
                                      {"update_on_device", on_device},
                                      {"take_measured", measured}}) {
    work_answers_with_an_error("");
    ASSERT_NO_FATAL_FAILURE(prepare(request));
    const io::Error none = steps();
    EXPECT_FALSE(none) << none.message();
    work_answers_with_an_error(call);
    ASSERT_NO_FATAL_FAILURE(prepare(request));
    EXPECT_EQ(steps().operation, call);
  }
  for (const std::string call : {"", "accumulate", "round_sum"}) {
    work_answers_with_an_error(call);
    ASSERT_NO_FATAL_FAILURE(prepare({.sums = true}));
    EXPECT_EQ(visits().operation, call);
  }
}

// A client that is not able to do what a plan asks of it.
TEST_F(RunEnd, WhatTheClientCannotDoIsRefused) {
  NoWork work;
  const Chunk& chunk = layout_.chunks()[0];
  EXPECT_EQ(work.catch_up(chunk, {}, {}).detail, "this run's chunks miss no updates");
  for (const io::Error& error : {work.update_on_device(chunk, device_, {}), work.keep_gradient(chunk, device_, {})})
    EXPECT_EQ(error.detail, "this run's updates are the host's alone");
  for (const io::Error& error : {work.accumulate(chunk, {}, {}, {}, false), work.round_sum(chunk, {}, {})})
    EXPECT_EQ(error.detail, "this run keeps no gradient sums");
  EXPECT_FALSE(work.take_measured(chunk, {}));
}

TEST_F(RunEnd, WhatFailsOnTheUpdateStreamIsTheRunsError) {
  prepare({.state_on_device = true});
  device_.fails = StreamId::update;
  EXPECT_EQ(steps().detail, "the device is gone");
}
TEST_F(RunEnd, ADeviceThatFailsBeforeItsClockIsSetIsSaidAtTheBeginning) {
  prepare();
  device_.fails = StreamId::compute;
  const auto executor = Executor::create(device_, nullptr, layout_, arrangement_, {.record = true});
  EXPECT_FALSE(executor.ok());
}

TEST_F(RunEnd, ACommitThatIsRefusedIsTheRunsError) {
  const testing::TempDir folder;
  const auto store =
      Store::create({.volume = {.folders = {folder.path()}, .allow_buffered = true, .allow_any_filesystem = true},
                     .generations = 2},
                    layout_)
          .value();
  prepare({}, store.get());
  const CommittedWords reader(*store);
  executor_->append(planner_->train_step(false, /*commits=*/true), work_);
  io::Error error = compute(Pass::forward, Pass::head);
  if (!error) error = executor_->drain();
  EXPECT_EQ(error.operation, "commit") << error.message();
}

TEST_F(RunEnd, TheFirstErrorStays) {
  ASSERT_NO_FATAL_FAILURE(reach_the_first_measurement());
  work_->fails = "measure";
  executor_->fail({.kind = io::ErrorKind::usage, .detail = "the first"});
  executor_->fail({.kind = io::ErrorKind::usage, .detail = "the second"});
  gate_.set_value();
  EXPECT_EQ(executor_->drain().detail, "the first");
  EXPECT_EQ(executor_->finish_updates().detail, "the first");
}

TEST_F(RunEnd, NothingStartsAfterAnError) {
  ASSERT_NO_FATAL_FAILURE(reach_the_first_measurement());
  executor_->fail({.kind = io::ErrorKind::usage, .detail = "enough"});
  gate_.set_value();
  EXPECT_EQ(executor_->drain().detail, "enough");
  std::this_thread::sleep_for(milliseconds{5});
  executor_.reset();
  EXPECT_EQ(work_->measured, 1);
}

TEST_F(RunEnd, WhatIsInFlightEndsBeforeTheErrorIsGiven) {
  ASSERT_NO_FATAL_FAILURE(reach_the_first_measurement());
  std::atomic<bool> ended = false;
  after_the_gate = [&ended] {
    std::this_thread::sleep_for(milliseconds{10});
    ended = true;
  };
  executor_->fail({.kind = io::ErrorKind::usage, .detail = "enough"});
  gate_.set_value();
  EXPECT_EQ(executor_->drain().detail, "enough");
  EXPECT_TRUE(ended);
}

TEST_F(RunEnd, AnExecutorThatGoesStartsNothingNew) {
  ASSERT_NO_FATAL_FAILURE(reach_the_first_measurement());
  std::thread opens = opens_soon();
  executor_.reset();
  opens.join();
  EXPECT_EQ(work_->measured, 1);
}

// A drive still writes into the executor's memory.
TEST_F(RunEnd, AnExecutorThatGoesWaitsForItsDrive) {
  const testing::TempDir folder;
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = Store::create(over_faults(folder.path(), plan), layout_).value();
  prepare({.host_budget = 600 << 10}, store.get());
  for (const Chunk& chunk : layout_.chunks())
    ASSERT_FALSE(executor_->access(ExtentKind::hi, chunk.id, true, [](std::span<std::byte>) {}));
  plan->set({.kind = Fault::Kind::hold, .action = io::Action::read});
  executor_->append(planner_->evaluate(1), nullptr);
  for (int i = 0; i < 2000 && plan->hits() == 0; ++i) std::this_thread::sleep_for(milliseconds{1});
  ASSERT_NE(plan->hits(), 0U);
  std::atomic<bool> released = false;
  std::thread answers([&] {
    std::this_thread::sleep_for(milliseconds{10});
    released = true;
    plan->release();
  });
  executor_.reset();
  EXPECT_TRUE(released);
  answers.join();
}

TEST_F(RunEnd, TheClientIsToldInsideOfAVisit) {
  prepare();
  executor_->append(planner_->train_step(false), work_);
  ASSERT_TRUE(executor_->enter(0, Pass::forward, 0).ok());
  EXPECT_EQ(executor_->need({}, work_).error().detail, "no part");
  ASSERT_TRUE(executor_->enter(1, Pass::head, 0).ok());
  executor_->fail({.kind = io::ErrorKind::usage, .detail = "enough"});
  EXPECT_EQ(executor_->leave().detail, "enough");
}

TEST_F(RunEnd, APartOutsideOfAVisitIsRefusedAndNotPlanned) {
  prepare();
  Plan part = planner_->train_step(false);
  EXPECT_EQ(executor_->need(std::move(part), work_).error().operation, "leave");
  EXPECT_FALSE(executor_->drain());
}

// The client waits for weights whose update does not end.
TEST_F(RunEnd, AClientThatWaitsIsTold) {
  ASSERT_NO_FATAL_FAILURE(reach_the_first_measurement());
  executor_->append(planner_->train_step(true), work_);
  std::atomic<bool> told = false;
  std::thread fails([&] {
    std::this_thread::sleep_for(milliseconds{5});
    executor_->fail({.kind = io::ErrorKind::usage, .detail = "enough"});
    for (int i = 0; i < 2000 && !told; ++i) std::this_thread::sleep_for(milliseconds{1});
    EXPECT_TRUE(told);
    gate_.set_value();
  });
  EXPECT_EQ(executor_->enter(0, Pass::forward, 0).error().detail, "enough");
  told = true;
  fails.join();
}

TEST_F(RunEnd, ADrainWaitsForWhatTheDeviceComputes) {
  const auto device = open_cpu_device({.async_compute = true});
  prepare({.train = false});
  const auto executor = Executor::create(*device, nullptr, layout_, arrangement_).value();
  executor->append(planner_->evaluate(1), nullptr);
  std::atomic<int> computed = 0;
  for (const int stage : {0, 1}) {
    ASSERT_TRUE(executor->enter(stage, Pass::evaluate, 0).ok());
    device->enqueue(StreamId::compute, [&](const DeviceQueue&) {
      std::this_thread::sleep_for(milliseconds{5});
      ++computed;
    });
    ASSERT_FALSE(executor->leave());
  }
  EXPECT_FALSE(executor->drain());
  EXPECT_EQ(computed, 2);
}

}  // namespace
}  // namespace tierflow::swap
