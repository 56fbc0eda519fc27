#include "io/error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace tierflow::io {
namespace {

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

}  // namespace
}  // namespace tierflow::io
