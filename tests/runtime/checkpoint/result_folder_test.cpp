// The folder of a result, and signals: what the program's commands stand on when they begin and end.
#include "runtime/checkpoint/result_folder.h"

#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <limits>
#include <span>

#include "runtime/base/signals.h"
#include "runtime/checkpoint/safetensors.h"
#include "support/child.h"
#include "support/system_calls.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

TEST(ResultFolder, HoldsItsFolderAgainstOthers) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "new" / "out";
  {
    const ResultFolder first(out);
    expect_refusal(io::ErrorKind::locked, {"process " + std::to_string(getpid()) + " ", "--out"},
                   [&] { const ResultFolder second(out); });
    EXPECT_TRUE(fs::exists(out)) << "the refused one does not remove what is not its own";
  }
  EXPECT_FALSE(fs::exists(dir.path() / "new"));
  EXPECT_NO_THROW(ResultFolder{out}) << "nobody holds it any more";
}

// What a run started goes on to hold nothing: it may outlive it.
TEST(ResultFolder, AProcessThatItsOwnerStartedDoesNotHoldIt) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  fs::create_directory(out);  // it stays, and so would a lock
  pid_t child = -1;
  {
    const ResultFolder first(out);
    char name[] = "sleep", seconds[] = "60";
    char* const words[] = {name, seconds, nullptr};
    ASSERT_EQ(posix_spawnp(&child, name, nullptr, nullptr, words, environ), 0);
  }
  EXPECT_NO_THROW(ResultFolder{out});
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(ResultFolder, KeepsAResultThatIsFinishedAndNoOther) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  const auto fill = [&] {
    for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json", "merges.txt",
                             "tierflow_run.json", "model-00001-of-00002.safetensors.partial"})
      write_file(out / name, "x");
  };
  {
    const ResultFolder unfinished(out);
    fill();
    write_file(out / "notes.txt", "somebody's");
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(out), {}), 1) << "what is no part of a result is left alone";
  fs::remove_all(out);
  {
    ResultFolder finished(out);
    fill();
    finished.finish();
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(out), {}), 6);
}

TEST(ResultFolder, TakesAnEmptyFolderOrTheRemainsOfARunThatDied) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  write_file(out / "model-00001-of-00002.safetensors.partial", "half");
  write_file(out / "config.json.partial", "half");
  {
    const ResultFolder taken(out);
    EXPECT_TRUE(fs::is_empty(out));
  }
  EXPECT_TRUE(fs::exists(out)) << "it was there before";
  for (const char* name : {"thesis.tex.partial", "model.safetensors", "config.json", "anything"}) {
    write_file(out / name, "mine");
    expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out); });
    EXPECT_TRUE(fs::exists(out / name));
    fs::remove(out / name);
  }
}

TEST(ResultFolder, WhatIsNoFolderIsRefusedAsOut) {
  const testing::TempDir dir;
  write_file(dir.path() / "out", "mine");
  expect_refusal(io::ErrorKind::usage, {"out: --out exists and is not an empty folder"},
                 [&] { const ResultFolder refused(dir.path() / "out"); });
  EXPECT_EQ(read_text(dir.path() / "out", 100), "mine");
}

// Its mark, and then the mark's name: a power cut leaves no files of which nobody knows.
TEST(ResultFolder, ItsMarkIsDurableBeforeTheFirstFile) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  const ResultFolder folder(out);
  for (const std::string last : {"config.json", "adapter_config.json"}) {
    const testing::SystemCalls calls;
    folder.begin(last);
    EXPECT_TRUE(fs::exists(out / (last + ".partial")));
    std::vector<fs::path> flushed;
    for (const testing::SystemCall& call : calls.seen())
      if (call.name == "fsync") flushed.emplace_back(call.path);
    EXPECT_THAT(flushed, ::testing::ElementsAre(out / (last + ".partial"), out));
  }
  for (const fs::path& path : {out / "config.json.partial", out}) {
    const testing::SystemCalls calls([&](const testing::SystemCall& call) {
      return call.name == "fsync" && call.path == path ? std::optional<long>(-EIO) : std::nullopt;
    });
    expect_refusal(io::ErrorKind::io, {"flush", path.string()}, [&] { folder.begin(); });
  }
}

