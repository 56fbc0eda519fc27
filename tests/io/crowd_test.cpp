// Many requests at once, and what is left of an engine when it goes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "io/backend.h"
#include "io/file.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/sanitized.h"
#include "tests/support/system_calls.h"

namespace tierflow::io {
namespace {

using testing::failing;
using ::testing::HasSubstr;
using testing::SystemCalls;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlock = 4096;
constexpr unsigned kCrowd = 600;

class CrowdTest : public ::testing::Test {
 protected:
  CrowdTest()
      : file_(File::create(folder_.path() / "file", {.allow_buffered = true, .allow_any_filesystem = true}).value()) {
    EXPECT_TRUE(file_.preallocate(kCrowd * kBlock).ok());
  }
  std::unique_ptr<Backend> open(Result<std::unique_ptr<Backend>> made) {
    EXPECT_TRUE(made.ok());
    const int descriptor = file_.descriptor();
    EXPECT_FALSE(made.value()->register_files({&descriptor, 1}));
    return std::move(made).value();
  }
  static std::vector<KernelResult> all(Backend& backend, std::size_t count) {
    std::vector<KernelResult> results;
    const auto end = Clock::now() + std::chrono::seconds{30};
    while (results.size() < count && Clock::now() < end) backend.reap(results, std::chrono::seconds{30});
    return results;
  }
  testing::TempDir folder_;
  File file_;
};

TEST_F(CrowdTest, ManyRequestsAtOnceAreAllAnsweredWithoutAWait) {
  for (const auto make : {make_uring_backend, make_libaio_backend, make_threads_backend}) {
    const auto backend = open(make(kCrowd));
    const Buffer memory = allocate_buffer(kCrowd * kBlock);
    fill(memory.bytes(), 0, 1);
    for (const Action action : {Action::write, Action::read}) {
      for (std::uint32_t i = 0; i < kCrowd; ++i) {
        ASSERT_TRUE(backend->push({.action = action,
                                   .ticket = i,
                                   .offset = i * kBlock,
                                   .data = memory.data() + i * kBlock,
                                   .length = kBlock}));
      }
      const auto begin = Clock::now();
      const std::vector<KernelResult> results = all(*backend, kCrowd);
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds{20}) << engine_name(backend->kind());
      ASSERT_EQ(results.size(), kCrowd) << engine_name(backend->kind());
      for (const KernelResult& result : results) EXPECT_EQ(result.value, static_cast<std::int64_t>(kBlock));
      if (action == Action::write) std::fill_n(memory.data(), memory.size(), std::byte{});
    }
    EXPECT_TRUE(holds(memory.bytes(), 0, 1)) << engine_name(backend->kind());
  }
}

TEST_F(CrowdTest, AContextThatWasUsedIsGivenBackToTheKernel) {
  const auto contexts = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("[aio]") != std::string::npos ? 1 : 0;
    return count;
  };
  ASSERT_EQ(contexts(), 0);
  auto backend = open(make_libaio_backend(4));
  EXPECT_EQ(contexts(), 1);
  backend.reset();
  EXPECT_EQ(contexts(), 0);
}

TEST_F(CrowdTest, AnEngineThatWaitedBeforeIsGoneAtOnce) {
  for (const auto make : {make_uring_backend, make_libaio_backend, make_threads_backend}) {
    auto backend = open(make(4));
    std::vector<KernelResult> none;
    backend->reap(none, std::chrono::milliseconds{1});
    const auto begin = Clock::now();
    backend.reset();
    EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds{500});
  }
}

TEST_F(CrowdTest, AKernelWithoutRoomIsAskedWithPauses) {
  const auto backend = open(make_libaio_backend(4));
  SystemCalls calls(failing("io_submit", EAGAIN, "", 100));
  ASSERT_TRUE(backend->push({.action = Action::flush, .ticket = 2}));
  const auto begin = Clock::now();
  EXPECT_EQ(all(*backend, 1).size(), 1U);
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds{100});
}

// The engine asks so where the kernel was busy for some time.
TEST_F(CrowdTest, ARequestMayTakeItsTime) {
  for (const auto make : {make_uring_backend, make_libaio_backend, make_threads_backend}) {
    const auto backend = open(make(4));
    const Buffer memory = allocate_buffer(kBlock);
    for (const Action action : {Action::write, Action::read, Action::flush}) {
      ASSERT_TRUE(backend->push({.action = action,
                                 .patient = true,
                                 .ticket = 1,
                                 .data = memory.data(),
                                 .length = action == Action::flush ? 0 : kBlock}));
      const std::vector<KernelResult> results = all(*backend, 1);
      ASSERT_EQ(results.size(), 1U);
      EXPECT_EQ(results[0].value, action == Action::flush ? 0 : static_cast<std::int64_t>(kBlock));
    }
  }
}

TEST_F(CrowdTest, ADeeperRingThanTheKernelMakesIsMadeAsDeepAsItCan) {
  const auto ring = open(make_uring_backend(100'000));
  ASSERT_TRUE(ring->push({.action = Action::flush, .ticket = 1}));
  EXPECT_EQ(all(*ring, 1).size(), 1U);
}

TEST_F(CrowdTest, ARingThatMayNotKeepTheFilesUsesThemAsTheyAre) {
#ifdef TIERFLOW_ADDRESSES_SANITIZED
  GTEST_SKIP() << "it takes descriptors to check a type, which the sanitizer reports as it should";
#endif
  EXPECT_EQ(
      testing::in_child([&] {
        const File file =
            File::create(folder_.path() / "child", {.allow_buffered = true, .allow_any_filesystem = true}).value();
        const auto ring = make_uring_backend(4).value();
        const Buffer memory = allocate_buffer(kBlock), back = allocate_buffer(kBlock);
        fill(memory.bytes(), 0, 5);
        const rlimit none{0, 0};
        if (setrlimit(RLIMIT_NOFILE, &none) != 0) return 1;
        const int descriptor = file.descriptor();
        if (ring->register_files({&descriptor, 1}) || ring->registered_files()) return 2;
        if (!ring->push({.action = Action::write, .data = memory.data(), .length = kBlock})) return 3;
        if (all(*ring, 1).front().value != static_cast<std::int64_t>(kBlock)) return 4;
        if (file.read(0, back.data(), kBlock)) return 5;
        return holds(back.bytes(), 0, 5) ? 0 : 6;
      }),
      0);
}

TEST_F(CrowdTest, WhatForbidsARingIsSaid) {
  for (const auto& [number, hint] :
       {std::pair{EPERM, "kernel.io_uring_disabled"}, {ENOMEM, "ulimit -l"}, {ENOSYS, "this kernel has no io_uring"}}) {
    SystemCalls calls(failing("io_uring_setup", number));
    const auto ring = make_uring_backend(4);
    ASSERT_FALSE(ring.ok());
    EXPECT_EQ(ring.error().kind, ErrorKind::environment);
    EXPECT_THAT(ring.error().message(), HasSubstr(hint));
  }
}

}  // namespace
}  // namespace tierflow::io
