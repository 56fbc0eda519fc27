// Weights of one byte an element: FP8, compressed-tensors, and 8 bits of bitsandbytes.
#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "tests/runtime/checkpoint/packed_weights.h"

namespace tierflow::testing {
namespace {

class EightBits : public FolderOfOneWeight {
 protected:
  // `count` elements from `first` on, as they lie: the values of read(), rounded once.
  void expect_kept(WeightFormat format, std::uint64_t first, const Shape& shape) const {
    const std::uint64_t count = elements_of(shape);
    const std::vector<std::byte> stored = weight()->read_unconverted(format, first, count);
    ASSERT_EQ(stored.size(), stored_bytes(format, shape));
    std::vector<float> values(count);
    std::vector<std::uint16_t> words(count);
    weight()->read(first, values);
    dequantise(format, shape, stored, 0, words);
    for (std::size_t i = 0; i < count; ++i)
      ASSERT_EQ(words[i], weights::rounded_away(values[i])) << i << " from " << first;
  }
  void expect_not_kept(WeightFormat format, std::uint64_t first, std::uint64_t count) const {
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed as", weight_format_name(format)},
                   [&] { weight()->read_unconverted(format, first, count); });
  }
  // Whether it can stay with a scale for each row, all of it or some rows; in tiles it cannot.
  void expect_rows(bool kept, const Shape& shape) const {
    const auto columns = static_cast<std::uint64_t>(shape.back());
    EXPECT_FALSE(weight()->has(WeightFormat::fp8));
    ASSERT_EQ(weight()->has(WeightFormat::fp8_rows), kept);
    if (!kept) return expect_not_kept(WeightFormat::fp8_rows, 0, elements_of(shape));
    expect_kept(WeightFormat::fp8_rows, 0, shape);
    expect_kept(WeightFormat::fp8_rows, 2 * columns, {3, shape.back()});
    for (const auto& [first, count] :
         {std::pair{std::uint64_t{1}, columns}, {0, columns - 1}, {0, 0}, {columns, elements_of(shape)}})
      expect_not_kept(WeightFormat::fp8_rows, first, count);
    expect_not_kept(WeightFormat::fp8, 0, elements_of(shape));
  }
};

TEST_F(EightBits, EightBitsTakeTheirRowsScale) {
  const Shape shape = {701, 401};
  put("m.weight", "I8", shape, codes(elements_of(shape)));
  EXPECT_EQ(weight(), nullptr) << "whole numbers, as far as it is known";
  std::vector<float> rows(701);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i + 1) / 16;
  put("m.SCB", {701}, rows);
  expect_values(shape, [&](std::uint64_t at) {
    return static_cast<float>(static_cast<std::int8_t>(byte("m.weight", at))) * number("m.SCB", at / 401) / 127.0F;
  });
  EXPECT_EQ(weight()->parts(), (std::vector<std::string>{"m.SCB"}));
  EXPECT_FALSE(weight()->has(WeightFormat::fp8) || weight()->has(WeightFormat::int8));
  put("m.weight_format", "U8", {1}, "x");
  EXPECT_EQ(weight()->parts(), (std::vector<std::string>{"m.SCB", "m.weight_format"}));
  put("m.SCB", {700}, std::vector<float>(700));
  refused({"here", "the quantised weight m.weight has a part m.SCB of 700 elements, not 701"});
  put("m.weight", "I8", {4}, "abcd");
  refused({"m.weight is no matrix"});
  put("m.weight", "I8", {0, 4}, "");
  refused({"m.weight is no matrix"});
}

