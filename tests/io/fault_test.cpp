// Every fault a drive or kernel can show through one operation, at every operation of a small run, once and for ever
// after: never a wrong byte, never a hang, and an error that says what failed.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

using testing::Fault;
using testing::FaultPlan;
using ::testing::HasSubstr;

constexpr std::size_t kBlock = 16 << 10;
constexpr std::uint64_t kExtent = 8 * kBlock;
constexpr std::uint64_t kExtents = 4;

class FaultTest : public ::testing::TestWithParam<EngineKind> {
 protected:
  VolumeOptions options() {
    VolumeOptions options = options_in(folder_, kExtent * kExtents);
    options.engine = GetParam();
    options.block = kBlock;
    options.depth = 4;
    options.wrap_backend = testing::faults(plan_);
    options.on_notice = [this](const Notice& notice) {
      std::lock_guard lock(mutex_);
      notices_.push_back(notice);
    };
    return options;
  }
  std::size_t notices(Notice::Kind kind) {
    std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(
        std::count_if(notices_.begin(), notices_.end(), [kind](const Notice& notice) { return notice.kind == kind; }));
  }
  Notice last_notice() {
    std::lock_guard lock(mutex_);
    return notices_.empty() ? Notice{} : notices_.back();
  }
  static Error write_all(Volume& volume, std::uint64_t seed) {
    for (std::uint64_t i = 0; i < kExtents; ++i) {
      if (Error error = write_pattern(volume, i * kExtent, kExtent, seed)) return error;
    }
    return {};
  }
  // Reads everything; true where every byte is right. Any error is handed out.
  static bool read_all(Volume& volume, std::uint64_t seed, Error& error) {
    for (std::uint64_t i = 0; i < kExtents; ++i) {
      Completion completion = transfer(volume, Op::read, i * kExtent, kExtent, allocate_buffer(kExtent));
      EXPECT_TRUE(completion.buffer);
      if (completion.error) {
        error = completion.error;
        return false;
      }
      if (!holds(completion.buffer.bytes(), i * kExtent, seed)) return false;
    }
    return true;
  }

  testing::TempDir folder_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::mutex mutex_;
  std::vector<Notice> notices_;
};

constexpr std::uint64_t kOperations = kExtent / kBlock * kExtents;

TEST_P(FaultTest, OneFailedReadIsReadAgain) {
  auto volume = create(options());
  ASSERT_FALSE(write_all(*volume, 1));
  for (std::uint64_t nth = 1; nth <= kOperations; ++nth) {
    plan_->set({.kind = Fault::Kind::error, .action = Action::read, .nth = nth});
    Error error;
    EXPECT_TRUE(read_all(*volume, 1, error)) << error.message();
    EXPECT_EQ(plan_->hits(), 1U);
  }
  EXPECT_EQ(notices(Notice::Kind::retried), kOperations);
}

TEST_P(FaultTest, ADeadDriveIsAnErrorThatNamesTheSpot) {
  VolumeOptions wanted = options();
  wanted.depth = 1;  // the first that fails is then the n-th
  auto volume = create(wanted);
  ASSERT_FALSE(write_all(*volume, 1));
  for (std::uint64_t nth = 1; nth <= kOperations; ++nth) {
    plan_->set({.kind = Fault::Kind::error, .action = Action::read, .nth = nth, .sticky = true});
    Error error;
    EXPECT_FALSE(read_all(*volume, 1, error));
    EXPECT_EQ(error.kind, ErrorKind::io);
    EXPECT_EQ(error.operation, "read");
    EXPECT_EQ(error.error_number, EIO);
    EXPECT_EQ(error.offset, kDataStart + (nth - 1) * kBlock);
    EXPECT_EQ(error.length, kBlock);
    EXPECT_THAT(error.path, HasSubstr("state.tfv"));
    EXPECT_THAT(error.message(), ::testing::AllOf(HasSubstr("dmesg"), HasSubstr("--storage")));
    EXPECT_EQ(plan_->hits(), 3U);  // read three times, and the other pieces not at all
  }
  plan_->clear();
  Error error;
  EXPECT_TRUE(read_all(*volume, 1, error)) << error.message();
}

