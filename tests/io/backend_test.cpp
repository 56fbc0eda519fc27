// The backends under a kernel that refuses, interrupts or takes only part of what it is given.
#include "io/backend.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <thread>

#include "io/file.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/sanitized.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using testing::failing;
using testing::SystemCall;
using testing::SystemCalls;

constexpr std::size_t kBlock = 4096;

class BackendTest : public ::testing::Test {
 protected:
  BackendTest()
      : file_(File::create(folder_.path() / "file", {.allow_buffered = true, .allow_any_filesystem = true}).value()) {
    EXPECT_TRUE(file_.preallocate(64 * kBlock).ok());
  }
  ~BackendTest() override {
    for (const int end : pipe_)
      if (end >= 0) close(end);
  }

  std::unique_ptr<Backend> open(Result<std::unique_ptr<Backend>> made, int descriptor) {
    EXPECT_TRUE(made.ok());
    if (!made) return nullptr;
    EXPECT_FALSE((*made)->register_files({&descriptor, 1}));
    return std::move(made).value();
  }
  // Writes `count` blocks and reads them back into other memory; whether every result and byte is right.
  bool moves(Backend& backend, unsigned count) {
    Buffer data = allocate_buffer(count * kBlock), back = allocate_buffer(count * kBlock);
    fill(data.bytes(), 0, count);
    for (const auto& [action, memory] : {std::pair{Action::write, &data}, {Action::read, &back}}) {
      std::vector<KernelResult> results;
      for (unsigned i = 0; i < count; ++i) {
        while (!backend.push({.action = action,
                              .ticket = i,
                              .offset = i * kBlock,
                              .data = memory->data() + i * kBlock,
                              .length = kBlock}))
          backend.reap(results, std::chrono::seconds{1});
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds{10};
      while (results.size() < count && std::chrono::steady_clock::now() < end)
        backend.reap(results, std::chrono::seconds{1});
      if (results.size() != count) return false;
      for (const KernelResult& result : results)
        if (result.value != static_cast<std::int64_t>(kBlock)) return false;
    }
    return holds(back.bytes(), 0, count);
  }
  std::int64_t one(Backend& backend, Action action, std::span<std::byte> bytes = {}) {
    EXPECT_TRUE(backend.push({.action = action, .ticket = 3, .data = bytes.data(), .length = bytes.size()}));
    std::vector<KernelResult> results;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds{10};
    while (results.empty() && std::chrono::steady_clock::now() < end) backend.reap(results, std::chrono::seconds{1});
    EXPECT_EQ(results.size(), 1U);
    if (results.size() != 1) return 1 << 30;
    EXPECT_EQ(results[0].ticket, 3U);
    return results[0].value;
  }

  testing::TempDir folder_;
  File file_;
  int pipe_[2] = {-1, -1};
};

using Make = Result<std::unique_ptr<Backend>> (*)(unsigned);
constexpr Make kMakers[] = {make_uring_backend, make_libaio_backend, make_threads_backend};

// A pipe cannot be flushed: only a flush that reaches the kernel finds out.
TEST_F(BackendTest, AFlushReachesTheKernel) {
  ASSERT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
  for (const Make make : kMakers) {
    auto backend = open(make(4), pipe_[0]);
    EXPECT_EQ(one(*backend, Action::flush), -EINVAL) << engine_name(backend->kind());
    backend = open(make(4), file_.descriptor());
    EXPECT_EQ(one(*backend, Action::flush), 0) << engine_name(backend->kind());
  }
}

TEST_F(BackendTest, ARingThatTakesNoMoreHandsOutWhatItCompleted) {
  ASSERT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
  auto ring = open(make_uring_backend(4), pipe_[0]);
  Buffer memory = allocate_buffer(2 * kBlock);
  std::vector<KernelResult> results;
  ASSERT_TRUE(ring->push({.action = Action::read, .ticket = 0, .data = memory.data(), .length = kBlock}));
  ring->reap(results, std::chrono::nanoseconds{0});
  ASSERT_TRUE(results.empty());  // the kernel has it
  {
    SystemCalls calls(failing("io_uring_enter", EFAULT));
    for (std::uint32_t ticket : {1U, 2U}) {
      ASSERT_TRUE(
          ring->push({.action = Action::read, .ticket = ticket, .data = memory.data() + kBlock, .length = kBlock}));
      ring->reap(results, std::chrono::nanoseconds{0});
      ASSERT_EQ(results.size(), 1U);
      EXPECT_EQ(results[0].ticket, ticket);
      EXPECT_EQ(results[0].value, -EFAULT);
      results.clear();
    }
  }
  ASSERT_EQ(write(pipe_[1], memory.data(), 100), 100);
  for (int round = 0; results.empty() && round < 1000; ++round) ring->reap(results, std::chrono::milliseconds{1});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].ticket, 0U);
  EXPECT_EQ(results[0].value, 100);
  // What was given up never reaches the kernel: the rest of the pipe is still there.
  ASSERT_EQ(write(pipe_[1], memory.data(), 50), 50);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < 20; ++round) ring->reap(results, std::chrono::milliseconds{1});
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds{20}) << "asks without a pause";
  EXPECT_EQ(results.size(), 1U);
  EXPECT_EQ(read(pipe_[0], memory.data(), 100), 50);
}

