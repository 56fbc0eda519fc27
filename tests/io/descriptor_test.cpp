#include "io/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"

namespace tierflow::io {
namespace {

bool is_open(int descriptor) {
  return fcntl(descriptor, F_GETFD) >= 0;
}

TEST(DescriptorTest, OneThatIsAssignedToClosesWhatItHad) {
  const int first = open("/dev/null", O_RDONLY | O_CLOEXEC), second = open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    Descriptor held(first);
    held = Descriptor(second);
    EXPECT_EQ(held.fd(), second);
    EXPECT_FALSE(is_open(first));
    EXPECT_TRUE(is_open(second));
  }
  EXPECT_FALSE(is_open(second));
}

TEST(DescriptorTest, ZeroIsANumberAsAnyOther) {
  EXPECT_EQ(testing::in_child([] {
              close(0);
              {
                const Descriptor held(open("/dev/null", O_RDONLY | O_CLOEXEC));
                if (held.fd() != 0 || !held) return 1;
              }
              return is_open(0) ? 2 : 0;
            }),
            0);
}

// A pipe takes less than all of it, and a signal ends the call in between.
TEST(DescriptorTest, AWriteWithoutAnOffsetGoesOnWhereASignalCutIt) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  struct sigaction interrupts {
  }, before{};
  interrupts.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGUSR1, &interrupts, &before), 0);
  std::vector<std::byte> bytes(1 << 20), back;
  fill(bytes, 0, 7);
  Moved moved;
  std::atomic<bool> done{false};
  std::thread writer([&] {
    moved = write_all(ends[1], std::nullopt, bytes);
    done = true;
    close(ends[1]);
  });
  std::vector<std::byte> part(3 << 14);
  for (ssize_t length = 1; length > 0;) {
    for (int i = 0; i < 3 && !done; ++i) {
      pthread_kill(writer.native_handle(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds{300});
    }
    length = read(ends[0], part.data(), part.size());
    if (length > 0) back.insert(back.end(), part.begin(), part.begin() + length);
  }
  writer.join();
  close(ends[0]);
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(moved.bytes, bytes.size());
  EXPECT_EQ(moved.error_number, 0);
  EXPECT_EQ(back, bytes);
}

}  // namespace
}  // namespace tierflow::io
