#include <gtest/gtest.h>

#include <limits>

#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

// Every 2^32 pattern, a 2^20 window at a time.
TEST(Master, EveryPatternComesBack) {
  constexpr std::size_t kWindow = 1 << 20;
  std::vector<float> in(kWindow), out(kWindow);
  std::vector<std::uint16_t> hi(kWindow), lo(kWindow);
  for (std::uint64_t base = 0; base < (1ULL << 32); base += kWindow) {
    for (std::size_t i = 0; i < kWindow; ++i) {
      const auto bits = static_cast<std::uint32_t>(base + i);
      std::memcpy(&in[i], &bits, 4);
    }
    split_master(in.data(), hi.data(), lo.data(), kWindow);
    join_master(hi.data(), lo.data(), out.data(), kWindow);
    ASSERT_EQ(std::memcmp(in.data(), out.data(), 4 * kWindow), 0) << base;
  }
}

TEST(Master, HiIsTheNearestBf16) {
  const auto hi = [](float x) {
    std::uint16_t h, l;
    split_master(&x, &h, &l, 1);
    return h;
  };
  EXPECT_EQ(hi(1.0F), 0x3f80);
  EXPECT_EQ(hi(float_of(0x3f808000)), 0x3f81);  // a tie goes up, where nearest-even would stay
  EXPECT_EQ(hi(float_of(0x3f807fff)), 0x3f80);
  EXPECT_EQ(hi(std::numeric_limits<float>::max()), 0x7f80);  // beyond the largest bf16: infinity
  EXPECT_EQ(hi(-0.0F), 0x8000);
  EXPECT_TRUE(std::isnan(float_from_bf16(hi(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Bf16, NanStaysNanAndAllPatternsComeBack) {
  for (std::uint32_t bits : {0x7f800001U, 0x7fffffffU, 0xffffffffU, 0x7fc00000U, 0xff80ffffU})
    EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(float_of(bits)))));
  for (std::uint32_t b = 0; b < 65536; ++b) {
    const float value = float_from_bf16(static_cast<std::uint16_t>(b));
    if (!std::isnan(value)) {
      EXPECT_EQ(bf16_from_float(value), b);
    }
  }
}

TEST(GradientNorm, SumsSegmentsAndSeesNonFinite) {
  const std::size_t n = 2 * kNormSegment + 777;
  auto g = gradients(n, 3);
  double sums[3];
  ASSERT_TRUE(gradient_norm_squared(g.data(), n, sums));
  for (int s = 0; s < 3; ++s) {
    long double expected = 0;
    for (std::size_t i = s * kNormSegment; i < std::min(n, (s + 1) * kNormSegment); ++i) {
      const long double x = float_from_bf16(g[i]);
      expected += x * x;
    }
    EXPECT_NEAR(sums[s], static_cast<double>(expected), 1e-13 * static_cast<double>(expected));
  }
  for (std::uint16_t bad : {0x7f80, 0xff80, 0x7fc0, 0xff81})
    for (std::size_t at : {std::size_t{0}, kNormSegment + 13, n - 1}) {
      auto copy = g;
      copy[at] = bad;
      EXPECT_FALSE(gradient_norm_squared(copy.data(), n, sums));
    }
}

}  // namespace
}  // namespace tierflow::optim
