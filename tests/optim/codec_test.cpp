// The dynamic code: the map from its rule in double, every boundary, and the properties that a state relies on.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

// The map by its definition: the middles of equal cells of [0.1, 1) in each decade, both signs or one, then 0 and 1,
// sorted.
std::vector<double> dynamic_map(bool is_signed) {
  std::vector<double> map{0.0, 1.0};
  for (int decade = 0; decade < 7; ++decade) {
    const int cells = (is_signed ? 1 : 2) << decade;
    for (int j = 0; j < cells; ++j) {
      const double value = std::pow(10.0, decade - 6) * (0.1 + 0.9 * (j + 0.5) / cells);
      map.push_back(value);
      if (is_signed) map.push_back(-value);
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

template <class Codec>
class DynamicCode : public testing::Test {};
using Codecs = testing::Types<std::true_type, std::false_type>;
TYPED_TEST_SUITE(DynamicCode, Codecs);

TYPED_TEST(DynamicCode, DecodesTheMap) {
  const auto map = dynamic_map(TypeParam::value);
  ASSERT_EQ(map.size(), 256U);
  for (int c = 0; c < 256; ++c)
    EXPECT_LE(ulps(decoded<TypeParam::value>(static_cast<std::uint8_t>(c), 1.0F), static_cast<float>(map[c])), 1) << c;
}

TYPED_TEST(DynamicCode, EveryValueEncodesToItself) {
  for (float absmax : {1.0F, 3e-5F, 7.123F, 0x1p-96F, 0x1p120F})
    for (int c = 0; c < 256; ++c) {
      const auto code = static_cast<std::uint8_t>(c);
      EXPECT_EQ(encoded<TypeParam::value>(decoded<TypeParam::value>(code, absmax), inverse_absmax(absmax)), code)
          << absmax;
    }
}

// Around each midpoint of two neighbours: one boundary, within 2^-15 of a cell or 4 ulp of the midpoint, the nearest
// code on each side.
TYPED_TEST(DynamicCode, BoundariesAreMidpoints) {
  const auto map = dynamic_map(TypeParam::value);
  for (int c = 0; c < 255; ++c) {
    const double middle = (map[c] + map[c + 1]) / 2;
    const auto centre = static_cast<float>(middle);
    const double slack = std::max((map[c + 1] - map[c]) * 0x1p-15, std::abs(middle) * 4 * 0x1p-23);
    float x = centre;
    for (int k = 0; k < 4000; ++k) x = std::nextafterf(x, -2.0F);
    int changes = 0, last = c;
    for (int k = 0; k < 8000; ++k, x = std::nextafterf(x, 2.0F)) {
      const int code = encoded<TypeParam::value>(x, 1.0F);
      if (x < middle - slack) {
        ASSERT_EQ(code, c) << x;
      }
      if (x > middle + slack) {
        ASSERT_EQ(code, c + 1) << x;
      }
      ASSERT_TRUE(code == c || code == c + 1);
      changes += code != last;
      last = code;
    }
    EXPECT_EQ(changes, 1) << c;
  }
}

// On the float nearest to a decade's edge the larger magnitude wins.
TYPED_TEST(DynamicCode, EdgesBelongAbove) {
  using C = Cells<TypeParam::value>;
  constexpr float edges[] = {C::edge(0), C::edge(1), C::edge(2), C::edge(3),
                             C::edge(4), C::edge(5), C::edge(6), C::edge(7)};
  for (float edge : edges)
    EXPECT_EQ(rank_of<TypeParam::value>(edge), rank_of<TypeParam::value>(std::nextafterf(edge, 0.0F)) + 1);
}

TEST(DynamicCodeSigned, HasNoMinusOneAndIsOdd) {
  EXPECT_EQ(encoded<true>(-1.0F, 1.0F), 0);
  EXPECT_EQ(encoded<true>(1.0F, 1.0F), 255);
  EXPECT_EQ(encoded<true>(0.0F, 1.0F), kZeroCodeSigned);
  EXPECT_EQ(encoded<true>(-0.0F, 1.0F), kZeroCodeSigned);
  for (int p = 0; p <= 127; ++p)
    EXPECT_EQ(decoded<true>(static_cast<std::uint8_t>(127 - p), 0.37F),
              -decoded<true>(static_cast<std::uint8_t>(127 + p), 0.37F));
}

TEST(Block, LargestElementIsExactAndZerosStayZero) {
  MomentArray m(MomentFormat::block8, 3 * kBlock, true);
  std::vector<float> in(3 * kBlock, 0.0F), out(3 * kBlock);
  in[10] = 0.123456F;
  in[kBlock + 3] = 0x1p-97F;  // below the smallest absmax: a block of zeros
  in[2 * kBlock] = -0.0F;
  encode_moment(in.data(), m.view(), in.size(), true);
  decode_moment(m.view(), out.data(), in.size(), true);
  EXPECT_EQ(out[10], in[10]);
  EXPECT_EQ(m.absmax[1], 0.0F);
  EXPECT_EQ(m.absmax[2], 0.0F);
  for (std::size_t i = 0; i < out.size(); ++i)
    if (i != 10) {
      EXPECT_EQ(out[i], 0.0F);
    }
}

}  // namespace
}  // namespace tierflow::optim
