// A teacher's tokens on the drive: what is written is read, every byte is guarded, and nothing unfinished has a name.
#include "runtime/data/teacher_file.h"

#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "runtime/base/exception.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow::testing {
namespace {

namespace fs = std::filesystem;

constexpr std::uint16_t kMinusOne = 0xBC00, kMinusTwo = 0xC000, kMinusInfinity = 0xFC00, kNaN = 0xFE00;

class TeacherFiles : public ::testing::Test {
 protected:
  // Three sequences of 2, 0 and 1 positions with two tokens each.
  static std::vector<TeacherTokens> tokens() {
    return {{.ids = {5, 6, 999, 0}, .log_probabilities = {0, kMinusOne, kMinusOne, kMinusInfinity}},
            {},
            {.ids = {7, 3}, .log_probabilities = {kMinusOne, kMinusOne}}};
  }
  fs::path write(std::uint64_t vocabulary = 1000, const std::vector<TeacherTokens>& all = tokens(),
                 std::uint64_t length = 8) {
    const fs::path path = dir_.path() / "teacher.tft";
    fs::remove(path);
    TeacherFileWriter writer(path, {.top = 2,
                                    .vocabulary = vocabulary,
                                    .sequence_length = length,
                                    .sequences = all.size(),
                                    .positions = 3,
                                    .data = 77});
    for (const TeacherTokens& one : all) writer.add(one);
    EXPECT_FALSE(fs::exists(path));
    writer.finish({});
    return path;
  }
  static std::string bytes_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  fs::path put(const std::string& bytes) {
    const fs::path path = dir_.path() / "changed.tft";
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  // Everything that is read of it.
  static void read_all(const fs::path& path) {
    const TeacherFile file(path);
    for (std::uint64_t i = 0; i < file.shape().sequences; ++i) file.read(i);
  }
  static io::ErrorKind refusal(const fs::path& path) {
    try {
      read_all(path);
    } catch (const Exception& error) {
      return error.error().kind;
    }
    return io::ErrorKind::none;
  }

  TempDir dir_;
};

TEST_F(TeacherFiles, NoSequenceIsLongerThanItsHeaderSays) {
  EXPECT_EQ(refusal(write(1000, tokens(), 2)), io::ErrorKind::none);
  EXPECT_THROW(write(1000, tokens(), 1), Exception);  // its writer reads it back
}

TEST_F(TeacherFiles, WhatIsWrittenIsRead) {
  for (const std::uint64_t vocabulary : {1000, 65536, 65537}) {
    const TeacherFile file(write(vocabulary));
    EXPECT_EQ(file.shape().id_bytes(), vocabulary > 65536 ? 4 : 2);
    EXPECT_EQ(file.shape().positions, 3);
    EXPECT_EQ(file.shape().data, 77);
    EXPECT_EQ(file.largest_id(), 999);
    EXPECT_EQ(fs::file_size(file.path()), 80 + 3 * 16 + 3 * 2 * (file.shape().id_bytes() + 2));
    for (std::uint64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(file.read(i).ids, tokens()[i].ids);
      EXPECT_EQ(file.read(i).log_probabilities, tokens()[i].log_probabilities);
    }
    for (const std::uint64_t beyond : {std::uint64_t{3}, UINT64_MAX})
      expect_refusal(io::ErrorKind::usage, {"has 3 sequences"}, [&] { file.read(beyond); });
  }
}

TEST_F(TeacherFiles, TheFilesBytesNeverChange) {
  const std::string bytes = bytes_of(write());
  ASSERT_EQ(bytes.size(), 80 + 48 + 24);
  EXPECT_EQ(bytes.substr(0, 8), "TFTEACH\n");
  std::uint32_t words[4];
  std::memcpy(words, bytes.data() + 8, sizeof words);
  EXPECT_EQ(words[0], 1);    // version
  EXPECT_EQ(words[1], 2);    // K
  EXPECT_EQ(words[2], 2);    // bytes of an id
  EXPECT_EQ(words[3], 999);  // largest id
  EXPECT_EQ(bytes.substr(128, 16), std::string("\5\0\6\0\xE7\3\0\0\0\0\0\xBC\0\xBC\0\xFC", 16));
}

TEST_F(TeacherFiles, EveryByteIsGuarded) {
  const std::string whole = bytes_of(write());
  for (std::size_t at = 0; at < whole.size(); ++at)
    for (const int bit : {0, 7}) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
      EXPECT_NE(refusal(put(bytes)), io::ErrorKind::none) << at;
    }
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_EQ(refusal(put(whole.substr(0, size))), size < 80 ? io::ErrorKind::input : io::ErrorKind::corruption)
        << size;
  EXPECT_EQ(refusal(put(whole + "x")), io::ErrorKind::corruption);
  EXPECT_EQ(refusal(put(whole)), io::ErrorKind::none);
}

// Bytes that have their checksums and that this program would not write.
TEST_F(TeacherFiles, ImpossibleNumbersAreRefused) {
  const auto refused = [&](TeacherTokens last) {
    std::vector<TeacherTokens> all = tokens();
    all.back() = std::move(last);
    EXPECT_THROW(write(1000, all), Exception);  // it is read back before it has its name
    EXPECT_FALSE(fs::exists(dir_.path() / "teacher.tft"));
  };
  refused({.ids = {7, 3}, .log_probabilities = {kMinusTwo, kMinusOne}});            // rises
  refused({.ids = {7, 3}, .log_probabilities = {0x3C00, kMinusOne}});               // above 0
  refused({.ids = {7, 3}, .log_probabilities = {kMinusOne, kNaN}});                 // no number
  refused({.ids = {7, 3}, .log_probabilities = {kMinusInfinity, kMinusInfinity}});  // nothing has a probability
  refused({.ids = {7, 7}, .log_probabilities = {kMinusOne, kMinusTwo}});            // twice
  refused({.ids = {7, 1000}, .log_probabilities = {kMinusOne, kMinusTwo}});         // beyond the vocabulary

  const std::string whole = bytes_of(write());
  const auto with = [&](std::size_t at, std::uint32_t value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + at, &value, 4);
    const std::uint64_t check = XXH3_64bits(bytes.data(), 72);
    std::memcpy(bytes.data() + 72, &check, 8);
    return refusal(put(bytes));
  };
  EXPECT_EQ(with(12, 2), io::ErrorKind::none);
  EXPECT_EQ(with(8, 2), io::ErrorKind::input);  // a later version
  for (const auto& [at, value] : {std::pair{12, 0},
                                  {12, 2000},
                                  {12, 70000},
                                  {16, 4},
                                  {20, 1000},
                                  {24, 1},
                                  {40, 4},
                                  {44, 1 << 20},
                                  {48, 2},
                                  {52, 1 << 20}})
    EXPECT_EQ(with(static_cast<std::size_t>(at), static_cast<std::uint32_t>(value)), io::ErrorKind::corruption)
        << at << " " << value;
}

TEST_F(TeacherFiles, ADriveWithoutRoomIsRefusedBeforeThePass) {
  try {
    const TeacherFileWriter writer(
        dir_.path() / "a", {.top = 64, .vocabulary = 100000, .sequences = 1, .positions = std::uint64_t{1} << 38});
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().kind, io::ErrorKind::environment);
    EXPECT_NE(std::string(error.what()).find("--teacher-top"), std::string::npos);
  }
  EXPECT_THROW(TeacherFileWriter(dir_.path(), {.top = 1, .vocabulary = 2}), Exception);  // a folder has the name
}

}  // namespace
}  // namespace tierflow::testing
