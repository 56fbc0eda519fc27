// Which engines are trusted: one that fails, lies or stays silent while it is tried is not.
#include "io/probe.h"

#include <gmock/gmock.h>

#include "io/file.h"
#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

using testing::Fault;
using testing::FaultPlan;
using ::testing::HasSubstr;

class ProbeTest : public ::testing::Test {
 protected:
  std::vector<EngineFile> open(unsigned count) {
    std::vector<EngineFile> files;
    for (unsigned i = 0; i < count; ++i) {
      files_.push_back(File::create(folder_.path() / std::to_string(files_.size()),
                                    {.allow_buffered = true, .allow_any_filesystem = true})
                           .value());
      EXPECT_TRUE(files_.back().preallocate(1 << 20).ok());
      files.push_back({files_.back().descriptor(), files_.back().path()});
    }
    return files;
  }
  ProbeOptions options(EngineKind wanted = EngineKind::automatic) {
    return {.wanted = wanted,
            .depth = 4,
            .scratch_offset = kScratchStart,
            .limit = std::chrono::seconds{1},
            .wrap_backend = testing::faults(plan_)};
  }

  testing::TempDir folder_;
  std::vector<File> files_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
};

TEST_F(ProbeTest, TriesEveryFileWithAWriteAFlushAndARead) {
  const Result<Probed> probed = probe_engine(open(3), options());
  ASSERT_TRUE(probed.ok());
  EXPECT_TRUE(probed.value().warnings.empty());
  EXPECT_EQ(probed.value().engine->kind(), EngineKind::io_uring);
  for (const Action action : {Action::write, Action::flush, Action::read}) EXPECT_EQ(plan_->seen(action), 3U);
}

TEST_F(ProbeTest, WritesNowhereButInTheScratchSpace) {
  std::vector<EngineFile> files = open(1);
  Buffer data = allocate_buffer(1 << 20), back = allocate_buffer(1 << 20);
  fill(data.bytes(), 0, 4);
  ASSERT_FALSE(files_[0].write(0, data.data(), data.size()));
  ASSERT_TRUE(probe_engine(files, options()).ok());
  ASSERT_FALSE(files_[0].read(0, back.data(), back.size()));
  for (std::size_t at = 0; at < back.size(); at += 4096) {
    const bool scratch = at >= kScratchStart && at < kScratchStart + 4096;
    EXPECT_EQ(holds(back.bytes().subspan(at, 4096), at, 4), !scratch) << at;
  }
}

TEST_F(ProbeTest, ADriveThatReturnsOtherBytesIsRefusedUnderEveryEngine) {
  for (const std::uint64_t nth : {1U, 2U}) {
    plan_->set({.kind = Fault::Kind::flip, .action = Action::read, .nth = nth});
    const std::vector<EngineFile> files = open(2);
    const Result<Probed> probed = probe_engine(files, options());
    ASSERT_FALSE(probed.ok());
    EXPECT_EQ(plan_->hits(), 1U);  // the next engine was not tried
    EXPECT_EQ(probed.error().kind, ErrorKind::corruption);
    EXPECT_EQ(probed.error().path, files[nth - 1].path);
    EXPECT_EQ(probed.error().offset, kScratchStart);
    EXPECT_THAT(probed.error().detail, HasSubstr("other bytes"));
  }
}

TEST_F(ProbeTest, AnEngineThatFailsWhileItIsTriedIsNotTrusted) {
  for (const auto& [action, number] : {std::pair{Action::write, EPERM}, {Action::flush, EACCES}}) {
    plan_->set({.kind = Fault::Kind::error, .action = action, .nth = 2, .error_number = number});
    const Result<Probed> probed = probe_engine(open(2), options());
    ASSERT_TRUE(probed.ok());
    EXPECT_EQ(probed.value().engine->kind(), EngineKind::libaio);
    ASSERT_EQ(probed.value().warnings.size(), 1U);
    EXPECT_THAT(probed.value().warnings[0], ::testing::AllOf(HasSubstr("io_uring"), HasSubstr("seccomp")));
  }
  plan_->set({.kind = Fault::Kind::error, .action = Action::read, .sticky = true, .error_number = EINVAL});
  const Result<Probed> none = probe_engine(open(1), options());
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().error_number, EINVAL);
  EXPECT_EQ(plan_->hits(), 3U);  // each engine was tried
}

TEST_F(ProbeTest, BufferedFilesAreNotForLibaio) {
  ProbeOptions wanted = options();
  wanted.direct = false;
  plan_->set({.kind = Fault::Kind::error, .action = Action::write, .error_number = EPERM});
  const Result<Probed> probed = probe_engine(open(1), wanted);
  ASSERT_TRUE(probed.ok());
  EXPECT_EQ(probed.value().engine->kind(), EngineKind::threads);
}

TEST_F(ProbeTest, AnEngineThatWasAskedForIsTakenOrRefused) {
  for (const EngineKind kind : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    const Result<Probed> probed = probe_engine(open(1), options(kind));
    ASSERT_TRUE(probed.ok());
    EXPECT_EQ(probed.value().engine->kind(), kind);
    plan_->set({.kind = Fault::Kind::error, .action = Action::write, .error_number = EPERM});
    const Result<Probed> refused = probe_engine(open(1), options(kind));
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.error().message(),
                ::testing::AllOf(HasSubstr(std::string("engine ") + engine_name(kind)), HasSubstr("automatic")));
    plan_->clear();
  }
}

TEST_F(ProbeTest, ADriveThatDoesNotAnswerEndsIt) {
  EXPECT_EQ(testing::in_child([&] {  // its engine is kept for ever
              plan_->set({.kind = Fault::Kind::hold, .action = Action::flush, .nth = 2});
              const std::vector<EngineFile> files = open(2);
              const Result<Probed> probed = probe_engine(files, options());
              if (probed) return 1;
              if (probed.error().error_number != ETIMEDOUT || probed.error().kind != ErrorKind::io) return 2;
              if (probed.error().path != files[1].path) return 3;
              return plan_->hits() == 1 ? 0 : 4;  // one engine: the others would wait as long
            }),
            0);
}

}  // namespace
}  // namespace tierflow::io