TEST_P(FaultTest, AFailedWriteIsReportedAndNotRepeatedBehindTheCallersBack) {
  for (int number : {EIO, ENOSPC, EDQUOT, EFBIG, EROFS}) {
    testing::TempDir folder;
    VolumeOptions wanted = options();
    wanted.folders = {folder.path()};
    auto volume = create(wanted);
    for (std::uint64_t nth = 1; nth <= kOperations; nth += 5) {
      const std::uint64_t before = plan_->seen(Action::write);
      plan_->set({.kind = Fault::Kind::error, .action = Action::write, .nth = nth, .error_number = number});
      const Error error = write_all(*volume, nth);
      EXPECT_EQ(error.kind, ErrorKind::io);
      EXPECT_EQ(error.operation, "write");
      EXPECT_EQ(error.error_number, number);
      EXPECT_LE(plan_->seen(Action::write) - before, kOperations);
      // The same data, from memory, to the same or another place.
      EXPECT_FALSE(write_all(*volume, nth));
      Error read;
      EXPECT_TRUE(read_all(*volume, nth, read));
    }
  }
}

TEST_P(FaultTest, AFailedFlushIsFinal) {
  auto volume = create(options());
  ASSERT_FALSE(write_all(*volume, 1));
  ASSERT_FALSE(volume->flush());
  plan_->set({.kind = Fault::Kind::error, .action = Action::flush});
  const Error first = volume->flush();
  EXPECT_EQ(first.kind, ErrorKind::io);
  EXPECT_EQ(first.error_number, EIO);
  EXPECT_THAT(first.message(), ::testing::AllOf(HasSubstr("lost"), HasSubstr("dmesg"), HasSubstr("--storage")));
  // The drive would say yes now. It must not be asked.
  const std::uint64_t asked = plan_->seen(Action::flush);
  EXPECT_EQ(volume->flush().error_number, EIO);
  EXPECT_EQ(plan_->seen(Action::flush), asked);
  Error error;
  EXPECT_TRUE(read_all(*volume, 1, error));
}

// Several threads flush at once: those that wait behind the one that fails must not ask the drive again.
TEST_P(FaultTest, AFlushThatWaitsBehindOneThatFailsFailsToo) {
  VolumeOptions wanted = options();
  testing::TempDir second;
  wanted.folders.push_back(second.path());
  auto volume = create(wanted);
  ASSERT_FALSE(write_all(*volume, 1));
  const std::uint64_t asked = plan_->seen(Action::flush);
  plan_->set({.kind = Fault::Kind::error, .action = Action::flush, .delay = std::chrono::milliseconds{300}});
  auto first = std::async(std::launch::async, [&] { return volume->flush(); });
  while (plan_->hits() == 0) std::this_thread::sleep_for(std::chrono::milliseconds{1});
  std::vector<std::future<Error>> waiting;
  for (int i = 0; i < 3; ++i) waiting.push_back(std::async(std::launch::async, [&] { return volume->flush(); }));
  EXPECT_EQ(first.get().error_number, EIO);
  for (std::future<Error>& flush : waiting) EXPECT_EQ(flush.get().error_number, EIO);
  // The failing drive was asked once, the other one at most once for each call.
  EXPECT_LE(plan_->seen(Action::flush) - asked, 5U);
  EXPECT_EQ(volume->stats().front().flushes + volume->stats().back().flushes, plan_->seen(Action::flush) - asked);
  EXPECT_EQ(std::min(volume->stats().front().flushes, volume->stats().back().flushes), 1U);
}

TEST_P(FaultTest, AFailedFlushLosesWhatTheDriveHadInItsCacheAndIsNotRepeated) {
  plan_->cache_writes();
  auto volume = create(options());
  ASSERT_FALSE(write_all(*volume, 1));
  ASSERT_FALSE(volume->flush());
  ASSERT_FALSE(write_all(*volume, 2));
  plan_->set({.kind = Fault::Kind::error, .action = Action::flush});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(volume->flush().error_number, EIO);
  Error error;
  EXPECT_TRUE(read_all(*volume, 1, error)) << "what the last good flush covered";
}

TEST_P(FaultTest, ShortTransfersGoOnWhereTheyStopped) {
  auto volume = create(options());
  for (const std::size_t keep : {std::size_t{4096}, std::size_t{8192}, std::size_t{12288}}) {
    for (std::uint64_t nth = 1; nth <= kOperations; nth += 3) {
      plan_->set({.kind = Fault::Kind::cut, .action = Action::write, .nth = nth, .keep = keep});
      ASSERT_FALSE(write_all(*volume, nth + keep));
      EXPECT_EQ(plan_->hits(), 1U);
      plan_->set({.kind = Fault::Kind::cut, .action = Action::read, .nth = nth, .keep = keep});
      Error error;
      ASSERT_TRUE(read_all(*volume, nth + keep, error)) << error.message();
      EXPECT_EQ(plan_->hits(), 1U);
    }
  }
}

