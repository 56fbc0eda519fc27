// The values of quantised weights, from parts made here; and parts that make no weight.
#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "tests/runtime/checkpoint/packed_weights.h"

namespace tierflow::testing {
namespace {

class PackedWeights : public FolderOfOneWeight {
 protected:
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
    for (const WeightFormat other :
         {WeightFormat::bf16, WeightFormat::int8, WeightFormat::nf4, WeightFormat::nf4_double, WeightFormat::fp8,
          WeightFormat::fp8_rows, WeightFormat::mxfp4})
      EXPECT_EQ(weight()->has(other), other == format);
    const std::vector<std::byte> stored = weight()->read_unconverted(format, 0, elements);
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
                   [&] { weight()->read_unconverted(format, 64, elements - 64); });
  }
  // Others are values, of which a format is made.
  const auto is_neither = [&] {
    EXPECT_FALSE(weight()->has(WeightFormat::nf4) || weight()->has(WeightFormat::nf4_double));
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"},
                   [&] { weight()->read_unconverted(WeightFormat::nf4, 0, elements); });
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
        weight()->read_unconverted(WeightFormat::mxfp4, begin, static_cast<std::uint64_t>(experts) * kOfOne);
    std::vector<std::uint16_t> words(static_cast<std::uint64_t>(experts) * kOfOne);
    dequantise(WeightFormat::mxfp4, {experts * kIn, kOut}, stored, 0, words);
    for (std::size_t i = 0; i < words.size(); ++i)
      ASSERT_EQ(words[i], weights::rounded(values[begin + i])) << i << " from expert " << first;
  }
  for (const auto& [first, count] :
       {std::pair<std::uint64_t, std::uint64_t>{1, kOfOne}, {0, kOfOne - 1}, {0, 0}, {kOfOne, 3 * kOfOne}})
    expect_refusal(io::ErrorKind::internal, {"no weights that a folder has packed"}, [&, first = first, count = count] {
      weight()->read_unconverted(WeightFormat::mxfp4, first, count);
    });
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
}  // namespace tierflow::testing
