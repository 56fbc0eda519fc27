#include "runtime/spec/weight_format.h"

#include <gmock/gmock.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/weight_formats.h"

namespace tierflow {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using Bytes = std::vector<std::byte>;
using Shape = std::vector<std::int64_t>;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

std::vector<float> numbers(std::size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = normal(random) * (i / 64 % 7 == 3 ? 20.0F : 1.0F);
  return values;
}

Bytes quantised(WeightFormat format, const std::vector<float>& values, std::size_t piece = 0) {
  Quantiser quantiser(format, {static_cast<std::int64_t>(values.size())});
  if (piece == 0) piece = std::max<std::size_t>(1, values.size());
  for (std::size_t i = 0; i < values.size(); i += piece)
    quantiser.add({values.data() + i, std::min(piece, values.size() - i)});
  return quantiser.finish();
}

std::vector<std::uint16_t> dense_words(WeightFormat format, const Shape& shape, const Bytes& stored) {
  std::vector<std::uint16_t> words(weight_layout(format, shape).elements);
  dequantise(format, shape, stored, 0, words);
  return words;
}

float widened(std::uint16_t word) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(word) << 16);
}

std::vector<float> there_and_back(WeightFormat format, const std::vector<float>& values) {
  std::vector<float> back;
  for (const auto word : dense_words(format, {static_cast<std::int64_t>(values.size())}, quantised(format, values)))
    back.push_back(widened(word));
  return back;
}

float number_at(const Bytes& stored, std::uint64_t at) {
  float value;
  std::memcpy(&value, stored.data() + at, sizeof(value));
  return value;
}

// Every set of instructions that this processor has, the scalar code too.
void on_every_target(const std::function<void(const char* name)>& test) {
  for (const std::int64_t target : {HWY_SCALAR, HWY_AVX2, HWY_AVX3}) {
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    test(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(0);
  }
}

TEST(WeightFormat, NamesAreReadAndWritten) {
  for (const auto format : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::fp8_rows, WeightFormat::mxfp4,
                            WeightFormat::int8, WeightFormat::nf4, WeightFormat::nf4_double})
    EXPECT_EQ(parse_weight_format(weight_format_name(format)), format);
  for (const char* name : {"fp32", "nf5", ""})
    testing::expect_refusal(io::ErrorKind::usage, {name, "bf16", "int8", "nf4", "nf4-double"},
                            [&] { parse_weight_format(name); });
}

TEST(WeightFormat, SectionsFollowOneAnotherAtMultiplesOfFour) {
  const Shape large = {8192, 8192};
  const auto each = [&](WeightFormat format) { return static_cast<double>(stored_bytes(format, large)) / (1 << 26); };
  EXPECT_EQ(each(WeightFormat::bf16), 2);
  EXPECT_EQ(each(WeightFormat::int8), 1.015625);
  EXPECT_EQ(each(WeightFormat::nf4), 0.5625);
  EXPECT_NEAR(each(WeightFormat::nf4_double), 0.5 + 1.0 / 64 + 4.0 / 64 / 256, 1e-6);
  EXPECT_EQ(each(WeightFormat::fp8), 1 + 4.0 / 128 / 128);
  EXPECT_EQ(each(WeightFormat::fp8_rows), 1 + 4.0 / 8192);
  EXPECT_EQ(each(WeightFormat::mxfp4), 0.5 + 1.0 / 32);

  // 131 elements: 66 bytes of nf4, three blocks.
  EXPECT_EQ(stored_bytes(WeightFormat::bf16, {131}), 264U);
  EXPECT_EQ(stored_bytes(WeightFormat::int8, {131}), 132U + 4);
  EXPECT_EQ(stored_bytes(WeightFormat::nf4, {131}), 68U + 3 * 4);
  const WeightLayout at = weight_layout(WeightFormat::nf4_double, {131});
  EXPECT_THAT((std::vector{at.scales, at.nested, at.offset, at.bytes}), ElementsAre(68, 72, 76, 80));
  EXPECT_EQ(stored_bytes(WeightFormat::fp8, {129, 257}), 129U * 257 + 3 + 2 * 3 * 4);
  EXPECT_EQ(stored_bytes(WeightFormat::fp8, {3, 256, 130}), 3U * 256 * 130 + 3 * 2 * 2 * 4);
  EXPECT_EQ(stored_bytes(WeightFormat::fp8_rows, {3, 5, 7}), 3U * 5 * 7 + 3 + 3 * 5 * 4);
  for (const Shape& shape : {Shape{4}, Shape{2, 3, 4}, Shape{2, 129, 4}})
    testing::expect_refusal(io::ErrorKind::input, {"fp8", "store it as bf16"},
                            [&] { stored_bytes(WeightFormat::fp8, shape); });
  EXPECT_EQ(stored_bytes(WeightFormat::mxfp4, {2, 32, 6}), 64U * 3 + 2 * 6);
  for (const Shape& shape : {Shape{32}, Shape{33, 2}, Shape{32, 3}})
    testing::expect_refusal(io::ErrorKind::input, {"mxfp4", "store it as bf16"},
                            [&] { stored_bytes(WeightFormat::mxfp4, shape); });
}