TEST(ResultFolder, TakesAResultThatNeverGotItsLastFile) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  const auto killed_after = [&](const std::vector<const char*>& names) {
    const pid_t writer = fork();
    if (writer == 0) {
      const ResultFolder folder(out);
      folder.begin();
      for (const char* name : names) write_file(out / name, "x");
      _exit(0);  // no destructor runs
    }
    waitpid(writer, nullptr, 0);
  };
  killed_after({"merges.txt", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors.partial"});
  EXPECT_TRUE(fs::exists(out / "merges.txt"));
  {
    const ResultFolder taken(out);
    EXPECT_TRUE(fs::is_empty(out));
  }
  killed_after({"merges.txt", "notes.txt"});
  expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out); });
  EXPECT_TRUE(fs::exists(out / "merges.txt"));
  fs::remove_all(out);
  killed_after({"model.safetensors", "config.json"});
  expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out); });
}

TEST(ResultFolder, KnowsItsRoom) {
  const testing::TempDir dir;
  const ResultFolder out(dir.path() / "out");
  EXPECT_NO_THROW(out.check_space(1));
  expect_refusal(io::ErrorKind::environment, {"free some space"}, [&] { out.check_space(std::uint64_t{1} << 60); });
}

TEST(ResultFolder, AFolderThatIsReadOnlyIsKnownAtOnce) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  fs::create_directory(out);
  chmod(out.c_str(), 0500);
  expect_refusal(io::ErrorKind::environment, {"--out must be a folder that can be written"},
                 [&] { const ResultFolder refused(out); });
}

// As a drive that is read-only, full or broken answers, which is said before the work begins.
TEST(ResultFolder, ADriveThatTakesNothingIsKnownAtOnce) {
  const testing::TempDir dir;
  constexpr const char *kNoRight = "--out must be a folder that can be written", *kNoRoom = "make room there";
  for (const auto& [call, error, kind, what] : {std::tuple{"open", EROFS, io::ErrorKind::environment, kNoRight},
                                                {"open", ENOSPC, io::ErrorKind::environment, kNoRoom},
                                                {"open", EDQUOT, io::ErrorKind::environment, kNoRoom},
                                                {"fsync", EIO, io::ErrorKind::io, kNoRight}}) {
    const testing::SystemCalls calls(testing::failing(call, error, "/model-00001-of-00001.safetensors.partial"));
    expect_refusal(kind, {what}, [&] { const ResultFolder refused(dir.path() / "out"); });
    EXPECT_FALSE(fs::exists(dir.path() / "out"));
  }
}

TEST(CompanionFiles, ComeFromTheModelFolderAlone) {
  const testing::TempDir dir;
  const fs::path model = dir.path() / "model", out = dir.path() / "out";
  std::string large(3'000'001, 'x');
  large.back() = 'y';
  write_file(model / "tokenizer.json", large);
  write_file(model / "merges.txt", "");
  write_file(model / "modeling_own.py", "class OwnModel: ...");
  write_file(model / "other.txt", "not one of them");
  write_file(model / "train.py", "nor this");
  fs::create_directory(out);
  const CompanionFiles files(model);
  EXPECT_EQ(files.bytes(), large.size() + 19);
  files.copy_to(out);
  EXPECT_EQ(std::distance(fs::directory_iterator(out), {}), 3);
  EXPECT_EQ(read_text(out / "modeling_own.py", 100), "class OwnModel: ...");
  EXPECT_EQ(read_text(out / "tokenizer.json", 1 << 30), large);

  write_file(dir.path() / "secret", "a secret");
  fs::create_symlink("../secret", model / "vocab.json");
  expect_refusal(io::ErrorKind::input, {"vocab.json", "leads out of its folder"},
                 [&] { const CompanionFiles f(model); });
  fs::remove(model / "vocab.json");
  fs::create_symlink("nowhere", model / "vocab.json");
  expect_refusal(io::ErrorKind::input, {"vocab.json"}, [&] { const CompanionFiles f(model); });
  fs::remove(model / "vocab.json");
  mkfifo((model / "vocab.json").c_str(), 0600);
  expect_refusal(io::ErrorKind::input, {"not a regular file"}, [&] { const CompanionFiles f(model); });
}

