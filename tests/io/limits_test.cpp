// What containers and resource limits take away: the volume steps down or refuses, says so, and never dies of a signal.
#include <gmock/gmock.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstddef>
#include <fstream>
#include <iostream>

#include "io/file.h"
#include "io/filesystem.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/child.h"
#include "tests/support/sanitized.h"

namespace tierflow::io {
namespace {

using testing::in_child;

// Makes the named system calls end in `action` for this process and its later threads.
bool forbid(std::vector<long> calls, std::uint32_t action) {
  std::vector<sock_filter> program;
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (long call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, action));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

class LimitsTest : public ::testing::Test {
 protected:
  VolumeOptions options(EngineKind engine = EngineKind::automatic) {
    VolumeOptions options = options_in(folder_, 4 << 20);
    options.engine = engine;
    return options;
  }
  // In a child: a volume under the present limits moves bytes; 0 where it used `expected` and warned `warnings` times.
  static int works(const VolumeOptions& options, EngineKind expected, std::size_t warnings) {
    Result<std::unique_ptr<Volume>> made = Volume::create(options);
    if (!made) {
      std::cerr << made.error().message() << "\n";
      return 10;
    }
    Volume& volume = **made;
    if (write_pattern(volume, 0, 1 << 20, 1) || !read_holds(volume, 0, 1 << 20, 1) || volume.flush()) return 11;
    const VolumeMode mode = volume.mode();
    if (mode.engine != expected) return 12;
    if (mode.warnings.size() != warnings) {
      for (const std::string& warning : mode.warnings) std::cerr << warning << "\n";
      return 13;
    }
    return 0;
  }
  static constexpr std::uint32_t deny(int number) { return SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(number); }
  bool direct() {
    auto volume = create(options());
    const bool result = volume && volume->mode().direct;
    if (volume) volume->remove_files();
    return result;
  }