class Quantised : public ::testing::TestWithParam<WeightFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, Quantised,
                         ::testing::Values(WeightFormat::int8, WeightFormat::nf4, WeightFormat::nf4_double),
                         testing::weight_format_test_name);

TEST_P(Quantised, ValuesComeBackWithinTheirBlocksStep) {
  const bool int8 = GetParam() == WeightFormat::int8;
  const std::size_t block = int8 ? 256 : 64;
  // Half a step, relative to the block's absmax; nf4's widest gap lies at its lower end.
  const float step = int8 ? 0.5F / 127 : (1 - 0.6961928F) / 2;
  for (const std::size_t n : {1U, 2U, 3U, 63U, 64U, 65U, 127U, 255U, 256U, 257U, 4095U, 16384U, 20001U}) {
    const auto values = numbers(n), back = there_and_back(GetParam(), values);
    for (std::size_t i = 0; i < n; ++i) {
      float absmax = 0;
      for (std::size_t k = i / block * block; k < std::min(n, (i / block + 1) * block); ++k)
        absmax = std::max(absmax, std::abs(values[k]));
      const float nested = GetParam() == WeightFormat::nf4_double ? 0.03F : 0;  // of the largest absmax, 1.6 or less
      ASSERT_LE(std::abs(back[i] - values[i]), absmax * (step + 0x1p-8F) + nested) << i << " of " << n;
    }
  }
}

TEST_P(Quantised, PiecesOfAnySizeGiveTheSameBytes) {
  const auto values = numbers(64 * 256 * 2 + 777);
  const Bytes whole = quantised(GetParam(), values);
  for (const std::size_t piece : {1U, 7U, 64U, 65U, 255U, 256U, 257U, 5000U, 20000U})
    EXPECT_EQ(quantised(GetParam(), values, piece), whole) << piece;
}

TEST_P(Quantised, AnyPieceIsDequantisedAlone) {
  const auto values = numbers(9 * 256 + 131);
  const Shape shape = {static_cast<std::int64_t>(values.size())};
  const Bytes stored = quantised(GetParam(), values);
  const auto whole = dense_words(GetParam(), shape, stored);
  for (const std::size_t first : {0U, 1U, 2U, 63U, 64U, 65U, 255U, 256U, 300U, 2304U, 2434U})
    for (const std::size_t n : {0U, 1U, 2U, 63U, 64U, 65U, 129U, 256U, 600U}) {
      const std::size_t taken = std::min(n, whole.size() - first);
      std::vector<std::uint16_t> words(taken);
      dequantise(GetParam(), shape, stored, first, words);
      EXPECT_TRUE(std::equal(words.begin(), words.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)))
          << taken << " from " << first;
    }
}

TEST_P(Quantised, ZerosStayZeros) {
  EXPECT_THAT(there_and_back(GetParam(), std::vector<float>(700)), Each(0.0F));
  auto values = numbers(1100);
  std::fill(values.begin() + 256, values.begin() + 768, 0.0F);
  std::fill(values.begin() + 1088, values.end(), 0.0F);  // a short nf4 block
  const auto back = there_and_back(GetParam(), values);
  EXPECT_THAT(std::vector(back.begin() + 256, back.begin() + 768), Each(0.0F));
  EXPECT_THAT(std::vector(back.begin() + 1088, back.end()), Each(0.0F));
}

