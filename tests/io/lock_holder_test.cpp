#include "io/lock_holder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include "io/descriptor.h"
#include "tests/support/child.h"
#include "tests/support/temp_dir.h"

namespace tierflow::io {
namespace {

class LockHolderTest : public ::testing::Test {
 protected:
  testing::TempDir folder_;
  const Descriptor file_{open((folder_.path() / "file").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)};
};

TEST_F(LockHolderTest, IsWhoHoldsThisFileAndHow) {
  EXPECT_EQ(lock_holder(file_.fd()).process, 0);
  for (const bool shared : {false, true}) {
    ASSERT_EQ(::flock(file_.fd(), shared ? LOCK_SH : LOCK_EX), 0);
    const LockHolder holder = lock_holder(file_.fd());
    EXPECT_EQ(holder.process, getpid());
    EXPECT_EQ(holder.shared, shared);
    EXPECT_FALSE(holder.ended);
  }
  const Descriptor other(open((folder_.path() / "other").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(lock_holder(other.fd()).process, 0);
}

TEST_F(LockHolderTest, LocksOfAnotherKindAreNotMeant) {
  struct flock whole {
    .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0, .l_pid = 0
  };
  ASSERT_EQ(fcntl(file_.fd(), F_SETLK, &whole), 0);
  EXPECT_EQ(lock_holder(file_.fd()).process, 0);
}

TEST_F(LockHolderTest, AnotherUsersProcessHasNotEnded) {
  if (geteuid() != 0) GTEST_SKIP() << "only root becomes another user";
  ASSERT_EQ(::flock(file_.fd(), LOCK_EX), 0);
  EXPECT_EQ(testing::in_child([&] {
              const pid_t parent = getppid();
              if (setuid(65534) != 0) return 1;
              const LockHolder holder = lock_holder(file_.fd());
              if (holder.process != parent) return 2;
              return holder.ended ? 3 : 0;
            }),
            0);
}

}  // namespace
}  // namespace tierflow::io