TEST_P(FaultTest, ATransferThatEndsInsideASectorGoesOnAtItsStart) {
  auto volume = create(options());
  const std::uint64_t before = plan_->unaligned();
  for (const std::size_t keep : {std::size_t{5000}, std::size_t{4097}, std::size_t{12287}}) {
    for (Action action : {Action::write, Action::read}) {
      plan_->set({.kind = Fault::Kind::cut, .action = action, .nth = 3, .keep = keep});
      ASSERT_FALSE(write_all(*volume, keep));
      Error error;
      ASSERT_TRUE(read_all(*volume, keep, error)) << error.message();
      EXPECT_EQ(plan_->hits(), 1U);
    }
  }
  EXPECT_EQ(plan_->unaligned(), before);
}

TEST_P(FaultTest, EveryTransferShortStillMovesEveryByte) {
  auto volume = create(options());
  plan_->set({.kind = Fault::Kind::cut, .action = Action::write, .sticky = true, .keep = 4096});
  ASSERT_FALSE(write_all(*volume, 3));
  plan_->set({.kind = Fault::Kind::cut, .action = Action::read, .sticky = true, .keep = 4096});
  Error error;
  EXPECT_TRUE(read_all(*volume, 3, error)) << error.message();
  EXPECT_GE(volume->stats().front().retries, 2 * 3 * kOperations);
}

TEST_P(FaultTest, NoProgressEndsInAnError) {
  auto volume = create(options());
  plan_->set({.kind = Fault::Kind::cut, .action = Action::write, .nth = 3, .sticky = true, .keep = 0});
  EXPECT_EQ(write_all(*volume, 1).kind, ErrorKind::io);
  plan_->set({.kind = Fault::Kind::cut, .action = Action::read, .nth = 3, .sticky = true, .keep = 0});
  Error error;
  EXPECT_FALSE(read_all(*volume, 1, error));
  EXPECT_EQ(error.kind, ErrorKind::corruption);  // an end of file where there should be data
}

TEST_P(FaultTest, TryAgainIsTriedAgainButNotForEver) {
  auto volume = create(options());
  for (int number : {EAGAIN, EINTR, ECANCELED}) {
    for (Action action : {Action::write, Action::read}) {
      for (std::uint64_t nth = 1; nth <= kOperations; nth += 7) {
        plan_->set({.kind = Fault::Kind::error, .action = action, .nth = nth, .error_number = number});
        ASSERT_FALSE(write_all(*volume, nth));
        Error error;
        ASSERT_TRUE(read_all(*volume, nth, error)) << error.message();
        EXPECT_EQ(plan_->hits(), 1U);
      }
    }
    plan_->set({.kind = Fault::Kind::error, .action = Action::read, .sticky = true, .error_number = number});
    Error error;
    EXPECT_FALSE(read_all(*volume, 1, error));
    EXPECT_EQ(error.error_number, number);
    EXPECT_LE(plan_->hits(), kOperations / kExtents * 17);  // each piece of one extent, and its repetitions
    plan_->clear();
  }
  plan_->set({.kind = Fault::Kind::error, .action = Action::flush, .error_number = EINTR});
  EXPECT_FALSE(volume->flush());
}

TEST_P(FaultTest, AnyOrderOfResultsAndFullRingsGiveTheSameBytes) {
  auto volume = create(options());
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    plan_->shuffle(seed);
    std::vector<std::future<Error>> ends;
    for (std::uint64_t i = 0; i < kExtents; ++i) {
      auto promise = std::make_shared<std::promise<Error>>();
      ends.push_back(promise->get_future());
      Buffer buffer = allocate_buffer(kExtent);
      fill(buffer.bytes(), i * kExtent, seed);
      volume->submit(Request{.op = Op::write, .offset = i * kExtent, .length = kExtent, .buffer = std::move(buffer)},
                     [promise](Completion&& completion) { promise->set_value(std::move(completion.error)); });
    }
    for (std::future<Error>& end : ends) EXPECT_FALSE(end.get());
    Error error;
    EXPECT_TRUE(read_all(*volume, seed, error)) << error.message();
    EXPECT_FALSE(volume->flush());
  }
}