TEST_P(Quantised, VerySmallAndVeryLargeValuesStayFinite) {
  for (const float scale : {0x1p-149F, 0x1p-126F, 1e-38F, 1e38F}) {
    auto values = numbers(300);
    for (float& value : values) value = std::clamp(value * 50, -3.0F, 3.0F) * scale;
    EXPECT_THAT(there_and_back(GetParam(), values), Each(::testing::Truly([](float x) { return std::isfinite(x); })));
  }
}

TEST_P(Quantised, WhatIsNotFiniteIsRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinite, -kInfinite})
    for (const std::size_t at : {0U, 255U, 1000U, 1028U}) {  // 1024 and up: a short block
      auto values = numbers(1029);
      values[at] = bad;
      on_every_target([&](const char* name) {
        SCOPED_TRACE(name);
        testing::expect_refusal(io::ErrorKind::input, {"NaN or infinite", weight_format_name(GetParam())},
                                [&] { quantised(GetParam(), values); });
      });
    }
}

TEST_P(Quantised, WithoutAnyValueThereAreZeros) {
  EXPECT_THAT(quantised(GetParam(), {}), Each(std::byte{0}));
}

TEST_P(Quantised, TheNumberOfValuesIsThatOfTheShape) {
  const auto values = numbers(100);
  Quantiser quantiser(GetParam(), {11, 9});
  EXPECT_THROW(quantiser.add(values), Exception);
  quantiser.add({values.data(), 98});
  EXPECT_THROW(quantiser.finish(), Exception);
}

TEST_P(Quantised, EveryInstructionSetGivesTheSameBits) {
  auto values = numbers(64 * 256 + 777);
  for (int i = 0; i < 15; ++i) values[static_cast<std::size_t>(i)] = weights::kNf4.edges[i];  // as near to two codes
  values[15] = 1;
  const Shape shape = {static_cast<std::int64_t>(values.size())};
  const Bytes stored = quantised(GetParam(), values);
  const auto words = dense_words(GetParam(), shape, stored);
  on_every_target([&](const char* name) {
    EXPECT_EQ(quantised(GetParam(), values), stored) << name;
    EXPECT_EQ(dense_words(GetParam(), shape, stored), words) << name;
  });
}

TEST(Int8, CodesAreTheNearestOf255) {
  std::vector<float> values(256);
  for (int i = 0; i < 256; ++i) values[static_cast<std::size_t>(i)] = static_cast<float>(std::min(i, 254) - 127) / 4;
  values.push_back(0.5F);  // a short block
  const Bytes stored = quantised(WeightFormat::int8, values);
  for (int i = 0; i < 256; ++i)
    EXPECT_EQ(static_cast<std::int8_t>(stored[static_cast<std::size_t>(i)]), std::min(i, 254) - 127);
  EXPECT_EQ(number_at(stored, 260), 31.75F);
  EXPECT_EQ(number_at(stored, 264), 0.5F);
  EXPECT_EQ(there_and_back(WeightFormat::int8, values), values);
  EXPECT_THAT(quantised(WeightFormat::int8, std::vector<float>(300)), Each(std::byte{0}));
}

TEST(Int8, TheScaleIsAQuotient) {
  // One where the product with the inverse of 127 gives another word.
  const float inverse = 1.0F / 127;
  float absmax = 1;
  while (weights::rounded(absmax / 127 * 127) == weights::rounded(absmax * inverse * 127) && absmax < 2)
    absmax = std::nextafter(absmax, 2.0F);
  ASSERT_LT(absmax, 2);
  Bytes stored(260, std::byte{127});
  std::memcpy(stored.data() + 256, &absmax, sizeof(absmax));
  EXPECT_THAT(dense_words(WeightFormat::int8, {256}, stored), Each(weights::rounded(absmax / 127 * 127)));
}

