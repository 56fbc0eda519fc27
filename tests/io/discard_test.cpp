// The remains of volumes: whose they are, and that nobody's bytes go with them.
#include "io/discard.h"

#include <gmock/gmock.h>

#include <fstream>

#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using testing::failing;
using testing::SystemCall;
using testing::SystemCalls;

class DiscardTest : public ::testing::Test {
 protected:
  std::filesystem::path folder(const char* name) { return folder_.path() / name; }
  VolumeOptions in(std::vector<std::filesystem::path> folders) {
    VolumeOptions options = options_in(folder_, 1 << 20);
    options.engine = EngineKind::threads;
    options.folders = std::move(folders);
    return options;
  }
  std::optional<Membership> part(const std::filesystem::path& folder) {
    Result<std::optional<Membership>> found = membership(in({}), folder);
    EXPECT_TRUE(found.ok()) << found.error().message();
    return found ? found.value() : std::nullopt;
  }
  testing::TempDir folder_;
};

TEST_F(DiscardTest, TheNamesStayGoneAfterAPowerCut) {
  create(in({folder("a"), folder("b")})).reset();
  SystemCalls calls;
  EXPECT_FALSE(discard(in({folder("a"), folder("b")})));
  std::vector<std::string> order;
  for (const SystemCall& call : calls.seen())
    if (call.name == "unlink" || call.name == "fsync") order.push_back(std::string(call.name) + " " + call.path);
  EXPECT_THAT(
      order, ::testing::ElementsAre("unlink " + (folder("a") / "state.tfv").string(), "fsync " + folder("a").string(),
                                    "unlink " + (folder("b") / "state.tfv").string(), "fsync " + folder("b").string()));
}

TEST_F(DiscardTest, AFolderThatCannotBeFlushedIsAnError) {
  create(in({folder("a")})).reset();
  SystemCalls calls(failing("fsync", EIO));
  const Error error = discard(in({folder("a")}));
  EXPECT_EQ(error.kind, ErrorKind::io);
  EXPECT_EQ(error.path, folder("a").string());
}

TEST_F(DiscardTest, AFileThatCannotBeOpenedIsAnErrorAndStays) {
  create(in({folder("a")})).reset();
  for (const int number : {EACCES, EMFILE}) {
    SystemCalls calls(failing("open", number, "state.tfv"));
    EXPECT_EQ(discard(in({folder("a")})).error_number, number);
    EXPECT_EQ(creation_was_interrupted(in({folder("a")})).error().error_number, number);
  }
  EXPECT_TRUE(std::filesystem::exists(folder("a") / "state.tfv"));
}

TEST_F(DiscardTest, WhoOnlyReadsDoesNotCountWhereThatIsAskedFor) {
  VolumeOptions options = in({folder("a")});
  create(options).reset();
  options.read_only = true;
  Result<std::unique_ptr<Volume>> reader = Volume::open(options);
  ASSERT_TRUE(reader.ok());
  EXPECT_TRUE(part(folder("a")).has_value());
  EXPECT_FALSE(discard(options));
  EXPECT_FALSE(std::filesystem::exists(folder("a") / "state.tfv"));
}

// One of them may have had its bytes.
TEST_F(DiscardTest, WhereAPartIsMissingAVolumeWithAHeaderIsNoInterruptedCreation) {
  create(in({folder("a")})).reset();
  std::filesystem::create_directory(folder("b"));
  std::ofstream(folder("b") / "state.tfv").close();
  std::filesystem::permissions(folder("b") / "state.tfv", std::filesystem::perms(0600));
  EXPECT_TRUE(creation_was_interrupted(in({folder("a"), folder("b")})).value());
  EXPECT_FALSE(creation_was_interrupted(in({folder("a"), folder("b"), folder("missing")})).value());
}

TEST_F(DiscardTest, AHeaderThatCannotBeReadIsAnErrorAndNoInterruptedCreation) {
  create(in({folder("a")})).reset();
  SystemCalls calls(failing("pread", EIO));
  const Result<bool> interrupted = creation_was_interrupted(in({folder("a")}));
  ASSERT_FALSE(interrupted.ok());
  EXPECT_EQ(interrupted.error().kind, ErrorKind::io);
}

#ifdef STATX_DIOALIGN
TEST_F(DiscardTest, ADriveOfLargeSectorsIsReadInThem) {
  create(in({folder("a")})).reset();
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name == "statx") return 16384;
    return {};
  });
  EXPECT_FALSE(creation_was_interrupted(in({folder("a")})).value());
  EXPECT_TRUE(part(folder("a")).has_value());
  EXPECT_GE(calls.count("pread"), 3U);
  for (const SystemCall& call : calls.seen()) {
    if (call.name == "pread") {
      EXPECT_EQ(call.argument % 16384, 0);
    }
  }
}
#endif

TEST_F(DiscardTest, APartSaysOfWhichVolumeAndOfHowManyPartsItIs) {
  EXPECT_FALSE(part(folder("a")).has_value());
  create(in({folder("a"), folder("b")})).reset();
  create(in({folder("c")})).reset();
  ASSERT_TRUE(part(folder("a")).has_value());
  EXPECT_EQ(part(folder("a"))->count, 2U);
  EXPECT_EQ(part(folder("a")), part(folder("b")));
  EXPECT_EQ(part(folder("c"))->count, 1U);
  EXPECT_NE(part(folder("a"))->volume, part(folder("c"))->volume);
  std::filesystem::resize_file(folder("c") / "state.tfv", 100);
  EXPECT_FALSE(part(folder("c")).has_value());
}

TEST_F(DiscardTest, APartThatIsInUseSaysByWhom) {
  const auto volume = create(in({folder("a")}));
  const Result<std::optional<Membership>> found = membership(in({}), folder("a"));
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().kind, ErrorKind::locked);
  EXPECT_EQ(creation_was_interrupted(in({folder("a")})).error().kind, ErrorKind::locked);
}

}  // namespace
}  // namespace tierflow::io