TEST_F(BackendTest, ARingIsEnteredAgainWhereTheKernelIsBusyOrInterrupted) {
  for (const int number : {EAGAIN, EBUSY, ENOMEM, EINTR}) {
    auto ring = open(make_uring_backend(8), file_.descriptor());
    SystemCalls calls(failing("io_uring_enter", number, "", 3));
    EXPECT_TRUE(moves(*ring, 20)) << number;
    EXPECT_GE(calls.count("io_uring_enter"), 4U);
  }
}

// Also where the kernel makes the ring smaller than what is asked of it.
TEST_F(BackendTest, AFullRingMakesRoomAndCanBeWoken) {
  ASSERT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
  auto ring = open(make_uring_backend(8), pipe_[0]);
  std::byte byte{};
  std::uint32_t pushed = 0;
  const auto push = [&] {
    return ring->push({.action = Action::read, .ticket = pushed++, .data = &byte, .length = 1});
  };
  SystemCalls calls;
  while (calls.count("io_uring_enter") == 0) ASSERT_TRUE(push());
  for (const std::uint32_t room = pushed - 1; pushed < 2 * room;) ASSERT_TRUE(push());
  EXPECT_EQ(calls.count("io_uring_enter"), 1U);  // it is full once more
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds{20});
    ring->wake();
  });
  std::vector<KernelResult> results;
  const auto begin = std::chrono::steady_clock::now();
  ring->reap(results, std::chrono::seconds{30});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds{20});
  other.join();
  const std::vector<std::byte> bytes(pushed);
  ASSERT_EQ(write(pipe_[1], bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  for (int round = 0; results.size() < pushed && round < 1000; ++round) ring->reap(results, std::chrono::seconds{1});
  EXPECT_EQ(results.size(), pushed);
}

// The flags that an older kernel refuses cost the ring nothing but them.
TEST_F(BackendTest, AnOlderKernelGivesAPlainerRing) {
  for (const int refusals : {1, 2, 3}) {
    SystemCalls calls(failing("io_uring_setup", EINVAL, "", refusals));
    const auto ring = open(make_uring_backend(8), file_.descriptor());
    ASSERT_TRUE(ring) << refusals;
    EXPECT_TRUE(moves(*ring, 20)) << refusals;
    EXPECT_EQ(calls.count("io_uring_setup"), refusals + 1U);
  }
  SystemCalls calls(failing("io_uring_setup", EINVAL));
  const auto none = make_uring_backend(8);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().error_number, EINVAL);
  EXPECT_EQ(calls.count("io_uring_setup"), 4U);
}

// Without a limit, a wait ends when there is a result, however often the kernel turns it away or takes nothing first.
TEST_F(BackendTest, AWaitWithoutALimitLastsUntilThereIsAResult) {
  for (const Make make : kMakers) {
    for (const int number : {EAGAIN, 0}) {
      auto backend = open(make(4), file_.descriptor());
      SystemCalls calls(failing("io_uring_enter", number, "", 2));
      std::vector<KernelResult> results;
      ASSERT_TRUE(backend->push({.action = Action::flush, .ticket = 2}));
      backend->reap(results, std::chrono::nanoseconds{-1});
      ASSERT_EQ(results.size(), 1U) << engine_name(backend->kind());
      EXPECT_EQ(results[0].ticket, 2U);
    }
  }
}

TEST_F(BackendTest, WithoutADescriptorToSpareItNamesTheCallThatFailed) {
#ifdef TIERFLOW_ADDRESSES_SANITIZED
  GTEST_SKIP() << "it takes descriptors to check a type, which the sanitizer reports as it should";
#endif
  rlimit usual;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = usual.rlim_max};
  for (const Make make : {make_uring_backend, make_libaio_backend}) {
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    const auto backend = make(4);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
    ASSERT_FALSE(backend.ok());
    EXPECT_EQ(backend.error().kind, ErrorKind::environment);
    EXPECT_EQ(backend.error().operation, "eventfd");
    EXPECT_EQ(backend.error().error_number, EMFILE);
  }
}

