// A model's units as a store keeps them where no config.json describes the model.
#include "runtime/spec/unit_list.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

TEST(UnitList, IsReadBack) {
  std::vector<UnitSpec> units(2);
  units[0].name = "embedding";
  units[1].name = "layer";
  for (const WeightFormat format : {WeightFormat::nf4, WeightFormat::bf16, WeightFormat::fp32}) {
    TensorSpec tensor{.name = std::string(weight_format_name(format)), .shape = {4, 64}};
    tensor.format = format;
    tensor.trainable = format == WeightFormat::bf16;
    tensor.moments_32 = format == WeightFormat::fp32;
    units[1].tensors.push_back(tensor);
  }
  const std::vector<UnitSpec> read = parse_unit_list(unit_list(units), "there");
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[0].name, "embedding");
  EXPECT_TRUE(read[0].tensors.empty());
  EXPECT_EQ(read[1].name, "layer");
  ASSERT_EQ(read[1].tensors.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    const TensorSpec &got = read[1].tensors[i], &kept = units[1].tensors[i];
    EXPECT_EQ(got.name, kept.name);
    EXPECT_EQ(got.shape, kept.shape);
    EXPECT_EQ(got.format, kept.format);
    EXPECT_EQ(got.trainable, kept.trainable);
    EXPECT_EQ(got.moments_32, kept.moments_32);
  }
}

TEST(UnitList, OtherJsonIsRefused) {
  for (const char* text : {R"([["a"]])", R"([[1, []]])", R"([["a", [["t", [2], "bf17", true, false]]]])",
                           R"([["a", [["t", [2], "bf16", 1, false]]]])", "7"}) {
    SCOPED_TRACE(text);
    testing::expect_refusal(io::ErrorKind::corruption, {"there", "does not say which model it holds"},
                            [&] { parse_unit_list(nlohmann::json::parse(text), "there"); });
  }
}

}  // namespace
}  // namespace tierflow
