#include "io/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>
#include <set>
#include <vector>

namespace tierflow::io {
namespace {

std::vector<std::byte> bytes(std::size_t count) {
  std::vector<std::byte> data(count);
  std::mt19937 random(1);
  for (std::byte& value : data) value = static_cast<std::byte>(random());
  return data;
}

TEST(ChecksumTest, FastVariantsAgreeWithTheLibrary) {
  const std::vector<std::byte> data = bytes(70'000);
  for (std::size_t length : {0U, 1U, 7U, 16U, 17U, 128U, 129U, 240U, 241U, 1023U, 1024U, 4096U, 69'999U}) {
    EXPECT_EQ(content_hash(std::span(data).first(length)), XXH3_64bits(data.data(), length)) << length;
  }
}

TEST(ChecksumTest, EveryPartOfTheIdentityCounts) {
  const std::vector<std::byte> data = bytes(10'000);
  std::set<std::uint64_t> seen;
  seen.insert(extent_checksum(1, 2, 3, data));
  seen.insert(extent_checksum(9, 2, 3, data));
  seen.insert(extent_checksum(1, 9, 3, data));
  seen.insert(extent_checksum(1, 2, 9, data));
  seen.insert(extent_checksum(2, 1, 3, data));
  seen.insert(extent_checksum(1, 2, 3, std::span(data).first(9'999)));
  EXPECT_EQ(seen.size(), 6U);
  EXPECT_EQ(extent_checksum(1, 2, 3, data), extent_checksum(1, 2, 3, data));
}

TEST(ChecksumTest, EverySingleBitFlipIsSeen) {
  std::vector<std::byte> data = bytes(4096);
  const std::uint64_t good = extent_checksum(1, 2, 3, data);
  for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(extent_checksum(1, 2, 3, data), good);
    data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(ChecksumTest, ZeroedExtentsAreSeen) {
  std::vector<std::byte> data = bytes(1 << 20);
  const std::uint64_t good = extent_checksum(1, 2, 3, data);
  std::fill(data.begin() + 4096, data.begin() + 8192, std::byte{0});
  EXPECT_NE(extent_checksum(1, 2, 3, data), good);
  std::fill(data.begin(), data.end(), std::byte{0});
  EXPECT_NE(extent_checksum(1, 2, 3, data), good);
}

}  // namespace
}  // namespace tierflow::io
