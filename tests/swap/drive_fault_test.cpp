// A drive that gives wrong bytes: they are read once more and never computed with. A drive that stops answering: the
// run ends with that one error, nothing hangs or crashes, and the memory that the drive may still write to outlives the
// executor.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/temp_dir.h"

namespace tierflow::swap {
namespace {

using testing::Fault;
using testing::FaultPlan;

std::vector<UnitShape> units() {
  std::vector<UnitShape> units;
  for (const char* name : {"embedding", "block", "block", "head"})
    units.push_back({.name = name, .groups = {{.elements = 128 * 1024, .state_bytes_element = 4, .precision = "a"}}});
  return units;
}

std::vector<StageShape> stages() {
  std::vector<StageShape> stages{{.units = {0}, .backward_needs_weights = false}};
  for (int unit = 1; unit < 4; ++unit) stages.push_back({.units = {unit}, .carry_bytes = 4096});
  return stages;
}

bool all_ones(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte value) { return value == std::byte{1}; });
}

// Updates nothing, and looks at what it is given: every byte of the state is 1.
class IdleWork final : public UpdateWork {
 public:
  explicit IdleWork(std::atomic<int>& wrong) : wrong_(wrong) {}
  io::Error measure(const Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error update(const Chunk&, std::span<const std::byte>, std::span<std::byte> words,
                   std::span<std::byte> state) override {
    if (!all_ones(words) || !all_ones(state)) ++wrong_;
    return {};
  }

 private:
  std::atomic<int>& wrong_;
};

bool mapped(const std::byte* page) {
  return ::msync(const_cast<std::byte*>(page), 4096, MS_ASYNC) == 0;
}

class DriveFaultTest : public ::testing::TestWithParam<io::EngineKind> {
 protected:
  void SetUp() override {
    const io::Error error = make(std::chrono::milliseconds{300});
    ASSERT_FALSE(error) << error.message();
    ASSERT_GE(stored_, 0);
  }

  // A store and an executor of which nothing has failed yet.
  io::Error make(std::chrono::milliseconds stall_limit) {
    arrangement_ =
        arrange(layout_, {.host_budget = 1 << 20, .device_budget = 4 << 20, .micro_batches = 1, .staged = true})
            .value();
    auto store = Store::create({.volume = {.folders = {folder_.path()},
                                           .engine = GetParam(),
                                           .allow_buffered = true,
                                           .allow_any_filesystem = true,
                                           .stall_warning = std::chrono::milliseconds{50},
                                           .stall_limit = stall_limit,
                                           .on_notice =
                                               [this](const io::Notice& notice) {
                                                 if (notice.kind == io::Notice::Kind::retried) ++second_readings_;
                                               },
                                           .wrap_backend = testing::faults(plan_)}},
                               layout_);
    if (!store.ok()) return store.error();
    store_ = std::move(store).value();
    executor_ = std::move(Executor::create(*device_, store_.get(), layout_, arrangement_)).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
    for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id)
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        if (io::Error error = executor_->access(kind, id, true, [&](std::span<std::byte> bytes) {
              std::fill(bytes.begin(), bytes.end(), std::byte{1});
              if (kind != ExtentKind::state || arrangement_.state_resident[id]) return;
              stored_ = id;
              page_ = bytes.data();
            }))
          return error;
    return {};
  }

  void TearDown() override { end(); }

  void end() {
    executor_.reset();
    // A volume that goes while its drive still has requests leaves their memory behind on purpose.
    plan_->release();
    for (int i = 0; store_ && i < 500 && store_->drives().front().in_flight != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds{10});
    if (store_) store_->remove_files();
    store_.reset();
  }

  // Plays one step without computing anything, up to the first error.
  io::Error step() {
    executor_->append(planner_->train_step(pending_), std::make_shared<IdleWork>(wrong_));
    pending_ = true;
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

  void expect_over() {
    EXPECT_EQ(executor_->drain().error_number, ETIMEDOUT);
    EXPECT_EQ(executor_->finish_updates().error_number, ETIMEDOUT);
    EXPECT_EQ(executor_->enter(0, Pass::forward, 0).error().error_number, ETIMEDOUT);
    for (const bool writes : {false, true}) {
      const io::Error error = executor_->access(ExtentKind::state, stored_, writes,
                                                [](std::span<std::byte>) { ADD_FAILURE() << "there is no buffer"; });
      EXPECT_EQ(error.error_number, ETIMEDOUT) << error.message();
    }
  }

  testing::TempDir folder_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  const Layout layout_{units(), stages(), kChunkQuantum};
  Arrangement arrangement_;
  std::unique_ptr<Device> device_ = open_cpu_device();
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::atomic<int> second_readings_{0};
  std::atomic<int> wrong_{0};        // chunks that were updated from other bytes than were written
  int stored_ = -1;                  // a chunk whose state is in storage
  const std::byte* page_ = nullptr;  // where it passes through
  bool pending_ = false;
};

TEST_P(DriveFaultTest, ANormalStepIsNone) {
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(step());
  EXPECT_FALSE(executor_->drain());
}

TEST_P(DriveFaultTest, AFlipOnTheWayIsReadAgain) {
  for (std::uint64_t nth = 1; nth <= 12; ++nth) {
    plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read, .nth = nth});
    const io::Error error = step();
    EXPECT_FALSE(error) << error.message();
    EXPECT_EQ(plan_->hits(), 1U);
    EXPECT_EQ(second_readings_, static_cast<int>(nth));
  }
  EXPECT_FALSE(executor_->drain());
  EXPECT_EQ(wrong_, 0);
  plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read});
  bool read = false;
  EXPECT_FALSE(executor_->access(ExtentKind::state, stored_, false, [&read](std::span<std::byte> bytes) {
    read = true;
    EXPECT_TRUE(all_ones(bytes));
  }));
  EXPECT_TRUE(read);
  EXPECT_EQ(plan_->hits(), 1U);
  EXPECT_EQ(second_readings_, 13) << "the user is told";
  plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read});
  const auto fetched = store_->fetch(ExtentKind::state, stored_);
  ASSERT_TRUE(fetched.ok());
  EXPECT_TRUE(all_ones(fetched.value().bytes()));
  EXPECT_EQ(plan_->hits(), 1U);
  EXPECT_EQ(second_readings_, 14);
  plan_->clear();
  // Nothing wrong was written back either.
  for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id)
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
      EXPECT_FALSE(
          executor_->access(kind, id, false, [](std::span<std::byte> bytes) { EXPECT_TRUE(all_ones(bytes)); }));
}

