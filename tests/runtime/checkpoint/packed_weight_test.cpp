// The values of quantised weights, from parts made here; and parts that make no weight.
#include "runtime/checkpoint/packed_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using testing::expect_refusal;
using Shape = std::vector<std::int64_t>;

std::uint64_t elements_of(const Shape& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}

// A folder in memory.
class PackedWeights : public ::testing::Test {
 protected:
  void put(const std::string& name, const std::string& dtype, const Shape& shape, const std::string& bytes) {
    tensors_[name] = {.dtype = dtype, .shape = shape, .offset = data_.size(), .bytes = bytes.size()};
    data_ += bytes;
  }
  void put(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    put(name, "F32", shape, {reinterpret_cast<const char*>(values.data()), 4 * values.size()});
  }
  // So many bytes, none like its neighbours.
  static std::string codes(std::uint64_t count, unsigned least = 0, unsigned most = 255) {
    std::string bytes(count, '\0');
    for (std::uint64_t i = 0; i < count; ++i)
      bytes[i] = static_cast<char>(least + (i * 2654435761U >> 7) % (most - least + 1));
    return bytes;
  }
  std::uint8_t byte(const std::string& name, std::uint64_t at) const {
    return static_cast<std::uint8_t>(data_.at(tensors_.at(name).offset + at));
  }
  float number(const std::string& name, std::uint64_t at) const {
    float value = 0;
    read(tensors_.at(name), 4 * at, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }

  std::shared_ptr<const PackedWeight> weight() const { return packed_weight("m.weight", "here", parts_); }
  void refused(std::initializer_list<std::string_view> words) const {
    expect_refusal(io::ErrorKind::input, words, [&] { weight(); });
  }
  // However it is cut, the weight has the values that `value` gives for each element.
  template <class Value>
  void expect_values(const Shape& shape, Value value) const {
    const auto packed = weight();
    ASSERT_NE(packed, nullptr);
    ASSERT_EQ(packed->shape(), shape);
    const std::uint64_t count = elements_of(shape);
    for (const std::uint64_t cut : {count, std::min<std::uint64_t>(count, 129), std::min<std::uint64_t>(count, 7)}) {
      std::vector<float> piece(cut);
      const std::uint64_t step = cut == count ? cut : std::max(cut, count / 50 | 1);
      for (std::uint64_t first = 0; first < count; first += step) {
        const auto out = std::span(piece).first(std::min(cut, count - first));
        packed->read(first, out);
        for (std::uint64_t i = 0; i < out.size(); ++i)
          ASSERT_EQ(out[i], value(first + i)) << first + i << " of a piece from " << first;
      }
    }
  }

  // Four bits of bitsandbytes, with double quantisation where the inner blocks have a size.
  void put_four_bits(const Shape& shape, std::uint64_t block, std::uint64_t nested = 0, const char* type = "nf4") {
    const std::uint64_t count = elements_of(shape), blocks = (count + block - 1) / block;
    put("m.weight", "U8", {static_cast<std::int64_t>((count + 1) / 2), 1}, codes((count + 1) / 2));
    std::vector<float> map(16), nested_map(256);
    for (std::size_t i = 0; i < 16; ++i) map[i] = static_cast<float>(i) - 7.5F;
    for (std::size_t i = 0; i < 256; ++i) nested_map[i] = static_cast<float>(i) / 4;
    put("m.weight.quant_map", {16}, map);
    std::string dimensions, state;
    for (const std::int64_t size : shape) dimensions += (dimensions.empty() ? "" : ",") + std::to_string(size);
    state = "{\"shape\":[" + dimensions + "],\"blocksize\":" + std::to_string(block);
    if (nested == 0) {
      std::vector<float> absmax(blocks);
      for (std::size_t i = 0; i < blocks; ++i) absmax[i] = static_cast<float>(i + 1) / 8;
      put("m.weight.absmax", {static_cast<std::int64_t>(blocks)}, absmax);
    } else {
      put("m.weight.absmax", "U8", {static_cast<std::int64_t>(blocks)}, codes(blocks));
      std::vector<float> outer((blocks + nested - 1) / nested);
      for (std::size_t i = 0; i < outer.size(); ++i) outer[i] = static_cast<float>(i + 1) / 2;
      put("m.weight.nested_absmax", {static_cast<std::int64_t>(outer.size())}, outer);
      put("m.weight.nested_quant_map", {256}, nested_map);
      state += ",\"nested_blocksize\":" + std::to_string(nested) + ",\"nested_offset\":0.75";
    }
    put_state(state + "}", type);
  }
  void put_state(const std::string& state, const std::string& type = "nf4") {
    put("m.weight.quant_state.bitsandbytes__" + type, "U8", {static_cast<std::int64_t>(state.size())}, state);
  }

  const RawTensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  void read(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) const {
    ASSERT_LE(offset + out.size(), tensor.bytes);
    std::memcpy(out.data(), data_.data() + tensor.offset + offset, out.size());
  }

  std::map<std::string, RawTensor> tensors_;
  std::string data_;
  const PackedParts parts_ = {
      .find = [this](const std::string& name) { return find(name); },
      .read = [this](const RawTensor& tensor, std::uint64_t offset,
                     std::span<std::byte> out) { read(tensor, offset, out); },
      .floats = [this](const std::string& name, std::uint64_t first,
                       std::span<float> out) { read(tensors_.at(name), 4 * first, std::as_writable_bytes(out)); }};
};

TEST_F(PackedWeights, FourBitsTakeTheirBlocksScale) {
  for (const char* type : {"nf4", "fp4"})
    for (const auto& [shape, block] : {std::pair{Shape{3, 7}, 8}, {Shape{700, 401}, 64}, {Shape{64}, 64}}) {
      tensors_.clear();
      put_four_bits(shape, static_cast<std::uint64_t>(block), 0, type);
      expect_values(shape, [&, block = static_cast<std::uint64_t>(block)](std::uint64_t at) {
        const unsigned code = at % 2 == 0 ? byte("m.weight", at / 2) >> 4 : byte("m.weight", at / 2) & 15;
        return number("m.weight.quant_map", code) * number("m.weight.absmax", at / block);
      });
      EXPECT_EQ(weight()->parts(),
                (std::vector<std::string>{"m.weight.absmax", "m.weight.quant_map",
                                          std::string("m.weight.quant_state.bitsandbytes__") + type}));
    }
}

TEST_F(PackedWeights, ScalesOfFourBitsMayBeQuantisedThemselves) {
  for (const auto& [shape, nested] : {std::pair{Shape{3, 7}, 2}, {Shape{700, 401}, 256}}) {
    tensors_.clear();
    put_four_bits(shape, 8, static_cast<std::uint64_t>(nested));
    expect_values(shape, [&, nested = static_cast<std::uint64_t>(nested)](std::uint64_t at) {
      const unsigned code = at % 2 == 0 ? byte("m.weight", at / 2) >> 4 : byte("m.weight", at / 2) & 15;
      const float scale = number("m.weight.nested_quant_map", byte("m.weight.absmax", at / 8)) *
                              number("m.weight.nested_absmax", at / 8 / nested) +
                          0.75F;
      return number("m.weight.quant_map", code) * scale;
    });
    EXPECT_EQ(weight()->parts().size(), 5u);
  }
}

TEST_F(PackedWeights, FourBitsOfKnownMapsAndBlocksAreThereAsTheyLie) {
  const Shape shape = {701, 401};  // neither blocks nor bytes end with it
  const auto put_known = [&](bool nested, std::uint64_t block = 64, std::uint64_t nested_block = 256) {
    tensors_.clear();
    put_four_bits(shape, block, nested ? nested_block : 0);
    put("m.weight.quant_map", {16}, {std::begin(weights::kNf4.at), std::end(weights::kNf4.at)});
    if (nested)
      put("m.weight.nested_quant_map", {256}, {std::begin(weights::kDynamic.at), std::end(weights::kDynamic.at)});
  };
  const std::uint64_t elements = elements_of(shape), blocks = (elements + 63) / 64;
  for (const bool nested : {false, true}) {
    put_known(nested);
    const WeightFormat format = nested ? WeightFormat::nf4_double : WeightFormat::nf4;
    for (const WeightFormat other : {WeightFormat::bf16, WeightFormat::int8, WeightFormat::nf4,
                                     WeightFormat::nf4_double, WeightFormat::fp8, WeightFormat::mxfp4})
      EXPECT_EQ(weight()->has(other), other == format);
    const std::vector<std::byte> stored = weight()->read_unconverted(0, elements);
    const WeightLayout at = weight_layout(format, shape);
    ASSERT_EQ(stored.size(), at.bytes);
    const auto lies = [&](std::uint64_t begin, const std::string& part, std::uint64_t bytes) {
      const std::byte* there = reinterpret_cast<const std::byte*>(data_.data()) + tensors_.at(part).offset;
      EXPECT_TRUE(std::equal(there, there + bytes, stored.begin() + static_cast<std::ptrdiff_t>(begin))) << part;
    };
    lies(0, "m.weight", (elements + 1) / 2);
    lies(at.scales, "m.weight.absmax", nested ? blocks : 4 * blocks);
    if (nested) {
      lies(at.nested, "m.weight.nested_absmax", 4 * ((blocks + 255) / 256));
      float offset = 0;
      std::memcpy(&offset, stored.data() + at.offset, sizeof(offset));
      EXPECT_EQ(offset, 0.75F);
    }
    std::vector<float> values(elements);
    std::vector<std::uint16_t> words(elements);
    weight()->read(0, values);
    dequantise(format, shape, stored, 0, words);
    for (std::size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], weights::rounded(values[i])) << i;
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"},
                   [&] { weight()->read_unconverted(64, elements - 64); });
  }
  // Others are values, of which a format is made.
  const auto is_neither = [&] {
    EXPECT_FALSE(weight()->has(WeightFormat::nf4) || weight()->has(WeightFormat::nf4_double));
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"},
                   [&] { weight()->read_unconverted(0, elements); });
  };
  for (const bool nested : {false, true}) {
    put_known(nested, 128);
    is_neither();
    put_known(nested);
    put("m.weight.quant_map", {16}, std::vector<float>(16, 0.5F));
    is_neither();
  }
  put_known(true);
  put("m.weight.nested_quant_map", {256}, std::vector<float>(256, 0.5F));
  is_neither();
  put_known(true, 64, 128);
  is_neither();
}

