#include "runtime/base/sequential_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "runtime/base/exception.h"
#include "tests/support/system_calls.h"
#include "tests/support/temp_dir.h"

namespace tierflow {
namespace {

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string numbered(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 2654435761U >> 13);
  return text;
}

void write_in_parts(const std::filesystem::path& path, const std::string& text, std::size_t part) {
  SequentialFile file(path, text.size());
  for (std::size_t at = 0; at < text.size(); at += part)
    file.write(std::as_bytes(std::span(text.data() + at, std::min(part, text.size() - at))));
  file.finish();
}

TEST(SequentialFile, HoldsWhatWasWrittenWhateverItsLength) {
  testing::TempDir folder;
  const std::string in_memory = "/dev/shm/tierflow-" + std::to_string(getpid());
  for (const std::filesystem::path& path : {folder.path() / "file", std::filesystem::path(in_memory)})
    for (const std::size_t bytes : {0UL, 1UL, 4095UL, 4096UL, 70000UL, 4UL << 20, (4UL << 20) + 1, (13UL << 20) + 4097})
      for (const std::size_t part : {4097UL, 5UL << 20, 64UL << 20}) {
        const std::string text = numbered(bytes);
        write_in_parts(path, text, part);
        EXPECT_TRUE(read(path) == text) << bytes << " bytes in parts of " << part << " in " << path;
      }
  unlink(in_memory.c_str());
}

TEST(SequentialFile, BeginsEmptyWhereAFileIsThere) {
  testing::TempDir folder;
  write_in_parts(folder.path() / "file", numbered(100000), 100000);
  write_in_parts(folder.path() / "file", "short", 5);
  EXPECT_EQ(read(folder.path() / "file"), "short");
}

// Of a file system without O_DIRECT: all but the newest 128 MiB are pushed out of the page cache while it is written.
TEST(SequentialFile, WhatGoesThroughThePageCacheDoesNotStayThere) {
  testing::TempDir folder;
  const std::string text = numbered(1 << 20);
  const auto write = [&](long pushed) {
    const testing::SystemCalls calls([=](const testing::SystemCall& call) -> std::optional<long> {
      if (call.name == "open" && (call.argument & O_DIRECT) != 0) return -EINVAL;
      if (call.name == "sync_file_range") return pushed;
      return {};
    });
    SequentialFile file(folder.path() / "file", 129 * text.size());
    for (int i = 0; i < 129; ++i) file.write(std::as_bytes(std::span(text)));
    file.finish();
    std::vector<long> begins;
    for (const testing::SystemCall& call : calls.seen())
      if (call.name == "sync_file_range") begins.push_back(call.argument);
    EXPECT_THAT(begins, ::testing::ElementsAre(64 << 20, 0));
  };
  write(0);
  write(-ENOSYS);  // a file system that cannot
  try {
    write(-EIO);
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().error_number, EIO);
    EXPECT_EQ(error.error().operation, "flush");
  }
}

TEST(SequentialFile, AFlushThatFailsIsAnError) {
  testing::TempDir folder;
  const testing::SystemCalls calls(testing::failing("fsync", EIO));
  SequentialFile file(folder.path() / "file", sizeof "some bytes");
  file.write(std::as_bytes(std::span("some bytes")));
  try {
    file.finish();
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().error_number, EIO);
    EXPECT_EQ(error.error().operation, "flush");
  }
}

TEST(SequentialFile, AnErrorOfAnEarlierPieceIsThrownAndThrownAgain) {
  const std::string text = numbered(20 << 20);
  SequentialFile file("/dev/full", text.size());
  EXPECT_THROW(file.write(std::as_bytes(std::span(text))), Exception);
  EXPECT_THROW(file.finish(), Exception);
}

TEST(SequentialFile, AnErrorOfTheLastPieceIsThrownAtTheEnd) {
  SequentialFile file("/dev/full", sizeof "some bytes");
  file.write(std::as_bytes(std::span("some bytes")));
  try {
    file.finish();
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().error_number, ENOSPC);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/dev/full"));
  }
}

// Of a piece of whole blocks nothing is left for another call, which would fail as well.
TEST(SequentialFile, AnErrorOfWholeBlocksIsWhatTheKernelSaid) {
  testing::TempDir folder;
  const std::string text = numbered(4 << 20);
  const testing::SystemCalls calls(testing::failing("pwrite", EIO, "file", 1));
  SequentialFile file(folder.path() / "file", text.size());
  try {
    file.write(std::as_bytes(std::span(text)));
    file.finish();
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().error_number, EIO);
    EXPECT_EQ(error.error().operation, "write");
  }
}

// How many pages of the file are in the page cache.
std::size_t pages_in_memory(const std::filesystem::path& path, std::size_t bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* const mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  EXPECT_EQ(mincore(mapped, bytes, pages.data()), 0);
  munmap(mapped, bytes);
  return static_cast<std::size_t>(std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; }));
}

// On a file system without O_DIRECT: what is left in the page cache would be compared with itself.
TEST(SequentialFile, IsReadBackFromTheDrive) {
  testing::TempDir folder;
  struct statfs system {};
  ASSERT_EQ(statfs(folder.path().c_str(), &system), 0);
  if (system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "a file system in memory has no drive";
  const std::string text = numbered(16 << 20);
  const std::filesystem::path path = folder.path() / "file";
  const testing::SystemCalls calls([](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "open" && (call.argument & O_DIRECT) != 0) return -EINVAL;
    return {};
  });
  SequentialFile file(path, text.size());
  std::uint64_t announced = 0;
  file.before_each_move([&](std::uint64_t count) {
    if (announced == text.size()) {
      EXPECT_LT(pages_in_memory(path, text.size()), text.size() / 4096 / 2);
    }
    announced += count;
  });
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  EXPECT_EQ(announced, 2 * text.size());
}