TEST_F(EightBits, TilesOfFp8HaveTheirScale) {
  const Shape shape = {259, 1300};
  const std::uint64_t across = 11;
  put("m.weight", "F8_E4M3", shape, codes(elements_of(shape), 0, 126));
  std::vector<float> tiles(3 * across);
  for (std::size_t i = 0; i < tiles.size(); ++i) tiles[i] = static_cast<float>(i + 1) / 16;
  EXPECT_EQ(weight(), nullptr);
  put("m.weight_scale_inv", {3, 11}, tiles);
  expect_values(shape, [&](std::uint64_t at) {
    const std::uint64_t tile = at / 1300 / 128 * across + at % 1300 / 128;
    return weights::e4m3(byte("m.weight", at)) * number("m.weight_scale_inv", tile);
  });
  // As it lies: the same values after one rounding.
  ASSERT_TRUE(weight()->has(WeightFormat::fp8));
  EXPECT_FALSE(weight()->has(WeightFormat::mxfp4));
  const std::vector<std::byte> stored = weight()->read_unconverted(WeightFormat::fp8, 0, elements_of(shape));
  ASSERT_EQ(stored.size(), stored_bytes(WeightFormat::fp8, shape));
  std::vector<float> values(elements_of(shape));
  std::vector<std::uint16_t> words(values.size());
  weight()->read(0, values);
  dequantise(WeightFormat::fp8, shape, stored, 0, words);
  for (std::size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], weights::rounded_away(values[i])) << i;
  for (const auto& [first, count] : {std::pair{0, 1300}, {1300, 258 * 1300}})
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"}, [&, first = first, count = count] {
      weight()->read_unconverted(WeightFormat::fp8, static_cast<std::uint64_t>(first),
                                 static_cast<std::uint64_t>(count));
    });
  put("m.weight_scale_inv", {3, 10}, std::vector<float>(30));
  refused({"m.weight_scale_inv of 30 elements, not 33"});
  put("m.weight_scale_inv", {11, 3}, tiles);
  refused({"m.weight_scale_inv of shape [11, 3], not [3, 11]"});
  put("m.weight_scale_inv", "U8", {3, 11}, std::string(33, 'x'));
  refused({"m.weight_scale_inv of type U8"});
}

// One a row, whatever its shape, one for all, or one a tile.
TEST_F(EightBits, ScalesOfCompressedTensorsAreAsTheyAreShaped) {
  const Shape shape = {259, 1300};
  const std::uint64_t columns = 1300;
  std::vector<float> scales(259);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i + 1) / 16;
  for (const bool fp8 : {true, false}) {
    put("m.weight", fp8 ? "F8_E4M3" : "I8", shape, codes(elements_of(shape), 0, 126));
    const auto code = [&](std::uint64_t at) {
      const std::uint8_t of = byte("m.weight", at);
      return fp8 ? weights::e4m3(of) : static_cast<float>(static_cast<std::int8_t>(of));
    };
    for (const Shape& each : {Shape{259}, Shape{259, 1}}) {
      put("m.weight_scale", each, scales);
      expect_values(shape, [&](std::uint64_t at) { return code(at) * number("m.weight_scale", at / columns); });
      expect_rows(fp8, shape);
    }
    for (const Shape& one : {Shape{}, Shape{1}}) {
      put("m.weight_scale", one, {0.375F});
      expect_values(shape, [&](std::uint64_t at) { return code(at) * 0.375F; });
      expect_rows(fp8, shape);
    }
    EXPECT_EQ(weight()->parts(), (std::vector<std::string>{"m.weight_scale"}));
    put("m.input_scale", {1}, {1.0F});
    EXPECT_EQ(weight()->parts(), (std::vector<std::string>{"m.weight_scale", "m.input_scale"}));
    tensors_.erase("m.input_scale");
    put("m.weight_scale", {258}, std::vector<float>(258));
    refused({"m.weight_scale of 258 elements, not 33"});
    put("m.weight_scale", {3, 11}, std::vector(scales.begin(), scales.begin() + 33));
    expect_values(shape, [&](std::uint64_t at) {
      return code(at) * number("m.weight_scale", at / columns / 128 * 11 + at % columns / 128);
    });
    EXPECT_EQ(weight()->has(WeightFormat::fp8), fp8);
    EXPECT_FALSE(weight()->has(WeightFormat::fp8_rows));
  }
}