TEST_F(PackedWeights, PartsOfFourBitsThatDoNotFitAreNamed) {
  const auto refused_with = [&](const std::function<void()>& change, std::initializer_list<std::string_view> words) {
    tensors_.clear();
    put_four_bits({3, 7}, 8, 2);
    change();
    expect_refusal(io::ErrorKind::input, words, [&] { weight(); });
  };
  const auto state = [&](const std::string& text, std::initializer_list<std::string_view> words) {
    refused_with([&] { put_state(text); }, words);
  };
  state("{", {"here", "quant_state.bitsandbytes__nf4", "JSON"});
  state("[]", {"the quantised weight m.weight does not give its shape"});
  state("{}", {"does not give its shape"});
  state(R"({"shape":7})", {"does not give its shape"});
  state(R"({"shape":[3,-7]})", {"does not give its shape"});
  state(R"({"shape":[3,7.5]})", {"does not give its shape"});
  state(R"({"shape":[3,7],"blocksize":0})", {"blocksize is 0", "between 1"});
  state(R"({"shape":[3,7],"blocksize":8,"nested_blocksize":0})", {"nested_blocksize is 0"});
  state(R"({"shape":[3,8]})", {"has 11 bytes of codes for 24 elements"});
  state(R"({"shape":[4294967296,4294967296]})", {"bytes of codes"});
  state("{\"shape\":[3,7],\"x\":\"" + std::string(1 << 16, 'x') + "\"}", {"a description that is too long"});
  refused_with([&] { tensors_.erase("m.weight.quant_map"); }, {"lacks its part m.weight.quant_map"});
  refused_with([&] { put("m.weight.quant_map", {15}, std::vector<float>(15)); },
               {"a part m.weight.quant_map of 15 elements, not 16"});
  refused_with([&] { put("m.weight.quant_map", "I32", {16}, std::string(64, 'x')); },
               {"a part m.weight.quant_map of type I32"});
  refused_with([&] { tensors_.erase("m.weight.absmax"); }, {"lacks its part m.weight.absmax"});
  refused_with([&] { put("m.weight.absmax", "U8", {4}, "abcd"); }, {"m.weight.absmax of 4 elements, not 3"});
  refused_with([&] { put("m.weight.absmax", {3}, {1, 2, 3}); }, {"has scales of type F32, not U8"});
  refused_with([&] { put("m.weight.nested_absmax", {3}, {1, 2, 3}); }, {"nested_absmax of 3 elements, not 2"});
  refused_with([&] { tensors_.erase("m.weight.nested_quant_map"); }, {"lacks its part m.weight.nested_quant_map"});
  refused_with([&] { tensors_.erase("m.weight.nested_absmax"); }, {"a part m.weight.absmax of type U8"});
  refused_with([&] { put("m.weight.nested_quant_map", {255}, std::vector<float>(255)); },
               {"nested_quant_map of 255 elements, not 256"});
}