  testing::TempDir folder_;
};

TEST_F(LimitsTest, WithoutIoUringTheNextEngineServes) {
  const EngineKind next = direct() ? EngineKind::libaio : EngineKind::threads;
  for (int number : {EPERM, ENOSYS, ENOMEM}) {
    EXPECT_EQ(in_child([&] {
                VolumeOptions wanted = options();
                wanted.name = "errno" + std::to_string(number);
                return forbid({SYS_io_uring_setup}, deny(number)) ? works(wanted, next, 1) : 9;
              }),
              0);
  }
}

TEST_F(LimitsTest, ARingThatCanBeMadeButNotUsedIsNotTrusted) {
  const EngineKind next = direct() ? EngineKind::libaio : EngineKind::threads;
  for (long call : {static_cast<long>(SYS_io_uring_enter), static_cast<long>(SYS_io_uring_register)}) {
    EXPECT_EQ(in_child([&] {
                VolumeOptions wanted = options();
                wanted.name = "call" + std::to_string(call);
                return forbid({call}, deny(EPERM)) ? works(wanted, next, 1) : 9;
              }),
              0);
  }
}

TEST_F(LimitsTest, WithoutAnyAsynchronousInterfaceThreadsServe) {
  const std::size_t warnings = direct() ? 2 : 1;
  EXPECT_EQ(in_child([&] {
              return forbid({SYS_io_uring_setup, SYS_io_setup}, deny(EPERM))
                         ? works(options(), EngineKind::threads, warnings)
                         : 9;
            }),
            0);
}

TEST_F(LimitsTest, AnEngineThatWasAskedForIsNotReplaced) {
  EXPECT_EQ(in_child([&] {
              if (!forbid({SYS_io_uring_setup}, deny(EPERM))) return 9;
              Result<std::unique_ptr<Volume>> made = Volume::create(options(EngineKind::io_uring));
              if (made) return 1;
              return made.error().kind == ErrorKind::environment && !std::filesystem::exists(folder_.path() / "drive")
                         ? 0
                         : 2;
            }),
            0);
}

TEST_F(LimitsTest, ThreadsNeverTouchWhatAKillingProfileForbids) {
  const std::vector<long> calls = {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_setup,
                                   SYS_io_submit};
  EXPECT_EQ(in_child([&] {
              return forbid(calls, SECCOMP_RET_KILL_PROCESS)
                         ? works(options(EngineKind::threads), EngineKind::threads, 0)
                         : 9;
            }),
            0);
  // The control: the automatic choice does touch them.
  EXPECT_EQ(in_child([&] {
              rlimit none{0, 0};
              setrlimit(RLIMIT_CORE, &none);
              VolumeOptions wanted = options();
              wanted.name = "control";
              return forbid(calls, SECCOMP_RET_KILL_PROCESS) ? works(wanted, EngineKind::threads, 0) : 9;
            }),
            128 + SIGSYS);
}

TEST_F(LimitsTest, TooLittleLockedMemoryCostsRegistrationOnly) {
  EXPECT_EQ(in_child([&] {
              rlimit limit{64 << 10, 64 << 10};
              if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 9;
              __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
              __user_cap_data_struct data[2] = {};
              if (syscall(SYS_capset, &header, data) != 0) return 9;
              VolumeOptions wanted = options();
              Result<std::unique_ptr<Volume>> made = Volume::create(wanted);
              if (!made) return 10;
              Volume& volume = **made;
              if (volume.mode().engine != EngineKind::io_uring) return 0;  // nothing to lose
              Buffer slab = allocate_buffer(8 << 20);
              volume.register_memory(slab.bytes());
              if (volume.mode().registered_buffers || volume.mode().warnings.empty()) return 11;
              if (volume.mode().warnings.back().find("ulimit -l") == std::string::npos) return 12;
              Buffer part(slab.data(), 1 << 20, nullptr, nullptr);
              fill(part.bytes(), 0, 4);
              if (transfer(volume, Op::write, 0, 1 << 20, std::move(part)).error) return 13;
              const bool right = read_holds(volume, 0, 1 << 20, 4);
              made = Error{.kind = ErrorKind::usage};  // the volume goes before the slab
              return right ? 0 : 14;
            }),
            0);
}

TEST_F(LimitsTest, AFileSizeLimitIsAnErrorAndNoSignal) {
  EXPECT_EQ(in_child([&] {
              rlimit limit{1 << 20, 1 << 20};
              setrlimit(RLIMIT_FSIZE, &limit);
              Result<std::unique_ptr<Volume>> made = Volume::create(options());
              if (made) return 1;
              std::cerr << made.error().message() << "\n";
              return made.error().kind == ErrorKind::environment && made.error().error_number == EFBIG ? 0 : 2;
            }),
            0);
}

TEST_F(LimitsTest, ALimitThatShrinksInTheRunShortensAWriteAndThenEndsIt) {
  for (EngineKind engine : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    EXPECT_EQ(in_child([&] {
                VolumeOptions wanted = options(engine);
                wanted.name = "engine" + std::to_string(static_cast<int>(engine));
                Result<std::unique_ptr<Volume>> made = Volume::create(wanted);
                if (!made) return 10;
                // The limit lies inside the third block of what will be written: a true short write, then EFBIG.
                rlimit limit{(1 << 20) + 40960, (1 << 20) + 40960};
                setrlimit(RLIMIT_FSIZE, &limit);
                if (write_pattern(**made, 0, 32 << 10, 1)) return 11;
                const Error error = write_pattern(**made, 32 << 10, 64 << 10, 2);
                std::cerr << error.message() << "\n";
                if (error.kind != ErrorKind::io || error.error_number != EFBIG) return 12;
                return read_holds(**made, 0, 32 << 10, 1) ? 0 : 13;
              }),
              0)
        << static_cast<int>(engine);
  }
}

// With every number of descriptors left, from none: an error that says so and leaves nothing, until there are enough.
TEST_F(LimitsTest, TooFewDescriptorsIsAnError) {
#ifdef TIERFLOW_ADDRESSES_SANITIZED
  GTEST_SKIP() << "it takes descriptors to check a type, which the sanitizer reports as it should";
#endif
  for (EngineKind engine : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    EXPECT_EQ(in_child([&] {
                rlimit was{};
                getrlimit(RLIMIT_NOFILE, &was);
                const int next = dup(0);  // the lowest one that is free
                close(next);
                int refused = 0;
                for (int left = 0; left <= 16; ++left) {
                  rlimit limit{static_cast<rlim_t>(next + left), was.rlim_max};
                  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 9;
                  Result<std::unique_ptr<Volume>> made = Volume::create(options(engine));
                  setrlimit(RLIMIT_NOFILE, &was);
                  if (made) return refused > 0 && made.value()->mode().engine == engine ? 0 : 1;
                  ++refused;
                  std::cerr << made.error().message() << "\n";
                  if (made.error().error_number != EMFILE || made.error().kind != ErrorKind::environment) return 2;
                  if (std::filesystem::exists(folder_.path() / "drive")) return 3;
                }
                return 4;
              }),
              0)
        << engine_name(engine);
    std::filesystem::remove_all(folder_.path() / "drive");
  }
}

TEST_F(LimitsTest, WithoutThreadsThereIsNoVolumeAndItSaysWhy) {
  EXPECT_EQ(in_child([&] {
              if (!forbid({SYS_clone, SYS_clone3}, deny(EAGAIN))) return 9;
              Result<std::unique_ptr<Volume>> made = Volume::create(options());
              if (made) return 1;
              if (made.error().kind != ErrorKind::environment || made.error().error_number != EAGAIN) return 2;
              if (made.error().message().find("ulimit -u") == std::string::npos) return 3;
              sigset_t blocked;  // Ctrl-C still ends the program
              pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
              if (sigismember(&blocked, SIGINT) != 0) return 5;
              return std::filesystem::exists(folder_.path() / "drive") ? 4 : 0;
            }),
            0);
}

// As a daemon may be started: a folder or the data file gets the number of what is closed.
TEST_F(LimitsTest, AProcessWithoutStandardInputHasItsVolumeAllTheSame) {
  const std::size_t warnings = direct() ? 0 : 1;
  EXPECT_EQ(in_child([&] {
              close(STDIN_FILENO);
              if (sync_directory(folder_.path())) return 1;
              return works(options(EngineKind::threads), EngineKind::threads, warnings);
            }),
            0);
}

TEST_F(LimitsTest, ThreadsThatExistGoOnWhereTheSystemGivesNoMore) {
  EXPECT_EQ(in_child([&] {
              Result<std::unique_ptr<Volume>> made = Volume::create(options(EngineKind::threads));
              if (!made || !forbid({SYS_clone, SYS_clone3}, deny(EAGAIN))) return 9;
              if (write_pattern(**made, 0, 4 << 20, 1)) return 1;
              return read_holds(**made, 0, 4 << 20, 1) ? 0 : 2;
            }),
            0);
}

// A signal belongs to the program's own threads: ours never take one.
TEST_F(LimitsTest, ThreadsOfIoTakeNoSignals) {
  for (EngineKind engine : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    VolumeOptions wanted = options(engine);
    wanted.name = engine_name(engine);
    auto volume = create(wanted);
    ASSERT_TRUE(volume);
    EXPECT_FALSE(write_pattern(*volume, 0, 1 << 20, 1));
    int ours = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(task.path() / "status");
      std::string line, blocked;
      bool mine = false;
      while (std::getline(status, line)) {
        if (line.starts_with("Name:\ttierflow-")) mine = true;
        if (line.starts_with("SigBlk:")) blocked = line;
      }
      if (!mine) continue;
      ++ours;
      const std::uint64_t mask = std::stoull(blocked.substr(7), nullptr, 16);
      for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGXFSZ}) EXPECT_NE(mask >> (signal - 1) & 1, 0U) << signal;
    }
    EXPECT_GE(ours, 1);
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    EXPECT_EQ(sigismember(&now, SIGTERM), 0);  // the maker's own mask is as it was
  }
}