TEST_F(BackendTest, ARingThatNeverTakesAnythingFailsWhatWaits) {
  auto ring = open(make_uring_backend(4), file_.descriptor());
  Buffer memory = allocate_buffer(kBlock);
  SystemCalls calls(failing("io_uring_enter", EAGAIN));
  EXPECT_EQ(one(*ring, Action::read, memory.bytes()), -EIO);
  EXPECT_EQ(one(*ring, Action::read, memory.bytes()), -EIO);
}

// Whoever takes over the process finds a ring that opens no files and starts no programs.
TEST_F(BackendTest, ARingIsRestrictedToWhatIsUsed) {
  auto ring = open(make_uring_backend(8), file_.descriptor());
  ASSERT_TRUE(ring);
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) != "anon_inode:[io_uring]") continue;
    ++found;
    // A personality would let requests run with other rights.
    EXPECT_EQ(
        syscall(SYS_io_uring_register, std::stoi(entry.path().filename()), IORING_REGISTER_PERSONALITY, nullptr, 0),
        -1);
    EXPECT_EQ(errno, EACCES);
  }
  EXPECT_EQ(found, 1);
}

TEST_F(BackendTest, ARegisteredRingUsesNoMemoryThatWasTakenBack) {
  auto ring = open(make_uring_backend(8), file_.descriptor());
  EXPECT_TRUE(ring->registered_files());
  Buffer slab = allocate_buffer(8 * kBlock);
  const std::span<std::byte> region[] = {slab.bytes()};
  for (int round = 0; round < 3; ++round) {
    ASSERT_FALSE(ring->register_memory(region));  // replaces what was registered
    fill(slab.bytes(), 0, 9);
    EXPECT_EQ(one(*ring, Action::write, slab.bytes()), static_cast<std::int64_t>(8 * kBlock));
  }
  ASSERT_FALSE(ring->register_memory({}));
  EXPECT_EQ(one(*ring, Action::read, slab.bytes()), static_cast<std::int64_t>(8 * kBlock));
  EXPECT_TRUE(moves(*ring, 8));
}

// The pages that were registered move, not those that lie at the same address by now.
TEST_F(BackendTest, ARegisteredRingMovesTheRegisteredPages) {
  auto ring = open(make_uring_backend(8), file_.descriptor());
  const auto map = [](void* where, int flags) {
    return mmap(where, kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  };
  void* const at = map(nullptr, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span<std::byte> bytes(static_cast<std::byte*>(at), kBlock);
  fill(bytes, 0, 1);
  ASSERT_FALSE(ring->register_memory({&bytes, 1}));
  ASSERT_EQ(map(at, MAP_FIXED), at);
  fill(bytes, 0, 2);
  EXPECT_EQ(one(*ring, Action::write, bytes), static_cast<std::int64_t>(kBlock));
  Buffer back = allocate_buffer(kBlock);
  EXPECT_FALSE(file_.read(0, back.data(), kBlock));
  EXPECT_TRUE(holds(back.bytes(), 0, 1));
  EXPECT_EQ(one(*ring, Action::read, bytes), static_cast<std::int64_t>(kBlock));
  EXPECT_TRUE(holds(bytes, 0, 2));
  ring.reset();
  munmap(at, kBlock);
}

TEST_F(BackendTest, LibaioSubmitsTheRestOfWhatTheKernelTookOnlyPartOf) {
  auto backend = open(make_libaio_backend(16), file_.descriptor());
  int round = 0;
  SystemCalls calls([&round](const SystemCall& call) -> std::optional<long> {
    if (call.name != "io_submit") return {};
    constexpr long kAnswers[] = {1, -EAGAIN, 2, -EINTR, 0};
    return kAnswers[round++ % 5];
  });
  EXPECT_TRUE(moves(*backend, 16));
}

TEST_F(BackendTest, LibaioSubmitsTogetherWhatWasPushedTogether) {
  auto backend = open(make_libaio_backend(16), file_.descriptor());
  SystemCalls calls;
  EXPECT_TRUE(moves(*backend, 16));
  EXPECT_EQ(calls.count("io_submit"), 2U);  // the writes, and the reads
}

TEST_F(BackendTest, LibaioReportsTheRequestThatTheKernelRefuses) {
  auto backend = open(make_libaio_backend(4), file_.descriptor());
  Buffer memory = allocate_buffer(kBlock);
  {
    SystemCalls calls(failing("io_submit", EINVAL, "", 1));
    EXPECT_EQ(one(*backend, Action::read, memory.bytes()), -EINVAL);
  }
  {
    // Whoever waits hears of it at once.
    SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
      if (call.name != "io_submit") return {};
      std::this_thread::sleep_for(std::chrono::milliseconds{50});
      return -EINVAL;
    });
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(backend->push({.action = Action::read, .ticket = 1, .data = memory.data(), .length = kBlock}));
    std::vector<KernelResult> results;
    backend->reap(results, std::chrono::seconds{30});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds{20});
    EXPECT_EQ(results.size(), 1U);
  }
  {
    // A flush that the kernel cannot do asynchronously is done all the same, and its failure told.
    SystemCalls calls(failing("io_submit", EINVAL, "", 1));
    EXPECT_EQ(one(*backend, Action::flush), 0);
    EXPECT_EQ(calls.count("fdatasync"), 1U);
  }
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name == "io_submit") return -EINVAL;
    if (call.name == "fdatasync") return -ENOSPC;
    return {};
  });
  EXPECT_EQ(one(*backend, Action::flush), -ENOSPC);
}

