// What a forked child has of its parent's files and rings.
#include "io/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "io/backend.h"
#include "io/file.h"
#include "tests/support/child.h"
#include "tests/support/temp_dir.h"

namespace tierflow::io {
namespace {

using testing::in_child;

std::string target_of(int descriptor) {
  std::error_code none;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor), none).string();
}

int lowest_free() {
  const int descriptor = dup(STDERR_FILENO);
  close(descriptor);
  return descriptor;
}

class ForkGuardTest : public ::testing::Test {
 protected:
  File file() {
    return File::create(folder_.path() / "file", {.allow_buffered = true, .allow_any_filesystem = true}).value();
  }
  // Something else that has this number now; whether a child finds it there.
  static bool child_keeps(int number) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0 || dup2(ends[1], number) != number) return false;
    const std::string pipe = target_of(number);
    const int code = in_child([&] { return target_of(number) == pipe ? 0 : 1; });
    for (const int end : {ends[0], ends[1]})
      if (end != number) close(end);
    close(number);
    return code == 0;
  }
  testing::TempDir folder_;
};

TEST_F(ForkGuardTest, AChildHasNothingInTheirPlace) {
  const File file = this->file();
  const auto ring = make_uring_backend(4);
  ASSERT_TRUE(ring.ok());
  std::set<int> kept;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename());
    if (target_of(number) == "anon_inode:[io_uring]" || number == file.descriptor()) kept.insert(number);
  }
  ASSERT_EQ(kept.size(), 2U);
  const int next = lowest_free();
  EXPECT_EQ(in_child([&] {
              for (const int number : kept) {
                if (target_of(number) != "/dev/null") return 1;
                if ((fcntl(number, F_GETFD) & FD_CLOEXEC) == 0) return 2;
              }
              return lowest_free() == next ? 0 : 3;  // nothing more is open than before
            }),
            0);
  for (const int number : kept) EXPECT_NE(target_of(number), "/dev/null");
}

TEST_F(ForkGuardTest, AClosedFilesNumberIsLeftToWhoHasItNext) {
  int number;
  {
    const File file = this->file();
    number = file.descriptor();
  }
  EXPECT_TRUE(child_keeps(number));
}

TEST_F(ForkGuardTest, AClosedRingsNumberIsLeftToWhoHasItNext) {
  int number = -1;
  {
    const auto ring = make_uring_backend(4);
    ASSERT_TRUE(ring.ok());
    for (int each = 0; each < 1024 && number < 0; ++each)
      if (target_of(each) == "anon_inode:[io_uring]") number = each;
  }
  ASSERT_GE(number, 0);
  EXPECT_TRUE(child_keeps(number));
}

}  // namespace
}  // namespace tierflow::io