TEST(SequentialFile, OtherBytesOnTheDriveAreNoticed) {
  testing::TempDir folder;
  const std::string text = numbered((10 << 20) + 77);
  const std::filesystem::path path = folder.path() / "file";
  for (const std::uint64_t place : {100UL, (8UL << 20) - 1, (10UL << 20) + 76}) {
    const testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
      if (call.name == "fsync") {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(place));
        file.put(static_cast<char>(text[place] ^ 1));
      }
      return {};
    });
    SequentialFile file(path, text.size());
    file.write(std::as_bytes(std::span(text)));
    try {
      file.finish();
      FAIL() << place;
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::corruption);
      EXPECT_EQ(error.error().offset, place >> 22 << 22);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(path.string()));
    }
  }
}

TEST(SequentialFile, EveryByteIsAnnouncedBeforeItIsWrittenAndBeforeItIsReadBack) {
  testing::TempDir folder;
  std::atomic<std::uint64_t> announced = 0, moved = 0;
  const testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" || call.name == "pread")
      moved += static_cast<std::uint64_t>(std::min(call.argument, static_cast<long>(4 << 20)));
    EXPECT_LE(moved / 4096 * 4096, announced + 4095);
    return {};
  });
  const std::vector<std::byte> bytes(9'500'000, std::byte{5});
  SequentialFile file(folder.path() / "file", bytes.size());
  file.before_each_move([&](std::uint64_t count) { announced += count; });
  file.write(bytes);
  EXPECT_GT(announced, 8'000'000U);
  EXPECT_LT(announced, bytes.size());
  file.finish();
  EXPECT_EQ(announced, 2 * bytes.size());
  EXPECT_GE(moved, announced);
}

TEST(SequentialFile, WhoeverIsToldOfAMoveMayEndIt) {
  testing::TempDir folder;
  for (const std::uint64_t end_at : {std::uint64_t{1}, std::uint64_t{9'500'001}}) {
    SequentialFile file(folder.path() / "file", 9'500'000);
    std::uint64_t announced = 0;
    file.before_each_move([&](std::uint64_t count) {
      announced += count;
      if (announced >= end_at) throw Exception(io::ErrorKind::cancelled, "enough");
    });
    EXPECT_THROW(
        {
          file.write(std::vector<std::byte>(9'500'000));
          file.finish();
        },
        Exception);
    EXPECT_GE(announced, end_at);
    EXPECT_LT(announced, end_at + 8'500'000);
  }
}

TEST(SequentialFile, ALinkIsNotFollowed) {
  testing::TempDir folder;
  std::filesystem::create_symlink("elsewhere", folder.path() / "file");
  EXPECT_THROW(SequentialFile(folder.path() / "file", 1), Exception);
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path() / "file"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "elsewhere"));
}

TEST(SequentialFile, MayBeGivenUp) {
  testing::TempDir folder;
  const std::string text = numbered(9 << 20);
  { SequentialFile(folder.path() / "file", text.size()).write(std::as_bytes(std::span(text))); }
  EXPECT_LE(std::filesystem::file_size(folder.path() / "file"), text.size());
}

TEST(SequentialFile, HasRoomForAllOfItBeforeTheFirstByte) {
  testing::TempDir folder;
  {
    const testing::SystemCalls calls;
    SequentialFile file(folder.path() / "file", 5'000'000);
    ASSERT_EQ(calls.count("fallocate"), 1U);
    EXPECT_EQ(calls.seen()[2].argument, 5'000'000);
  }
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const testing::SystemCalls calls(testing::failing("fallocate", error));
    try {
      const SequentialFile file(folder.path() / "full", 5'000'000);
      FAIL() << error;
    } catch (const Exception& thrown) {
      EXPECT_EQ(thrown.error().error_number, error);
    }
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "full"));
  }
}

// What a file system without reservations, or one that refuses blocks only when they come, makes of it.
TEST(SequentialFile, IsTheSameFileWhereTheFileSystemDoesLess) {
  testing::TempDir folder;
  const std::string text = numbered((13 << 20) + 4097);
  const auto holds = [&](const testing::Answer& answer) {
    const testing::SystemCalls calls(answer);
    write_in_parts(folder.path() / "file", text, 1 << 20);
    EXPECT_TRUE(read(folder.path() / "file") == text);
    return calls.seen();
  };
  holds(testing::failing("fallocate", EOPNOTSUPP));
  holds(testing::failing("pwrite", EINVAL, {}, 1));
  holds(testing::failing("pread", EINVAL, {}, 1));
  // A block that is written in parts.
  holds([](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "pwrite" && call.argument > 4096) return call.argument / 4096 / 2 * 4096;
    return {};
  });
}

TEST(SequentialFile, GrowsPieceByPieceWhereNoRoomIsReserved) {
  testing::TempDir folder;
  const auto path = folder.path() / "file";
  std::uint64_t written = 0;
  const testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
    if (call.name == "fallocate") return -EOPNOTSUPP;
    if (call.name != "pwrite") return {};
    EXPECT_EQ(std::filesystem::file_size(path), written);
    written += static_cast<std::uint64_t>(call.argument);
    return {};
  });
  write_in_parts(path, numbered(40 << 20), 5 << 20);
  EXPECT_EQ(written, 40U << 20);
}

TEST(SequentialFile, HasTheLengthThatWasAnnouncedOrIsAnError) {
  testing::TempDir folder;
  SequentialFile file(folder.path() / "file", 10);
  file.write(std::as_bytes(std::span("12345678", 8)));
  EXPECT_THROW(file.write(std::as_bytes(std::span("901", 3))), Exception);
  EXPECT_THROW(file.finish(), Exception);
}

}  // namespace
}  // namespace tierflow
