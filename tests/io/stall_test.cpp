// Limits on a drive that does not answer: none where none is wanted, and everything that waits ends by the one there
// is.
#include <gmock/gmock.h>
#include <unistd.h>

#include <future>
#include <mutex>
#include <thread>

#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

using testing::Fault;
using testing::FaultPlan;
using ::testing::HasSubstr;

constexpr std::size_t kBlock = 4096;

class StallTest : public ::testing::Test {
 protected:
  VolumeOptions options() {
    VolumeOptions options = options_in(folder_, 64 * kBlock);
    options.engine = EngineKind::threads;
    options.block = kBlock;
    options.wrap_backend = testing::faults(plan_);
    options.on_notice = [this](const Notice& notice) {
      std::lock_guard lock(mutex_);
      notices_.push_back(notice.text);
    };
    return options;
  }
  std::vector<std::string> notices() {
    std::lock_guard lock(mutex_);
    return notices_;
  }
  // Waits for this many, or for the end of the request.
  void await(std::size_t count, const std::future<Completion>& end) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds{20};
    while (notices().size() < count && std::chrono::steady_clock::now() < limit)
      if (end.wait_for(std::chrono::milliseconds{1}) == std::future_status::ready) return;
  }
  static std::future<Completion> read(Volume& volume, std::uint64_t offset = 0) {
    auto promise = std::make_shared<std::promise<Completion>>();
    volume.submit(Request{.op = Op::read, .offset = offset, .length = kBlock, .buffer = allocate_buffer(kBlock)},
                  [promise](Completion&& completion) { promise->set_value(std::move(completion)); });
    return promise->get_future();
  }
  testing::TempDir folder_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::mutex mutex_;
  std::vector<std::string> notices_;
};

TEST_F(StallTest, WithoutALimitARequestMayTakeForEverAndIsOnlySpokenOf) {
  VolumeOptions wanted = options();
  wanted.stall_warning = std::chrono::milliseconds{20};
  wanted.stall_limit = std::chrono::milliseconds{0};
  const auto volume = create(wanted);
  plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
  std::future<Completion> end = read(*volume);
  await(1, end);
  plan_->release();
  EXPECT_FALSE(end.get().error);
  ASSERT_EQ(notices().size(), 1U);
  EXPECT_THAT(notices()[0], ::testing::AllOf(HasSubstr("has not answered"), ::testing::Not(HasSubstr("the run ends"))));
}

// Somebody takes the drive out that is named.
TEST_F(StallTest, OfSeveralDrivesTheOneInTroubleIsNamed) {
  VolumeOptions wanted = options();
  wanted.folders = {folder_.path() / "a", folder_.path() / "b"};
  wanted.stall_warning = std::chrono::milliseconds{20};
  wanted.stall_limit = std::chrono::milliseconds{1000};
  const auto volume = create(wanted);
  ASSERT_TRUE(volume);
  const std::string second = (folder_.path() / "b" / "state.tfv").string();  // it has every other block

  plan_->set({.kind = Fault::Kind::error, .action = Action::read});
  EXPECT_FALSE(read(*volume, kBlock).get().error);
  plan_->set({.kind = Fault::Kind::error, .action = Action::read, .sticky = true});
  EXPECT_EQ(read(*volume, kBlock).get().error.path, second);
  plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
  EXPECT_EQ(read(*volume, kBlock).get().error.path, second);
  plan_->release();
  EXPECT_THAT(notices(), ::testing::Contains(HasSubstr("when tried again")));
  EXPECT_THAT(notices(), ::testing::Contains(HasSubstr("has not answered")));
  EXPECT_THAT(notices(), ::testing::Each(HasSubstr(second)));
}

