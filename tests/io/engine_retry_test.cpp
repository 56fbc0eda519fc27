// What the engine makes of a kernel that turns requests away, moves nothing, or claims too much.
#include <gmock/gmock.h>

#include <cerrno>
#include <functional>
#include <utility>

#include "io/engine.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::int64_t kAll = INT64_MAX;  // moves what it was asked to

using Answers = std::function<std::int64_t(const KernelOp&)>;

class ToldBackend final : public PlainBackend {
 public:
  explicit ToldBackend(Answers answers) : answers_(std::move(answers)) {}
  EngineKind kind() const override { return EngineKind::threads; }
  bool push(const KernelOp& op) override {
    const std::int64_t value = answers_(op);
    results_.push_back({op.ticket, value == kAll ? static_cast<std::int64_t>(op.length) : value});
    return true;
  }
  void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds) override {
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }
  void wake() override {}

 private:
  const Answers answers_;
  std::vector<KernelResult> results_;
};

class EngineRetryTest : public ::testing::Test {
 protected:
  Outcome perform(Action action, std::size_t blocks, Answers answers) {
    Engine engine(std::make_unique<ToldBackend>(std::move(answers)), {{3, "/first"}, {4, "/second"}}, 2, kBlock);
    EXPECT_FALSE(engine.start());
    Transfer transfer{.action = action, .file = 1, .bytes = memory_.bytes().first(blocks * kBlock)};
    EXPECT_TRUE(engine.submit(transfer));
    std::vector<Outcome> outcomes;
    while (outcomes.empty()) engine.wait(outcomes, std::chrono::seconds{1});
    return std::move(outcomes.front());
  }
  const Buffer memory_ = allocate_buffer(8 * kBlock);
};

TEST_F(EngineRetryTest, ABusyKernelIsAskedAgain) {
  for (const int number : {EAGAIN, EINTR, ECANCELED, EBUSY}) {
    for (const Action action : {Action::read, Action::write, Action::flush}) {
      int asked = 0;
      const Outcome outcome = perform(action, action == Action::flush ? 0 : 1,
                                      [&](const KernelOp&) { return ++asked < 4 ? std::int64_t{-number} : kAll; });
      EXPECT_FALSE(outcome.error) << outcome.error.message();
      EXPECT_EQ(asked, 4);
      EXPECT_EQ(outcome.retries, 3U);
      EXPECT_LT(outcome.elapsed, std::chrono::seconds{10});
    }
  }
}

TEST_F(EngineRetryTest, AKernelThatIsBusyForMillisecondsIsNoFailure) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds{3};
  const Outcome outcome = perform(Action::write, 1, [&](const KernelOp&) {
    return std::chrono::steady_clock::now() < until ? std::int64_t{-EAGAIN} : kAll;
  });
  EXPECT_FALSE(outcome.error) << outcome.error.message();
}

// A path that may block, on another thread.
TEST_F(EngineRetryTest, AKernelThatStaysBusyIsAskedToTakeItsTime) {
  std::vector<bool> patient;
  const Outcome outcome = perform(Action::read, 1, [&](const KernelOp& op) {
    patient.push_back(op.patient);
    return patient.size() < 7 ? std::int64_t{-EAGAIN} : kAll;
  });
  EXPECT_FALSE(outcome.error);
  EXPECT_EQ(patient, (std::vector<bool>{false, false, false, false, true, true, true}));
}

TEST_F(EngineRetryTest, AfterEachBlockThatMovedTheKernelMayTurnItAwayAnew) {
  for (const Action action : {Action::read, Action::write}) {
    int asked = 0;
    const Outcome outcome = perform(action, 4, [&](const KernelOp&) {
      return ++asked % 6 == 0 ? static_cast<std::int64_t>(kBlock) : std::int64_t{-EAGAIN};
    });
    EXPECT_FALSE(outcome.error) << outcome.error.message();
    EXPECT_EQ(asked, 24);
  }
}

TEST_F(EngineRetryTest, ACallThatMovesNothingIsRepeatedAfterEachBlockThatMoved) {
  for (const Action action : {Action::read, Action::write}) {
    int asked = 0;
    const Outcome outcome = perform(action, 4, [&](const KernelOp& op) {
      EXPECT_EQ(op.offset, static_cast<std::uint64_t>(asked / 2) * kBlock);
      return ++asked % 2 == 0 ? static_cast<std::int64_t>(kBlock) : std::int64_t{0};
    });
    EXPECT_FALSE(outcome.error) << outcome.error.message();
    EXPECT_EQ(asked, 8);
  }
}

TEST_F(EngineRetryTest, MoreBytesThanWereAskedForAreNotBelieved) {
  for (const Action action : {Action::read, Action::write}) {
    const Outcome outcome =
        perform(action, 2, [](const KernelOp& op) { return static_cast<std::int64_t>(op.length + kBlock); });
    EXPECT_EQ(outcome.error.kind, ErrorKind::io);
    EXPECT_EQ(outcome.error.path, "/second");
    EXPECT_THAT(outcome.error.message(), ::testing::HasSubstr("more bytes than were asked for"));
  }
}

TEST_F(EngineRetryTest, ACallThatIsWrongInItselfIsNotRepeated) {
  for (const int number : {EINVAL, EBADF}) {
    int asked = 0;
    const Outcome outcome = perform(Action::read, 1, [&](const KernelOp&) {
      ++asked;
      return std::int64_t{-number};
    });
    EXPECT_EQ(outcome.error.error_number, number);
    EXPECT_EQ(asked, 1);
  }
}

}  // namespace
}  // namespace tierflow::io
