// The bytes on the drive, pinned: what this version writes is what is kept here, and what is kept here opens. The
// golden header was made from the description in io/member.h by another program; so were the checksums.
#include <gmock/gmock.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "io/buffer.h"
#include "io/checksum.h"
#include "io/layout.h"
#include "io/member.h"
#include "tests/support/temp_dir.h"

namespace tierflow::io {
namespace {

constexpr FilePolicy kAnything{.allow_buffered = true, .allow_any_filesystem = true};
constexpr std::uint64_t kHeaderBytes = 4096;

std::vector<char> bytes_of(const std::filesystem::path& path, std::size_t most = SIZE_MAX) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() > most) bytes.resize(most);
  return bytes;
}

class GoldenHeader : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(golden_.size(), kHeaderBytes); }

  // A data file of `size` bytes that begins with these.
  Result<MemberHeader> read(const std::vector<char>& header, std::uint64_t size) {
    const std::filesystem::path path = folder_.path() / ("file" + std::to_string(++files_));
    {
      File file = File::create(path, kAnything).value();
      EXPECT_TRUE(file.preallocate(size).ok());
    }
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .write(header.data(), static_cast<std::streamsize>(header.size()));
    const File file = File::open(path, kAnything).value();
    return MemberHeader::read(file);
  }
  // The golden header with other bytes at `position`, and a checksum that fits.
  template <class T>
  std::vector<char> with(std::size_t position, T value) {
    std::vector<char> bytes = golden_;
    std::memcpy(bytes.data() + position, &value, sizeof value);
    const std::uint64_t sum = content_hash(std::as_bytes(std::span(bytes)).first(kHeaderBytes - 8));
    std::memcpy(bytes.data() + kHeaderBytes - 8, &sum, sizeof sum);
    return bytes;
  }

  const std::vector<char> golden_ = bytes_of(TIERFLOW_GOLDEN_IO "/member.bin");
  const std::uint64_t file_bytes_ = (std::uint64_t{1} << 20) + 262144;
  testing::TempDir folder_;
  int files_ = 0;
};

TEST_F(GoldenHeader, Opens) {
  const Result<MemberHeader> header = read(golden_, file_bytes_);
  ASSERT_TRUE(header.ok()) << header.error().message();
  const MemberHeader& found = header.value();
  EXPECT_EQ(found.volume_id, (std::array<std::uint64_t, 2>{0x0123456789ABCDEF, 0xFEDCBA9876543210}));
  EXPECT_EQ(found.index, 1U);
  EXPECT_EQ(found.volume_bytes, 1U << 20);
  EXPECT_EQ(found.stripe_unit, 65536U);
  EXPECT_EQ(found.data_bytes, 262144U);
  EXPECT_EQ(found.data_start, 1U << 20);
  EXPECT_EQ(found.weights, (std::vector<std::uint32_t>{3, 1}));
  EXPECT_EQ(found.first_copy_wrong, "");
}

TEST_F(GoldenHeader, IsWhatIsWritten) {
  const MemberHeader header{.volume_id = {0x0123456789ABCDEF, 0xFEDCBA9876543210},
                            .index = 1,
                            .volume_bytes = 1 << 20,
                            .stripe_unit = 65536,
                            .data_bytes = 262144,
                            .weights = {3, 1}};
  File file = File::create(folder_.path() / "written", kAnything).value();
  ASSERT_TRUE(file.preallocate(file_bytes_).ok());
  ASSERT_FALSE(header.write(file));
  const std::vector<char> written = bytes_of(file.path());
  for (const std::uint64_t copy : {std::uint64_t{0}, kSecondHeader})
    EXPECT_TRUE(std::equal(golden_.begin(), golden_.end(), written.begin() + static_cast<std::ptrdiff_t>(copy)))
        << copy;
}

TEST_F(GoldenHeader, ADamagedOneCostsNothingWhereTheSecondIsWhole) {
  std::vector<char> bytes(kSecondHeader, 0);
  bytes.insert(bytes.end(), golden_.begin(), golden_.end());
  for (const char* begin : {"", "TIERFLOW"}) {  // nothing is left of the first, or its magic alone
    std::memcpy(bytes.data(), begin, std::strlen(begin));
    Result<MemberHeader> header = read(bytes, file_bytes_);
    ASSERT_TRUE(header.ok()) << header.error().message();
    EXPECT_EQ(header->weights, (std::vector<std::uint32_t>{3, 1}));
    EXPECT_THAT(header->first_copy_wrong, ::testing::HasSubstr(*begin == 0 ? "not a data file" : "header is damaged"));
  }
  bytes[kSecondHeader + 100] ^= 1;
  const Result<MemberHeader> neither = read(bytes, file_bytes_);
  ASSERT_FALSE(neither.ok());
  EXPECT_EQ(neither.error().kind, ErrorKind::corruption);
}

TEST_F(GoldenHeader, EveryDamagedByteIsCorruption) {
  for (std::size_t at = 8; at < kHeaderBytes; at += at < 340 ? 1 : 311) {
    std::vector<char> bytes = golden_;
    bytes[at] ^= 0x40;
    const Result<MemberHeader> header = read(bytes, file_bytes_);
    ASSERT_FALSE(header.ok()) << at;
    EXPECT_EQ(header.error().kind, ErrorKind::corruption) << at;
  }
}