TEST_P(DriveFaultTest, BytesThatStayWrongEndTheRun) {
  plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read, .sticky = true});
  const auto unused = [](std::span<std::byte>) { ADD_FAILURE() << "wrong bytes were given out"; };
  EXPECT_EQ(executor_->access(ExtentKind::state, stored_, false, unused).kind, io::ErrorKind::corruption);
  plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read, .nth = 5, .sticky = true});
  EXPECT_EQ(store_->fetch(ExtentKind::state, stored_).ok(), true);
  io::Error error;
  for (int i = 0; i < 4 && !error; ++i) error = step();
  EXPECT_EQ(error.kind, io::ErrorKind::corruption) << error.message();
  EXPECT_EQ(store_->fetch(ExtentKind::state, stored_).error().kind, io::ErrorKind::corruption);
}

// Two steps, the second with what the first deferred: the drive stops answering at each of their requests in turn.
TEST_P(DriveFaultTest, EndsTheRunAtAnyRequest) {
  for (const io::Action action : {io::Action::read, io::Action::write}) {
    std::uint64_t nth = 1;
    for (bool held = true; held; nth += held) {
      io::Error error;
      std::chrono::milliseconds limit{40};
      do {  // more than once where the machine is so busy that its drive is slow by itself
        end();
        plan_ = std::make_shared<FaultPlan>();
        pending_ = false;
        if ((error = make(limit))) continue;
        plan_->set({.kind = Fault::Kind::hold, .action = action, .nth = nth});
        for (int i = 0; i < 2 && !error; ++i) error = step();
        if (!error) error = executor_->drain();
      } while ((held = plan_->hits() != 0) == false && error && (limit *= 2) < std::chrono::seconds{3});
      if (!held) {
        EXPECT_FALSE(error) << error.message();
        continue;
      }
      EXPECT_EQ(error.kind, io::ErrorKind::io) << nth;
      EXPECT_EQ(error.error_number, ETIMEDOUT) << nth << ": " << error.message();
      expect_over();
    }
    EXPECT_GT(nth, 12U) << "too small a run";
  }
}

TEST_P(DriveFaultTest, EndsLoadingAndExporting) {
  plan_->set({.kind = Fault::Kind::hold, .action = io::Action::read});
  const io::Error error = executor_->access(ExtentKind::state, stored_, false, [](std::span<std::byte>) {});
  EXPECT_EQ(error.error_number, ETIMEDOUT) << error.message();
  expect_over();
}

TEST_P(DriveFaultTest, KeepsTheMemoryUntilTheDriveAnswers) {
  ASSERT_TRUE(mapped(page_));
  plan_->set({.kind = Fault::Kind::hold, .action = io::Action::read});
  EXPECT_TRUE(executor_->access(ExtentKind::state, stored_, false, [](std::span<std::byte>) {}));
  executor_.reset();
  EXPECT_TRUE(mapped(page_));
  plan_->release();
  for (int i = 0; i < 500 && store_->drives().front().in_flight != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds{10});
  store_.reset();
  for (int i = 0; i < 500 && mapped(page_); ++i) std::this_thread::sleep_for(std::chrono::milliseconds{10});
  EXPECT_FALSE(mapped(page_));
}

// The volume may have registered the memory with the kernel, by address: it stays until the volume is gone.
TEST_P(DriveFaultTest, WithoutAStallTheMemoryGoesWithTheStore) {
  EXPECT_FALSE(executor_->access(ExtentKind::state, stored_, false, [](std::span<std::byte>) {}));
  executor_.reset();
  EXPECT_TRUE(mapped(page_));
  EXPECT_TRUE(store_->fetch(ExtentKind::state, stored_).ok());
  store_.reset();
  EXPECT_FALSE(mapped(page_));
}

INSTANTIATE_TEST_SUITE_P(AllEngines, DriveFaultTest,
                         ::testing::Values(io::EngineKind::io_uring, io::EngineKind::libaio, io::EngineKind::threads),
                         [](const auto& info) { return io::engine_name(info.param); });

}  // namespace
}  // namespace tierflow::swap