TEST_P(FaultTest, AStuckRequestWarnsThenFailsAndItsMemoryIsKept) {
  VolumeOptions wanted = options();
  wanted.stall_warning = std::chrono::milliseconds{250};
  wanted.stall_limit = std::chrono::milliseconds{1500};
  auto volume = create(wanted);
  ASSERT_FALSE(write_all(*volume, 1));
  const auto before = notices(Notice::Kind::stalled);  // of a drive that other programs keep busy
  plan_->set({.kind = Fault::Kind::hold, .action = Action::read, .nth = 2});
  static std::atomic<int> freed{0};
  freed = 0;
  static Buffer memory;
  memory = allocate_buffer(kExtent);
  Buffer watched(
      memory.data(), memory.size(), [](std::byte*, std::size_t, void*) noexcept { ++freed; }, nullptr);
  const auto started = std::chrono::steady_clock::now();
  std::promise<Completion> promise;
  volume->submit(Request{.op = Op::read, .offset = 0, .length = kExtent, .buffer = std::move(watched)},
                 [&promise](Completion&& completion) { promise.set_value(std::move(completion)); });
  const Completion completion = promise.get_future().get();
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds{5});
  EXPECT_EQ(completion.error.kind, ErrorKind::io);
  EXPECT_EQ(completion.error.error_number, ETIMEDOUT);
  EXPECT_EQ(completion.error.offset, kDataStart + kBlock);
  EXPECT_EQ(completion.error.operation, "read");
  EXPECT_EQ(completion.error.length, kBlock);
  EXPECT_THAT(completion.error.path, ::testing::EndsWith(".tfv"));
  EXPECT_THAT(completion.error.message(), ::testing::AllOf(HasSubstr("has not answered"),
                                                           HasSubstr("name a folder on another drive with --storage"),
                                                           HasSubstr("--engine threads")));
  EXPECT_FALSE(completion.buffer);
  EXPECT_EQ(freed, 0);
  EXPECT_EQ(notices(Notice::Kind::stalled) - before, 1U);
  EXPECT_THAT(last_notice().text, ::testing::AllOf(HasSubstr("the run ends at 1 s"), HasSubstr("(dmesg)"),
                                                   HasSubstr("name a folder on another drive with --storage"),
                                                   HasSubstr("--engine threads")));
  // The volume is over, cleanly: all later calls say so and give their buffers back.
  Completion later = transfer(*volume, Op::write, 0, 4096, allocate_buffer(4096));
  EXPECT_EQ(later.error.error_number, ETIMEDOUT);
  EXPECT_TRUE(later.buffer);
  EXPECT_EQ(volume->flush().error_number, ETIMEDOUT);
  // At last the drive answers: only now the memory is free.
  plan_->release();
  for (int i = 0; i < 500 && freed == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds{10});
  EXPECT_EQ(freed, 1);
  volume.reset();
  memory.reset();
}

// The drive answers at last. A volume that is gone before is kept for ever, which a sanitizer takes for a leak.
void expect_answers(const Volume& volume) {
  for (int i = 0; i < 500 && volume.stats().front().in_flight != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds{10});
  EXPECT_EQ(volume.stats().front().in_flight, 0U);
  std::this_thread::sleep_for(std::chrono::milliseconds{300});  // flushes are not counted there
}

TEST_P(FaultTest, AStuckRequestIsCalledByItsName) {
  for (const auto& [action, name] : {std::pair{Action::write, "write"}, std::pair{Action::flush, "flush"}}) {
    VolumeOptions wanted = options();
    wanted.name = name;
    wanted.stall_limit = std::chrono::milliseconds{300};
    auto volume = create(wanted);
    ASSERT_TRUE(volume);
    ASSERT_FALSE(transfer(*volume, Op::write, 0, kBlock, allocate_buffer(kBlock)).error);
    plan_->set({.kind = Fault::Kind::hold, .action = action});
    const Error error = action == Action::write ? transfer(*volume, Op::write, 0, kBlock, allocate_buffer(kBlock)).error
                                                : volume->flush();
    EXPECT_EQ(error.error_number, ETIMEDOUT) << error.message();
    EXPECT_EQ(error.operation, name);
    plan_->release();
    expect_answers(*volume);
  }
}