TEST_F(GoldenHeader, WhatMakesNoSenseIsRefusedThoughItsChecksumFits) {
  const auto refused = [&](const std::vector<char>& bytes, const char* why) {
    const Result<MemberHeader> header = read(bytes, file_bytes_);
    if (header) return false;
    EXPECT_EQ(header.error().kind, ErrorKind::input);
    EXPECT_THAT(header.error().detail, ::testing::HasSubstr(why));
    return true;
  };
  EXPECT_TRUE(refused(with<char>(0, 'X'), "not a data file"));
  EXPECT_TRUE(refused(with<std::uint32_t>(8, 2), "format version is 2"));
  EXPECT_TRUE(refused(with<std::uint32_t>(12, 2), "no sense"));   // member 2 of 2
  EXPECT_TRUE(refused(with<std::uint32_t>(16, 0), "no sense"));   // of none
  EXPECT_TRUE(refused(with<std::uint32_t>(16, 65), "no sense"));  // of more than there is room for
  EXPECT_TRUE(refused(with<std::uint32_t>(16, 3), "no sense"));   // a third one of weight 0
  EXPECT_TRUE(refused(with<std::uint32_t>(72, 4097), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(40, 0), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(48, 0), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(48, 65537), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(56, ~std::uint64_t{0} >> 1), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(64, 4096), "no sense"));
  EXPECT_TRUE(refused(with<std::uint64_t>(64, (1 << 20) + 1), "no sense"));
  EXPECT_TRUE(read(with<std::uint32_t>(72, 4096), file_bytes_).ok());
}

TEST_F(GoldenHeader, TheFileHasExactlyTheBytesThatItsHeaderNames) {
  for (const std::uint64_t size : {file_bytes_ - 4096, file_bytes_ + 4096}) {
    const Result<MemberHeader> header = read(golden_, size);
    ASSERT_FALSE(header.ok());
    EXPECT_EQ(header.error().kind, ErrorKind::corruption);
    EXPECT_THAT(header.error().detail, ::testing::HasSubstr(std::to_string(file_bytes_)));
  }
  EXPECT_EQ(read(golden_, 512 << 10).error().kind, ErrorKind::input);
}

TEST(GoldenLayout, StripesLieWhereTheyAlwaysLay) {
  const auto places = [](std::vector<std::uint32_t> weights) {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> found;
    Layout(8 * 16, 16, std::move(weights)).split(0, 8 * 16, 16, [&](const Piece& piece) {
      found.emplace_back(piece.member, piece.member_offset);
    });
    return found;
  };
  using Places = std::vector<std::pair<std::uint32_t, std::uint64_t>>;
  EXPECT_EQ(places({1, 1}), (Places{{0, 0}, {1, 0}, {0, 16}, {1, 16}, {0, 32}, {1, 32}, {0, 48}, {1, 48}}));
  EXPECT_EQ(places({2, 1}), (Places{{0, 0}, {1, 0}, {0, 16}, {0, 32}, {1, 16}, {0, 48}, {0, 64}, {1, 32}}));
  EXPECT_EQ(places({1, 3}), (Places{{1, 0}, {0, 0}, {1, 16}, {1, 32}, {1, 48}, {0, 16}, {1, 64}, {1, 80}}));
}

std::vector<std::byte> pattern(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 131 + 7);
  return bytes;
}

// XXH3-64 of the pattern's first bytes, from the reference implementation: each branch of the algorithm.
TEST(GoldenChecksums, AreTheSameOnEveryMachine) {
  const std::vector<std::byte> data = pattern(70'000);
  const std::pair<std::size_t, std::uint64_t> kKnown[] = {
      {0, 0x2d06800538d394c2},    {1, 0x4c5cca45d0f4811f},    {3, 0x6e3e2670e61106ac},     {4, 0x5c4c63133443d03f},
      {8, 0xf9fd4dd0b04d78f5},    {9, 0x7c20df9712c26edf},    {16, 0x86abf6baccea0858},    {17, 0xb58bf5dc5022d071},
      {128, 0x10d17f72c0ccba41},  {129, 0x1648bdc3db49d1a2},  {240, 0xb6cfaf343fab81e6},   {241, 0x956cae592c67279e},
      {1024, 0x70bd377d9574f4bb}, {4096, 0x9ddd66c14af0daff}, {69'999, 0xce5f7a1452bd0b58}};
  for (const auto& [length, sum] : kKnown) EXPECT_EQ(content_hash(std::span(data).first(length)), sum) << length;
  EXPECT_EQ(extent_checksum(1, 2, 3, std::span(data).first(4096)), 0x303a96c08e8be493U);
  EXPECT_EQ(extent_checksum(~std::uint64_t{0}, 0, 0, {}), 0x89ea5bf42ae8650fU);
}

TEST(GoldenChecksums, DoNotDependOnTheAddress) {
  const std::vector<std::byte> data = pattern(5000);
  std::vector<std::byte> shifted(5064);
  for (std::size_t shift = 0; shift < 64; shift += 7) {
    std::copy(data.begin(), data.end(), shifted.begin() + static_cast<std::ptrdiff_t>(shift));
    EXPECT_EQ(content_hash(std::span(shifted).subspan(shift, 5000)), content_hash(data));
  }
}

}  // namespace
}  // namespace tierflow::io