TEST_F(PackedWeights, EightBitsTakeTheirRowsScale) {
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

TEST_F(PackedWeights, TilesOfFp8HaveTheirScale) {
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
  const std::vector<std::byte> stored = weight()->read_unconverted(0, elements_of(shape));
  ASSERT_EQ(stored.size(), stored_bytes(WeightFormat::fp8, shape));
  std::vector<float> values(elements_of(shape));
  std::vector<std::uint16_t> words(values.size());
  weight()->read(0, values);
  dequantise(WeightFormat::fp8, shape, stored, 0, words);
  for (std::size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], weights::rounded_away(values[i])) << i;
  for (const auto& [first, count] : {std::pair{0, 1300}, {1300, 258 * 1300}})
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"}, [&, first = first, count = count] {
      weight()->read_unconverted(static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(count));
    });
  put("m.weight_scale_inv", {3, 10}, std::vector<float>(30));
  refused({"m.weight_scale_inv of 30 elements, not 33"});
  put("m.weight_scale_inv", "U8", {3, 11}, std::string(33, 'x'));
  refused({"m.weight_scale_inv of type U8"});
}

// One a row, whatever its shape, one for all, or one a tile.
TEST_F(PackedWeights, ScalesOfCompressedTensorsAreAsTheyAreShaped) {
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
      EXPECT_FALSE(weight()->has(WeightFormat::fp8));
    }
    for (const Shape& one : {Shape{}, Shape{1}, Shape{1, 1}}) {
      put("m.weight_scale", one, {0.375F});
      expect_values(shape, [&](std::uint64_t at) { return code(at) * 0.375F; });
      EXPECT_FALSE(weight()->has(WeightFormat::fp8));
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
  }
}