TEST(CheckpointWriter, NamesTheFirstTensorThatIsNotFinite) {
  const testing::TempDir dir;
  const auto found = [&](Dtype dtype, auto first, auto second) {
    CheckpointWriter writer(dir.path() / "model",
                            {{.name = "a", .dtype = dtype, .shape = {3}},
                             {.name = "b", .dtype = dtype, .shape = {1}},
                             {.name = "c", .shape = {2, 2}, .stored_dtype = "U8", .stored_bytes = 4}});
    const std::array<decltype(first), 3> a{decltype(first){}, first, decltype(first){}};
    const std::array<decltype(second), 1> b{second};
    const std::array<std::uint16_t, 2> copied{0xffff, 0xffff};
    writer.write(std::as_bytes(std::span(a)));
    writer.write(std::as_bytes(std::span(b)));
    writer.write(std::as_bytes(std::span(copied)));
    writer.finish();
    return writer.not_finite();
  };
  using Word = std::uint16_t;
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(found(Dtype::f32, std::numeric_limits<float>::max(), -0.0F), "");
  EXPECT_EQ(found(Dtype::f32, -infinity, infinity), "a");
  EXPECT_EQ(found(Dtype::f32, 1.0F, std::nanf("")), "b");
  EXPECT_EQ(found(Dtype::bf16, Word{0x7f7f}, Word{0xff7f}), "");
  EXPECT_EQ(found(Dtype::bf16, Word{0x7f80}, Word{0}), "a");
  EXPECT_EQ(found(Dtype::bf16, Word{0x7c00}, Word{0xffc1}), "b");
  EXPECT_EQ(found(Dtype::f16, Word{0x7bff}, Word{0x7c00}), "b");
}

TEST(CheckpointWriter, AFinishThatFailsLeavesNothing) {
  const testing::TempDir dir;
  const std::vector<std::byte> words(400);
  const auto write = [&] {
    CheckpointWriter writer(dir.path() / "model", {{.name = "a", .shape = {100}}, {.name = "b", .shape = {100}}}, 200);
    writer.write(words);
    writer.finish("{}");
  };
  // In the place of the file that comes last lies a folder that cannot be replaced.
  write_file(dir.path() / "model" / "config.json" / "keep", "");
  EXPECT_THROW(write(), Exception);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path() / "model"), {}), 1);
  fs::remove_all(dir.path() / "model");
  write();
  EXPECT_EQ(read_text(dir.path() / "model" / "config.json", 100), "{}");
}

// What follows at once is the same request: timeout(1) sends two.
TEST(Signals, TheFirstIsCountedAndALaterOneEndsTheProcess) {
  constexpr int later = 0;
  const auto raised = [](std::initializer_list<int> numbers) {
    return testing::in_child([&] {
      for (const int number : {SIGINT, SIGTERM, SIGHUP}) std::signal(number, SIG_DFL);  // nohup leaves the last ignored
      watch_signals();
      for (const int number : numbers)
        if (number == later)
          std::this_thread::sleep_for(std::chrono::milliseconds(1050));
        else
          std::raise(number);
      return stop_signal();
    });
  };
  EXPECT_EQ(raised({}), 0);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EQ(raised({number}), number);
    EXPECT_EQ(raised({number, SIGTERM, SIGINT, SIGHUP}), number);
    EXPECT_EQ(raised({number, SIGPIPE, SIGXFSZ}), number);
  }
  EXPECT_EQ(raised({SIGHUP, later, SIGTERM}), 128 + SIGTERM);
  EXPECT_EQ(raised({SIGTERM, SIGTERM, later, SIGINT}), 128 + SIGINT);
  EXPECT_EQ(raised({SIGINT, later, SIGHUP}), SIGINT) << "of a terminal that is closed later";
}

TEST(Signals, WhatIsStoppedSaysWithWhichCodeItEnds) {
  EXPECT_EQ(testing::in_child([] {
              watch_signals();
              throw_if_stopped();
              std::raise(SIGTERM);
              try {
                throw_if_stopped();
              } catch (const Stopped& stopped) {
                return stopped.error().kind == io::ErrorKind::cancelled ? stopped.signal() : 1;
              }
              return 2;
            }),
            SIGTERM);
  EXPECT_EQ(testing::in_child([] {
              std::signal(SIGHUP, SIG_IGN);
              watch_signals();
              std::raise(SIGHUP);
              return stop_signal();
            }),
            0)
      << "nohup";
}

}  // namespace
}  // namespace tierflow
