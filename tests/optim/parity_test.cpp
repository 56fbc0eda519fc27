// Every instruction set gives the bits of the scalar kernels.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>

#include "optim/kernels.h"
#include "tests/optim/variants.h"

namespace tierflow::optim {
namespace {

class Parity : public testing::TestWithParam<Variant> {};

TEST_P(Parity, SameBitsAsScalar) {
  const Kernels& scalar = all_kernels().back();
  const auto with = [](const Kernels& kernels) -> UpdateCall {
    return [&kernels](const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                      std::size_t n) { return update_with(kernels, params, gradient, from, to, n); };
  };
  for (const Kernels& set : all_kernels().first(all_kernels().size() - 1)) {
    SCOPED_TRACE(set.name);
    expect_same_bits(GetParam(), 37 * kBlock + 19, with(scalar), with(set));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Parity, testing::ValuesIn(variants()), variant_name);

TEST(KernelSets, AreThoseOfThisProcessorBestFirst) {
  std::vector<std::string> names;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512) names.emplace_back("AVX3");
  if (avx2) names.emplace_back("AVX2");
#else
  for (const Kernels& set : all_kernels().first(all_kernels().size() - 1)) names.emplace_back(set.name);
#endif
  names.emplace_back("SCALAR");
  std::vector<std::string> found;
  for (const Kernels& set : all_kernels()) {
    found.emplace_back(set.name);
    for (const Kernels& other : all_kernels())
      EXPECT_EQ(set.update_blocks == other.update_blocks, &set == &other) << set.name << " and " << other.name;
  }
  EXPECT_EQ(found, names);
  EXPECT_EQ(&kernels(), &all_kernels().front());
}

TEST(ParityOfBlocks, EndBelowTheSmallestAbsmax) {
  for (const Kernels& set : all_kernels()) {
    SCOPED_TRACE(set.name);
    expect_blocks_to_end_below_the_smallest_absmax(
        [&](const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
            std::size_t n) { return update_with(set, params, gradient, from, to, n); });
  }
}

// Rounded as the upper half of a master, this NaN would be a zero.
TEST(ParityOfBlocks, KeepEveryNanOfAMomentInBf16) {
  const std::size_t n = kBlock + 8;  // in vectors, and in the rest
  const std::vector<float> nan(n, float_of(0x7fffffffU));
  std::vector<float> found(n);
  for (const Kernels& set : all_kernels()) {
    StateArrays s(MasterFormat::split, MomentFormat::bf16, n);
    split_master(nan.data(), s.hi.data(), s.lo.data(), n);
    const Array<std::uint16_t> g(n, 0);
    update_with(set, {.weight_decay = 0.1F, .rule = Rule::adam}, g.data(), s.view(), s.view(), n);
    decode_moment(s.m.view(), found.data(), n, true);
    for (std::size_t i = 0; i < n; ++i) ASSERT_TRUE(std::isnan(found[i])) << set.name << " " << i;
  }
  MomentArray encoded(MomentFormat::bf16, n, true);
  encode_moment(nan.data(), encoded.view(), n, true);
  decode_moment(encoded.view(), found.data(), n, true);
  for (std::size_t i = 0; i < n; ++i) ASSERT_TRUE(std::isnan(found[i])) << i;
}

// The largest gradient that there is can be scaled into bounds, and no zero is within bounds of a scale without any.
TEST(ParityOfBlocks, AreUpdatedUnderEveryScaleThatBringsThemIntoBounds) {
  const std::size_t n = kBlock + 8;
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels& set : all_kernels())
    for (const auto& [gradient, scale, updated] : {std::tuple{0x7f7f, 0x1p-69F, true},
                                                   {0xff7f, 0x1p-67F, false},
                                                   {0x7f80, 0.0F, false},
                                                   {0x0000, 0.0F, true},
                                                   {0x0000, infinity, false},
                                                   {0x8000, nan, false}}) {
      StateArrays s(MasterFormat::split, MomentFormat::block8, n);
      const Array<std::uint16_t> g(n, static_cast<std::uint16_t>(gradient));
      AdamWParams a;
      a.gradient_scale = scale;
      EXPECT_EQ(update_with(set, a, g.data(), s.view(), s.view(), n).updated, updated ? n : 0)
          << set.name << " " << gradient << " " << scale;
    }
}

// The boundaries of the rule, by bisection of the scalar codec: edge[r] is the smallest x in [0, 1] with a rank of r.
template <bool Signed>
std::vector<std::uint32_t> boundaries() {
  std::vector<std::uint32_t> edges{0};
  for (int r = 1; r <= Cells<Signed>::kTop; ++r) {
    std::uint32_t low = edges.back(), high = 0x3f800001U;
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      (rank_of<Signed>(float_of(middle)) >= r ? high : low) = middle;
    }
    edges.push_back(high);
  }
  return edges;
}