TEST_F(BackendTest, LibaioWithoutRoomInTheKernelNamesTheSetting) {
  SystemCalls calls(failing("io_setup", EAGAIN));
  const auto backend = make_libaio_backend(4);
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.error().kind, ErrorKind::environment);
  EXPECT_EQ(backend.error().error_number, EAGAIN);
  EXPECT_THAT(backend.error().message(), ::testing::HasSubstr("fs.aio-max-nr"));
}

TEST_F(BackendTest, ThreadsReportWhatTheSystemSays) {
  auto backend = open(make_threads_backend(4), file_.descriptor());
  Buffer memory = allocate_buffer(kBlock);
  for (const auto& [name, action] : {std::pair{"pread", Action::read}, {"pwrite", Action::write}}) {
    SystemCalls calls(failing(name, EROFS));
    EXPECT_EQ(one(*backend, action, memory.bytes()), -EROFS);
  }
  SystemCalls calls(failing("fdatasync", EIO));
  EXPECT_EQ(one(*backend, Action::flush), -EIO);
}

unsigned threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<unsigned>(std::distance(begin(tasks), end(tasks)));
}

// A sanitizer starts a thread of its own beside the first that the program starts.
unsigned threads_at_rest() {
  std::filesystem::path first;
  std::thread([&] { first = "/proc/self/task/" + std::to_string(::gettid()); }).join();
  while (std::filesystem::exists(first)) std::this_thread::yield();
  return threads();
}

TEST_F(BackendTest, NoRequestWaitsForAThreadBelowTheDepth) {
  const auto before = threads_at_rest();
  auto backend = open(make_threads_backend(3), file_.descriptor());
  SystemCalls calls([](const SystemCall& call) -> std::optional<long> {
    if (call.name == "fdatasync") std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return {};
  });
  for (std::uint32_t ticket = 0; ticket < 3; ++ticket)
    ASSERT_TRUE(backend->push({.action = Action::flush, .ticket = ticket}));
  EXPECT_EQ(threads(), before + 3);
  std::vector<KernelResult> results;
  while (results.size() < 3) backend->reap(results, std::chrono::nanoseconds{-1});
}

TEST_F(BackendTest, ThereAreNoMoreThreadsThanTheDepthAnd64) {
  for (const unsigned depth : {0U, 3U, 80U}) {
    const std::uint32_t requests = std::max(12U, depth);
    const auto before = threads_at_rest();
    auto backend = open(make_threads_backend(depth), file_.descriptor());
    SystemCalls calls([depth](const SystemCall& call) -> std::optional<long> {
      if (call.name == "fdatasync") std::this_thread::sleep_for(std::chrono::milliseconds(depth > 64 ? 20 : 2));
      return {};
    });
    for (std::uint32_t ticket = 0; ticket < requests; ++ticket)
      ASSERT_TRUE(backend->push({.action = Action::flush, .ticket = ticket}));
    EXPECT_LE(threads(), before + std::clamp(depth, 1U, 64U));
    std::vector<KernelResult> results;
    while (results.size() < requests) backend->reap(results, std::chrono::nanoseconds{-1});
  }
}

TEST_F(BackendTest, ManyMoreRequestsThanTheDepthAllArrive) {
  for (const Make make : kMakers) {
    auto backend = open(make(64), file_.descriptor());
    EXPECT_TRUE(moves(*backend, 64)) << engine_name(backend->kind());
  }
}

}  // namespace
}  // namespace tierflow::io