TEST_P(FaultTest, TimeInWhichTheProcessIsStoppedIsNotTheDrives) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        VolumeOptions wanted = options();
        wanted.stall_warning = std::chrono::milliseconds{0};
        wanted.stall_limit = std::chrono::milliseconds{1200};
        auto volume = create(wanted);
        const bool written = !write_all(*volume, 1);
        plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
        std::promise<Completion> promise;
        volume->submit(Request{.op = Op::read, .offset = 0, .length = kExtent, .buffer = allocate_buffer(kExtent)},
                       [&promise](Completion&& completion) { promise.set_value(std::move(completion)); });
        std::this_thread::sleep_for(std::chrono::milliseconds{50});
        if (fork() == 0) {
          usleep(2'000'000);
          kill(getppid(), SIGCONT);
          _exit(0);
        }
        raise(SIGSTOP);
        std::this_thread::sleep_for(std::chrono::milliseconds{100});
        plan_->release();
        const bool answered = !promise.get_future().get().error;
        wait(nullptr);
        volume.reset();
        std::filesystem::remove_all(folder_.path());  // no destructor will
        std::_Exit(written && answered ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// In a process of its own: what a drive that does not answer may still write to is kept for ever.
TEST_P(FaultTest, WhatWaitsBehindAStuckRequestFailsWithItAndGivesItsMemoryBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        VolumeOptions wanted = options();
        wanted.depth = 3;
        wanted.stall_limit = std::chrono::milliseconds{500};
        auto volume = create(wanted);
        plan_->set({.kind = Fault::Kind::hold, .action = Action::write, .sticky = true});
        std::vector<std::promise<Completion>> ends(4);  // the first two take up the depth
        // From a callback, so that the volume finds them all at once.
        volume->submit({}, [&](Completion&&) {
          for (std::size_t i = 0; i < ends.size(); ++i)
            volume->submit(Request{.op = Op::write,
                                   .offset = i * 2 * kBlock,
                                   .length = (i + 1) * kBlock,
                                   .buffer = allocate_buffer((i + 1) * kBlock)},
                           [&ends, i](Completion&& completion) { ends[i].set_value(std::move(completion)); });
        });
        int wrong = 0;
        for (std::size_t i = 0; i < ends.size(); ++i) {
          std::future<Completion> end = ends[i].get_future();
          if (end.wait_for(std::chrono::seconds{10}) != std::future_status::ready) std::_Exit(100);
          const Completion completion = end.get();
          if (completion.error.error_number != ETIMEDOUT) wrong |= 1;
          if (static_cast<bool>(completion.buffer) != (i > 1)) wrong |= 2;
        }
        plan_->release();
        volume.reset();
        std::filesystem::remove_all(folder_.path());  // no destructor will
        std::_Exit(wrong);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_P(FaultTest, AStuckFlushEndsTheWait) {
  VolumeOptions wanted = options();
  wanted.stall_warning = std::chrono::milliseconds{20};
  wanted.stall_limit = std::chrono::milliseconds{1};  // the least there is
  auto volume = create(wanted);
  plan_->set({.kind = Fault::Kind::hold, .action = Action::flush});
  EXPECT_EQ(volume->flush().error_number, ETIMEDOUT);
  plan_->release();
  expect_answers(*volume);
}

TEST_P(FaultTest, AVolumeWhoseDriveNeverAnswersCanStillBeDestroyed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        VolumeOptions wanted = options();
        wanted.stall_limit = std::chrono::milliseconds{100};
        auto volume = create(wanted);
        plan_->set({.kind = Fault::Kind::hold, .action = Action::write});
        const Error error = write_pattern(*volume, 0, kExtent, 1);
        volume.reset();
        std::filesystem::remove_all(folder_.path());  // no destructor will
        std::_Exit(error.error_number == ETIMEDOUT ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_P(FaultTest, ASlowDriveCostsTimeAndNotProcessor) {
  auto volume = create(options());
  ASSERT_FALSE(write_all(*volume, 1));
  plan_->set(
      {.kind = Fault::Kind::delay, .action = Action::read, .sticky = true, .delay = std::chrono::milliseconds{40}});
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  Error error;
  EXPECT_TRUE(read_all(*volume, 1, error)) << error.message();
  getrusage(RUSAGE_SELF, &after);
  const auto microseconds = [](const rusage& usage) {
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000 + usage.ru_utime.tv_usec +
           usage.ru_stime.tv_usec;
  };
  // At least 8 rounds of 40 ms; a loop that spins would use all of it. (The delay itself is polled each millisecond.)
  EXPECT_LT(microseconds(after) - microseconds(before), 200'000);
}

INSTANTIATE_TEST_SUITE_P(AllEngines, FaultTest,
                         ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads),
                         [](const auto& info) { return engine_name(info.param); });

}  // namespace
}  // namespace tierflow::io