TEST_F(StallTest, EachStallIsSpokenOfOnce) {
  VolumeOptions wanted = options();
  wanted.stall_warning = std::chrono::milliseconds{20};
  const auto volume = create(wanted);
  for (std::size_t round = 1; round <= 2; ++round) {
    plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
    std::future<Completion> end = read(*volume);
    await(round, end);
    EXPECT_EQ(end.wait_for(std::chrono::milliseconds{50}), std::future_status::timeout);
    plan_->release();
    EXPECT_FALSE(end.get().error);
    EXPECT_EQ(notices().size(), round);
  }
}

TEST_F(StallTest, WithoutAWarningNothingIsSaid) {
  VolumeOptions wanted = options();
  wanted.stall_warning = std::chrono::milliseconds{0};
  wanted.stall_limit = std::chrono::milliseconds{60'000};
  const auto volume = create(wanted);
  // The volume looks each second at most: of what lasts as long it would speak.
  plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
  std::future<Completion> end = read(*volume);
  for (int i = 0; i < 20; ++i)
    EXPECT_FALSE(transfer(*volume, Op::write, 8 * kBlock, kBlock, allocate_buffer(kBlock)).error);
  plan_->release();
  EXPECT_FALSE(end.get().error);
  EXPECT_THAT(notices(), ::testing::IsEmpty());
}

TEST_F(StallTest, AReadThatFailsForGoodIsNotSaidToHaveSucceeded) {
  const auto volume = create(options());
  plan_->set({.kind = Fault::Kind::error, .action = Action::read, .sticky = true});
  EXPECT_TRUE(read(*volume).get().error);
  EXPECT_THAT(notices(), ::testing::IsEmpty());
}

TEST_F(StallTest, AFlushFindsRoomBesideAsManyRequestsAsThereMayBe) {
  VolumeOptions wanted = options();
  wanted.depth = 1;
  const auto volume = create(wanted);
  plan_->set({.kind = Fault::Kind::hold, .action = Action::read});
  std::future<Completion> end = read(*volume);
  while (plan_->hits() == 0) std::this_thread::yield();
  std::future<Error> flush = std::async(std::launch::async, [&] { return volume->flush(); });
  EXPECT_EQ(flush.wait_for(std::chrono::seconds{10}), std::future_status::ready);
  plan_->release();
  EXPECT_FALSE(flush.get());
  EXPECT_FALSE(end.get().error);
}

// In processes of their own: what a drive may still write to is kept for ever.
TEST_F(StallTest, FlushesOfSeveralDrivesThatHangEndOnceAndLeaveNothingToWaitFor) {
  EXPECT_EQ(testing::in_child([&] {
              VolumeOptions wanted = options();
              wanted.folders = {folder_.path() / "a", folder_.path() / "b"};
              wanted.stall_limit = std::chrono::milliseconds{50};
              auto volume = create(wanted);
              plan_->set({.kind = Fault::Kind::hold, .action = Action::flush, .sticky = true});
              std::vector<std::future<Error>> flushes;
              for (int i = 0; i < 3; ++i)
                flushes.push_back(std::async(std::launch::async, [&] { return volume->flush(); }));
              for (std::future<Error>& flush : flushes)
                if (flush.get().error_number != ETIMEDOUT) return 1;
              if (volume->flush().error_number != ETIMEDOUT) return 2;
              alarm(10);  // nothing is left to wait for
              volume.reset();
              return 0;
            }),
            0);
}

TEST_F(StallTest, NobodyElseGetsTheFileWhileTheDriveMayStillWriteToIt) {
  EXPECT_EQ(testing::in_child([&] {
              VolumeOptions wanted = options();
              wanted.stall_limit = std::chrono::milliseconds{50};
              auto volume = create(wanted);
              plan_->set({.kind = Fault::Kind::hold, .action = Action::write});
              if (transfer(*volume, Op::write, 0, kBlock, allocate_buffer(kBlock)).error.error_number != ETIMEDOUT)
                return 1;
              volume.reset();
              const Result<std::unique_ptr<Volume>> next = Volume::open(options());
              if (next) return 2;
              return next.error().kind == ErrorKind::locked ? 0 : 3;
            }),
            0);
}

}  // namespace
}  // namespace tierflow::io