// Every float from 0 to 1 and the next, on both sides of zero for the signed map, in each vector kernel.
template <bool Signed>
void encode_all() {
  const auto edges = boundaries<Signed>();
  alignas(64) float x[kBlock];
  alignas(64) std::uint8_t codes[kBlock];
  for (const Kernels& set : all_kernels().first(all_kernels().size() - 1)) {
    std::size_t rank = 0;
    for (std::uint32_t base = 0; base < 0x3f800100U; base += kBlock) {
      for (std::uint32_t i = 0; i < kBlock; ++i) {
        const bool minus =
            Signed && (base >> 8 & 1) != 0;  // blocks alternate; next to every boundary both signs are tested below
        const std::uint32_t b = std::min(base + i, 0x3f800001U) | (minus ? 0x80000000U : 0);
        std::memcpy(&x[i], &b, 4);
      }
      set.encode_block(x, Signed, 1.0F, codes);
      const bool boundary = rank + 1 < edges.size() && edges[rank + 1] <= base + kBlock - 1;
      if (!boundary) {
        std::uint8_t expected = encoded<Signed>(x[0], 1.0F);
        for (std::uint32_t i = 0; i < kBlock; ++i) ASSERT_EQ(codes[i], expected) << set.name << " " << x[i];
        continue;
      }
      for (int sign = 0; sign < (Signed ? 2 : 1); ++sign) {
        for (float& value : x) value = sign == 0 ? std::fabs(value) : -std::fabs(value);
        set.encode_block(x, Signed, 1.0F, codes);
        for (std::uint32_t i = 0; i < kBlock; ++i)
          ASSERT_EQ(codes[i], encoded<Signed>(x[i], 1.0F)) << set.name << " " << x[i];
      }
      while (rank + 1 < edges.size() && edges[rank + 1] <= base + kBlock - 1) ++rank;
    }
    EXPECT_EQ(rank, edges.size() - 1);
  }
}

TEST(ParityOfCodes, EncodesEverySignedFloat) {
  encode_all<true>();
}
TEST(ParityOfCodes, EncodesEveryUnsignedFloat) {
  encode_all<false>();
}

TEST(ParityOfCodes, DecodesEveryCode) {
  alignas(64) float expected[kBlock], got[kBlock];
  std::uint8_t codes[kBlock];
  for (std::size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<std::uint8_t>(i * 37 + 11);
  for (const Kernels& set : all_kernels())
    for (bool is_signed : {false, true})
      for (float absmax : {0.0F, 1.0F, 0x1p-96F, 1.234e-5F, 6.7e30F, 0x1p-140F}) {
        decode_block_scalar(codes, is_signed, absmax, expected);
        set.decode_block(codes, is_signed, absmax, got);
        EXPECT_EQ(std::memcmp(expected, got, sizeof(got)), 0) << set.name << " " << absmax;
      }
}

TEST(ParityOfSums, SameBitsAsScalar) {
  const Kernels& scalar = all_kernels().back();
  for (const Kernels& set : all_kernels())
    for (std::size_t n : {kNormSegment, kNormSegment - 1, std::size_t{1}, std::size_t{47}, std::size_t{300}}) {
      auto g = gradients(n, 5, 7.0F);
      double x = 0, y = 0;
      EXPECT_EQ(scalar.sum_segment(g.data(), n, &x), set.sum_segment(g.data(), n, &y));
      EXPECT_EQ(x, y) << set.name;
      g[n / 2] = 0xff80;
      EXPECT_FALSE(set.sum_segment(g.data(), n, &y));
    }
}

}  // namespace
}  // namespace tierflow::optim
