// Negative controls: an engine that believes the kernel blindly must lose bytes under the very faults that the real one
// survives. Where these tests fail, the fault tests prove nothing.
#include <gtest/gtest.h>

#include "io/engine.h"
#include "io/file.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

using testing::Fault;
using testing::FaultPlan;

constexpr std::size_t kBytes = 64 << 10;

class FaultControl : public ::testing::Test {
 protected:
  FaultControl()
      : file_(File::create(folder_.path() / "file", {.allow_buffered = true, .allow_any_filesystem = true}).value()),
        backend_(make_threads_backend(4).value(), plan_) {
    EXPECT_TRUE(file_.preallocate(kBytes).ok());
    const int descriptor = file_.descriptor();
    EXPECT_FALSE(backend_.register_files({&descriptor, 1}));
  }

  // One operation whose result nobody looks at.
  std::int64_t perform(Action action, std::span<std::byte> bytes) {
    backend_.push({.action = action, .data = bytes.data(), .length = bytes.size()});
    std::vector<KernelResult> results;
    while (results.empty()) backend_.reap(results, std::chrono::seconds{1});
    return results.front().value;
  }

  testing::TempDir folder_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  File file_;
  testing::FaultyBackend backend_;
};

TEST_F(FaultControl, IgnoringFaultsLosesBytes) {
  Buffer data = allocate_buffer(kBytes), back = allocate_buffer(kBytes);
  fill(data.bytes(), 0, 1);
  perform(Action::write, data.bytes());
  perform(Action::read, back.bytes());
  ASSERT_TRUE(holds(back.bytes(), 0, 1));

  fill(data.bytes(), 0, 2);
  for (const Fault& fault : {Fault{.kind = Fault::Kind::error, .action = Action::write},
                             Fault{.kind = Fault::Kind::cut, .action = Action::write, .keep = 4096}}) {
    plan_->set(fault);
    perform(Action::write, data.bytes());
    perform(Action::read, back.bytes());
    EXPECT_FALSE(holds(back.bytes(), 0, 2));
  }
  plan_->clear();
  perform(Action::write, data.bytes());
  for (const Fault& fault : {Fault{.kind = Fault::Kind::error, .action = Action::read},
                             Fault{.kind = Fault::Kind::cut, .action = Action::read, .keep = 4096},
                             Fault{.kind = Fault::Kind::flip, .action = Action::read}}) {
    plan_->set(fault);
    std::fill(back.bytes().begin(), back.bytes().end(), std::byte{0});
    perform(Action::read, back.bytes());
    EXPECT_FALSE(holds(back.bytes(), 0, 2));
    EXPECT_EQ(plan_->hits(), 1U);
  }
}

TEST_F(FaultControl, ASecondFlushWouldSucceedWithoutTheLostData) {
  plan_->cache_writes();
  Buffer data = allocate_buffer(kBytes), back = allocate_buffer(kBytes);
  fill(data.bytes(), 0, 1);
  EXPECT_EQ(perform(Action::write, data.bytes()), static_cast<std::int64_t>(kBytes));
  EXPECT_EQ(perform(Action::flush, {}), 0);
  fill(data.bytes(), 0, 2);
  EXPECT_EQ(perform(Action::write, data.bytes()), static_cast<std::int64_t>(kBytes));
  plan_->set({.kind = Fault::Kind::error, .action = Action::flush});
  EXPECT_EQ(perform(Action::flush, {}), -EIO);
  EXPECT_EQ(perform(Action::flush, {}), 0);  // a drive that says all is well
  perform(Action::read, back.bytes());
  EXPECT_FALSE(holds(back.bytes(), 0, 2));
  EXPECT_TRUE(holds(back.bytes(), 0, 1));
}

TEST_F(FaultControl, ResultsReallyComeInAnotherOrder) {
  plan_->shuffle(7);
  Buffer data = allocate_buffer(kBytes);
  bool refused = false, turned = false;
  for (std::uint32_t round = 0; round < 1000 && !(refused && turned); ++round) {
    std::uint32_t pushed = 0;
    for (std::uint32_t i = 0; i < 4; ++i) {
      pushed += backend_.push(
          {.action = Action::read, .ticket = i, .offset = i * 4096, .data = data.data() + i * 4096, .length = 4096});
    }
    std::vector<KernelResult> results;
    while (results.size() < pushed) backend_.reap(results, std::chrono::seconds{1});
    refused = refused || pushed < 4;
    turned =
        turned || !std::is_sorted(results.begin(), results.end(),
                                  [](const KernelResult& a, const KernelResult& b) { return a.ticket < b.ticket; });
  }
  EXPECT_TRUE(refused);
  EXPECT_TRUE(turned);
}

}  // namespace
}  // namespace tierflow::io