TEST(Nf4, TheFirstOfTwoElementsIsTheUpperHalf) {
  std::vector<float> values(weights::kNf4.at, weights::kNf4.at + 16);
  values.push_back(1);  // the seventeenth has a byte of its own
  const Bytes stored = quantised(WeightFormat::nf4, values);
  for (unsigned i = 0; i < 8; ++i) EXPECT_EQ(static_cast<unsigned>(stored[i]), (2 * i) << 4 | (2 * i + 1));
  EXPECT_EQ(static_cast<unsigned>(stored[8]), 0xf7U);
  EXPECT_THAT(std::vector(stored.begin() + 9, stored.begin() + 12), Each(std::byte{0}));
  EXPECT_EQ(number_at(stored, 12), 1.0F);
}

// In vectors and in what is left beside them: of two words as near, int8 takes the even one, fp8 the larger.
TEST(Rounding, TiesGoTheirWayAndNanStaysNan) {
  const Shape shape = {1, 37};
  const auto word = [&](WeightFormat format, int code, float scale) {
    Bytes stored(weight_layout(format, shape).bytes);
    std::fill_n(stored.begin(), 37, static_cast<std::byte>(code));
    std::memcpy(stored.data() + 40, &scale, sizeof(scale));
    const auto words = dense_words(format, shape, stored);
    EXPECT_THAT(words, Each(words[0]));
    return words[0];
  };
  const auto fp8 = [&](int code, float scale) {
    EXPECT_EQ(word(WeightFormat::fp8, code, scale), word(WeightFormat::fp8_rows, code, scale));
    return word(WeightFormat::fp8, code, scale);
  };
  constexpr int kOne = 0x38;
  const float between = 1 + 0x1p-8F;  // 1 and 1 + 2^-7
  EXPECT_EQ(word(WeightFormat::int8, 1, 127 * between), 0x3f80);
  EXPECT_EQ(word(WeightFormat::int8, 1, 127 * (1 + 0x1.8p-7F)), 0x3f82);
  EXPECT_EQ(fp8(kOne, between), 0x3f81);
  EXPECT_EQ(fp8(kOne | 0x80, between), 0xbf81);
  EXPECT_EQ(fp8(kOne, std::nextafter(between, 1.0F)), 0x3f80);
  EXPECT_EQ(fp8(kOne, 1 + 0x1.8p-7F), 0x3f82);
  EXPECT_EQ(fp8(kOne, std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(fp8(kOne, std::bit_cast<float>(0x7fffffffU)), 0x7fc0);
  EXPECT_EQ(fp8(0, kInfinite), 0x7fc0);
  EXPECT_EQ(fp8(0xff, 1), 0x7fc0);
}

TEST(Fp8, EachTileOf128By128HasItsScale) {
  const std::int64_t rows = 130, columns = 259;
  const Shape shape = {rows, columns};
  const WeightLayout at = weight_layout(WeightFormat::fp8, shape);
  Bytes stored(at.bytes);
  for (std::uint64_t i = 0; i < at.elements; ++i) stored[i] = static_cast<std::byte>(i * 37 % 127);
  for (int tile = 0; tile < 6; ++tile) {
    const float scale = 0.25F + static_cast<float>(tile);
    std::memcpy(stored.data() + at.scales + 4 * static_cast<std::uint64_t>(tile), &scale, sizeof(scale));
  }
  const auto words = dense_words(WeightFormat::fp8, shape, stored);
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto i = static_cast<std::size_t>(row * columns + column);
      const float scale = 0.25F + static_cast<float>(row / 128 * 3 + column / 128);
      const float code = weights::e4m3(static_cast<std::uint8_t>(stored[i]));
      ASSERT_EQ(words[i], weights::rounded_away(code * scale)) << row << ", " << column;
    }
  on_every_target([&](const char* name) { EXPECT_EQ(dense_words(WeightFormat::fp8, shape, stored), words) << name; });
  std::vector<std::uint16_t> piece(400);
  dequantise(WeightFormat::fp8, shape, stored, 127 * columns + 100, piece);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), words.begin() + 127 * columns + 100));
}