// A row that is one tile wide has one scale whichever they are, and can stay as it lies.
TEST_F(EightBits, OneTileIsATile) {
  put("m.weight", "F8_E4M3", {1, 100}, codes(100, 0, 126));
  for (const char* scales : {"m.weight_scale_inv", "m.weight_scale"}) {
    put(scales, {1, 1}, {0.5F});
    EXPECT_TRUE(weight()->has(WeightFormat::fp8)) << scales;
    tensors_.erase(scales);
  }
}

// transformers saves FP8 with one scale for a weight so: the scale has no dimensions.
TEST_F(EightBits, OneScaleForAllMayBeCalledAsThoseOfTilesAre) {
  const Shape shape = {130, 300};
  put("m.weight", "F8_E4M3", shape, codes(elements_of(shape), 0, 126));
  put("m.weight_scale_inv", {}, {0.0625F});
  put("m.activation_scale", {}, {3.0F});
  expect_values(shape, [&](std::uint64_t at) { return weights::e4m3(byte("m.weight", at)) * 0.0625F; });
  expect_rows(true, shape);
  EXPECT_EQ(weight()->parts(), (std::vector<std::string>{"m.weight_scale_inv", "m.activation_scale"}));
}

// Experts in one tensor: scales of tiles, of rows, of each expert, or one.
TEST_F(EightBits, OfExpertsInOneTensorEachHasItsScales) {
  constexpr std::uint64_t kExperts = 3, kColumns = 300;
  for (const std::uint64_t rows : {256U, 130U}) {
    const Shape shape = {3, static_cast<std::int64_t>(rows), 300};
    put("m.weight", "F8_E4M3", shape, codes(elements_of(shape), 0, 126));
    const auto expect = [&](const Shape& of_scales, auto scale) {
      std::vector<float> scales(elements_of(of_scales));
      for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i + 1) / 16;
      put("m.weight_scale_inv", of_scales, scales);
      expect_values(shape, [&](std::uint64_t at) {
        const std::uint64_t row = at / kColumns;
        return weights::e4m3(byte("m.weight", at)) *
               number("m.weight_scale_inv", scale(row / rows, row % rows, at % kColumns));
      });
    };
    const auto each = static_cast<std::int64_t>(rows);
    for (const Shape& of_rows : {Shape{3, each}, Shape{3, each, 1}}) {
      expect(of_rows, [&](auto expert, auto row, auto) { return expert * rows + row; });
      expect_rows(true, shape);
    }
    for (const Shape& of_experts : {Shape{3}, Shape{3, 1}, Shape{3, 1, 1}}) {
      expect(of_experts, [](auto expert, auto, auto) { return expert; });
      expect_rows(true, shape);
    }
    expect({1}, [](auto, auto, auto) { return 0; });
    expect_rows(true, shape);
    expect({3, 2, 3}, [](auto expert, auto row, auto column) { return (expert * 2 + row / 128) * 3 + column / 128; });
    EXPECT_FALSE(weight()->has(WeightFormat::fp8_rows));
    // Below each other tiles of several matrices have to end with these.
    ASSERT_EQ(weight()->has(WeightFormat::fp8), rows == 256);
    if (rows == 256) {
      expect_kept(WeightFormat::fp8, 0, shape);
      expect_kept(WeightFormat::fp8, rows * kColumns, {2, each, 300});
      for (const auto& [first, count] :
           {std::pair{128 * kColumns, rows * kColumns}, {0, 128 * kColumns}, {0, 4 * rows * kColumns}})
        expect_not_kept(WeightFormat::fp8, first, count);
    } else {
      expect_not_kept(WeightFormat::fp8, 0, kExperts * rows * kColumns);
    }
    put("m.weight_scale_inv", {3, 1, 300}, std::vector<float>(900));  // one a column
    refused({"m.weight_scale_inv of 900 elements, not 18"});
  }
}

}  // namespace
}  // namespace tierflow::testing
