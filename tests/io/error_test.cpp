#include "io/error.h"

#include <gmock/gmock.h>

#include <cerrno>

namespace tierflow::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ErrorTest, TheMessageNamesWhatIsKnownAndNothingElse) {
  EXPECT_EQ((Error{.kind = ErrorKind::usage, .detail = "give less"}).message(), "give less");
  EXPECT_EQ((Error{.kind = ErrorKind::io, .operation = "read", .path = "/a/b", .detail = "why"}).message(),
            "read /a/b: why");
  EXPECT_EQ((Error{.kind = ErrorKind::io,
                   .operation = "read",
                   .path = "/a/b",
                   .offset = 7,
                   .length = 8,
                   .error_number = EIO,
                   .detail = "why"})
                .message(),
            "read /a/b (offset 7, 8 bytes): Input/output error (errno 5): why");
}

// Other programs ask for the exit code: a kind keeps its number (docs/errors.md).
TEST(ErrorTest, TheKindsAreTheExitCodes) {
  EXPECT_EQ(static_cast<int>(ErrorKind::none), 0);
  EXPECT_EQ(static_cast<int>(ErrorKind::internal), 1);
  EXPECT_EQ(static_cast<int>(ErrorKind::usage), 2);
  EXPECT_EQ(static_cast<int>(ErrorKind::input), 3);
  EXPECT_EQ(static_cast<int>(ErrorKind::environment), 4);
  EXPECT_EQ(static_cast<int>(ErrorKind::io), 5);
  EXPECT_EQ(static_cast<int>(ErrorKind::corruption), 6);
  EXPECT_EQ(static_cast<int>(ErrorKind::numeric), 7);
  EXPECT_EQ(static_cast<int>(ErrorKind::locked), 8);
  EXPECT_EQ(static_cast<int>(ErrorKind::memory), 9);
  EXPECT_EQ(static_cast<int>(ErrorKind::cancelled), 130);
}

TEST(ErrorTest, AdviceFitsTheErrorNumber) {
  for (const int number : {EIO, ENODEV, ENXIO})
    EXPECT_THAT(advice(number), AllOf(HasSubstr("failed or went away"), HasSubstr("dmesg"), HasSubstr("--storage")));
  EXPECT_THAT(advice(EROFS), AllOf(HasSubstr("read-only"), HasSubstr("dmesg"), HasSubstr("--storage")));
  for (const int number : {ENOSPC, EDQUOT}) EXPECT_THAT(advice(number), HasSubstr("space that was reserved"));
  EXPECT_THAT(advice(EFBIG), HasSubstr("ulimit -f"));
  for (const int number : {0, EPERM, ENOENT, EINVAL}) EXPECT_EQ(advice(number), "");
}

}  // namespace
}  // namespace tierflow::io