TEST(Fp8, EachRowHasItsScale) {
  const std::int64_t rows = 3 * 44, columns = 259;
  const Shape shape = {3, 44, columns};
  const WeightLayout at = weight_layout(WeightFormat::fp8_rows, shape);
  Bytes stored(at.bytes);
  for (std::uint64_t i = 0; i < at.elements; ++i) stored[i] = static_cast<std::byte>(i * 37 % 127);
  const auto scale = [](std::int64_t row) { return 0.25F + static_cast<float>(row); };
  for (std::int64_t row = 0; row < rows; ++row) {
    const float value = scale(row);
    std::memcpy(stored.data() + at.scales + 4 * static_cast<std::uint64_t>(row), &value, sizeof(value));
  }
  const auto words = dense_words(WeightFormat::fp8_rows, shape, stored);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const float code = weights::e4m3(static_cast<std::uint8_t>(stored[static_cast<std::size_t>(i)]));
    ASSERT_EQ(words[static_cast<std::size_t>(i)], weights::rounded_away(code * scale(i / columns))) << i;
  }
  on_every_target(
      [&](const char* name) { EXPECT_EQ(dense_words(WeightFormat::fp8_rows, shape, stored), words) << name; });
  std::vector<std::uint16_t> piece(400);
  dequantise(WeightFormat::fp8_rows, shape, stored, 127 * columns + 100, piece);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), words.begin() + 127 * columns + 100));
}

// Every code with every scale, in vectors and in what is left beside them.
TEST(Mxfp4, EachColumnOf32RowsHasItsScale) {
  const std::int64_t rows = 64, columns = 2 * 256 + 38;
  const Shape shape = {rows, columns};
  const WeightLayout at = weight_layout(WeightFormat::mxfp4, shape);
  Bytes stored(at.bytes);
  for (std::uint64_t i = 0; i < at.scales; ++i) stored[i] = static_cast<std::byte>(i * 37 % 256);
  for (std::uint64_t i = at.scales; i < at.bytes; ++i) stored[i] = static_cast<std::byte>((i - at.scales) * 3 % 256);
  const auto words = dense_words(WeightFormat::mxfp4, shape, stored);
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto i = static_cast<std::uint64_t>(row * columns + column);
      const auto code = static_cast<unsigned>(stored[i / 2]) >> (i % 2 * 4);
      const auto scale = static_cast<int>(stored[at.scales + static_cast<std::uint64_t>(row / 32 * columns + column)]);
      constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const auto exact = static_cast<float>(std::ldexp(kMagnitudes[code % 8] * (code & 8 ? -1 : 1), scale - 127));
      if (scale == 255)
        ASSERT_EQ(words[i] & 0x7f80, 0x7f80) << row << ", " << column;  // no number
      else
        ASSERT_EQ(widened(words[i]), exact) << row << ", " << column;
    }
  on_every_target([&](const char* name) { EXPECT_EQ(dense_words(WeightFormat::mxfp4, shape, stored), words) << name; });
  for (const std::int64_t first : {std::int64_t{0}, 31 * columns + 101, 32 * columns - 1}) {
    std::vector<std::uint16_t> piece(static_cast<std::size_t>(columns + 3));
    dequantise(WeightFormat::mxfp4, shape, stored, static_cast<std::uint64_t>(first), piece);
    EXPECT_TRUE(std::equal(piece.begin(), piece.end(), words.begin() + first)) << first;
  }
}

TEST(Fp32, ValuesAreExact) {
  const std::vector<float> values = {1.00001F, -3.5F, 1e-30F, 7.0F, 0.1F};
  Quantiser quantiser(WeightFormat::fp32, {5});
  quantiser.add(std::span(values).first(3));
  quantiser.add(std::span(values).last(2));
  const std::vector<std::byte> stored = quantiser.finish();
  ASSERT_EQ(stored.size(), 5 * sizeof(float));
  EXPECT_EQ(std::memcmp(stored.data(), values.data(), stored.size()), 0);
  std::vector<std::uint16_t> words(2);
  dequantise(WeightFormat::fp32, {5}, stored, 3, words);
  EXPECT_EQ(words, (std::vector<std::uint16_t>{0x40e0, 0x3dcd}));
}

TEST(Bf16, WordsStayAsTheyAre) {
  Bytes stored(8);
  for (std::size_t i = 0; i < stored.size(); ++i) stored[i] = static_cast<std::byte>(0xf9 + i);
  std::vector<std::uint16_t> words(2);
  dequantise(WeightFormat::bf16, {3}, stored, 1, words);
  EXPECT_THAT(words, ElementsAre(0xfcfb, 0xfefd));
}

}  // namespace
}  // namespace tierflow