// A signal that was blocked before stays so, and stays pending; one that was not is swallowed, and is not blocked
// after.
TEST_F(LimitsTest, TheGuardAgainstFileSizeSignalsLeavesTheThreadAsItWas) {
  for (const bool blocked : {false, true}) {
    const int code = in_child([&] {
      sigset_t set, now, pending;
      sigemptyset(&set);
      sigaddset(&set, SIGXFSZ);
      pthread_sigmask(blocked ? SIG_BLOCK : SIG_UNBLOCK, &set, nullptr);
      {
        FileSizeSignalGuard guard;
        raise(SIGXFSZ);
      }
      pthread_sigmask(SIG_SETMASK, nullptr, &now);
      sigpending(&pending);
      return (sigismember(&now, SIGXFSZ) != 0) == blocked && (sigismember(&pending, SIGXFSZ) != 0) == blocked ? 0 : 1;
    });
    EXPECT_EQ(code, 0) << blocked;
  }
}

TEST_F(LimitsTest, AKilledOwnerLeavesTheLockFree) {
  const int code = in_child([&] {
    Result<std::unique_ptr<Volume>> made = Volume::create(options());
    if (!made || write_pattern(**made, 0, 1 << 20, 9)) return 1;
    kill(getpid(), SIGKILL);
    return 2;
  });
  EXPECT_EQ(code, 128 + SIGKILL);
  // The ring of the dead holds the file until the kernel has wound it up.
  Result<std::unique_ptr<Volume>> opened = Error{.kind = ErrorKind::locked};
  for (int i = 0; i < 200 && !opened && opened.error().kind == ErrorKind::locked; ++i) {
    opened = Volume::open(options());
    if (!opened) usleep(10'000);
  }
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  EXPECT_TRUE(read_holds(**opened, 0, 1 << 20, 9));
}

TEST_F(LimitsTest, AForkedChildKeepsNoLockOfItsDeadParent) {
  for (const EngineKind engine : {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads}) {
    VolumeOptions wanted = options(engine);
    wanted.name = engine_name(engine);
    int told[2];
    ASSERT_EQ(pipe(told), 0);
    const int code = in_child([&] {
      Result<std::unique_ptr<Volume>> made = Volume::create(wanted);
      if (!made) return 1;
      const pid_t first = fork();
      if (first == 0) _exit(0);  // the end of one takes nothing from the parent
      waitpid(first, nullptr, 0);
      if (Volume::open(wanted).ok() || write_pattern(**made, 0, 1 << 20, 9)) return 2;
      pid_t child = fork();
      if (child == 0)
        for (;;) pause();
      (void)!write(told[1], &child, sizeof child);
      kill(getpid(), SIGKILL);
      return 3;
    });
    close(told[1]);
    if (code == 1) {  // this machine has no such engine
      close(told[0]);
      continue;
    }
    EXPECT_EQ(code, 128 + SIGKILL);
    pid_t child = 0;
    ASSERT_EQ(read(told[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
    close(told[0]);
    Result<std::unique_ptr<Volume>> opened = Error{.kind = ErrorKind::locked};
    for (int i = 0; i < 200 && !opened && opened.error().kind == ErrorKind::locked; ++i) {
      opened = Volume::open(wanted);
      if (!opened) usleep(10'000);
    }
    EXPECT_EQ(kill(child, SIGKILL), 0);
    ASSERT_TRUE(opened.ok()) << engine_name(engine) << ": " << opened.error().message();
    EXPECT_TRUE(read_holds(**opened, 0, 1 << 20, 9));
  }
}

}  // namespace
}  // namespace tierflow::io