TEST_F(PackedWeights, ALongNameIsCutInWhatIsSaid) {
  tensors_["m.weight"] = {};
  const std::string name(5000, 'n');
  put(name, "F8_E4M3", {4}, "abcd");
  put(name + "_scale_inv", {1}, {1.0F});
  try {
    packed_weight(name, "here", parts_);
    FAIL();
  } catch (const Exception& refused) {
    EXPECT_LT(std::string(refused.what()).size(), 400U);
  }
}

// A row that is one tile wide has one scale whichever they are, and can stay as it lies.
TEST_F(PackedWeights, OneTileIsATile) {
  put("m.weight", "F8_E4M3", {1, 100}, codes(100, 0, 126));
  for (const char* scales : {"m.weight_scale_inv", "m.weight_scale"}) {
    put(scales, {1, 1}, {0.5F});
    EXPECT_TRUE(weight()->has(WeightFormat::fp8)) << scales;
    tensors_.erase(scales);
  }
}

TEST_F(PackedWeights, ExpertsInMxfp4AreTurned) {
  constexpr std::int64_t kExperts = 3, kOut = 10, kBlocks = 2, kIn = 32 * kBlocks;
  put("m.weight_blocks", "U8", {kExperts, kOut, kBlocks, 16}, codes(kExperts * kOut * kIn / 2));
  refused({"lacks its part m.weight_scales"});
  put("m.weight_scales", "U8", {kExperts, kOut, kBlocks}, codes(kExperts * kOut * kBlocks, 100, 140));
  const Shape shape = {kExperts, kIn, kOut};
  expect_values(shape, [&](std::uint64_t at) {
    const std::uint64_t column = at % kOut, row = at / kOut % kIn, of = at / kOut / kIn * kOut + column;
    const std::uint8_t both = byte("m.weight_blocks", (of * kIn + row) / 2);
    return weights::e2m1(row % 2 == 0 ? both : both >> 4) *
           weights::e8m0(byte("m.weight_scales", of * kBlocks + row / 32));
  });
  ASSERT_TRUE(weight()->has(WeightFormat::mxfp4));
  std::vector<float> values(elements_of(shape));
  weight()->read(0, values);
  constexpr std::uint64_t kOfOne = kIn * kOut;
  for (const auto& [first, experts] : {std::pair{0, 3}, {0, 1}, {1, 2}, {2, 1}}) {
    const std::uint64_t begin = static_cast<std::uint64_t>(first) * kOfOne;
    const std::vector<std::byte> stored =
        weight()->read_unconverted(begin, static_cast<std::uint64_t>(experts) * kOfOne);
    std::vector<std::uint16_t> words(static_cast<std::uint64_t>(experts) * kOfOne);
    dequantise(WeightFormat::mxfp4, {experts * kIn, kOut}, stored, 0, words);
    for (std::size_t i = 0; i < words.size(); ++i)
      ASSERT_EQ(words[i], weights::rounded(values[begin + i])) << i << " from expert " << first;
  }
  for (const auto& [first, count] :
       {std::pair<std::uint64_t, std::uint64_t>{1, kOfOne}, {0, kOfOne - 1}, {0, 0}, {kOfOne, 3 * kOfOne}})
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"},
                   [&, first = first, count = count] { weight()->read_unconverted(first, count); });
  put("m.weight_scales", "I8", {kExperts, kOut, kBlocks}, std::string(kExperts * kOut * kBlocks, 'x'));
  refused({"has scales of type I8, not U8"});
  put("m.weight_scales", "U8", {kExperts, kOut}, std::string(kExperts * kOut, 'x'));
  refused({"m.weight_scales of 30 elements, not 60"});
  put("m.weight_blocks", "U8", {kExperts, kOut, kBlocks, 8}, std::string(kExperts * kOut * kBlocks * 8, 'x'));
  refused({"blocks that are not [experts, out, in / 32, 16]"});
  put("m.weight_blocks", "I8", {kExperts, kOut, kBlocks, 16}, codes(kExperts * kOut * kIn / 2));
  EXPECT_EQ(weight(), nullptr);
  EXPECT_EQ(packed_name("m.weight_blocks"), "m.weight");
  EXPECT_EQ(packed_name("m.weight"), "m.weight");
}

}  // namespace
}  // namespace tierflow
