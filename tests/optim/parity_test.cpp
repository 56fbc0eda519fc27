// Every instruction set gives the bits of the scalar kernels.
#include <gtest/gtest.h>

#include "optim/kernels.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

struct Variant {
  Rule rule;
  MomentFormat m, v;
  MasterFormat master;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (Rule rule : {Rule::adamw, Rule::adam, Rule::lion, Rule::sgd})
    for (MomentFormat format : {MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16})
      for (MasterFormat master : {MasterFormat::split, MasterFormat::bf16_sr}) all.push_back({rule, format, format, master});
  all.push_back({Rule::adamw, MomentFormat::block8, MomentFormat::f32, MasterFormat::split});
  return all;
}

StateArrays arrays(const Variant& variant, std::size_t n) {
  StateArrays s(variant.master, variant.m, n);
  s.v = MomentArray(variant.v, n, false);
  fill(s, n, 21);
  return s;
}

class Parity : public testing::TestWithParam<Variant> {};

// Twenty steps from trained-looking states: gradients with outliers, zeros, subnormal numbers, and now and then one that is not finite.
TEST_P(Parity, SameBitsAsScalar) {
  const std::size_t n = 37 * kBlock + 19;
  const Kernels& scalar = all_kernels().back();
  for (const Kernels& set : all_kernels().first(all_kernels().size() - 1)) {
    StateArrays expected = arrays(GetParam(), n), got = arrays(GetParam(), n), other = arrays(GetParam(), n);
    for (int step = 1; step <= 20; ++step) {
      auto g = gradients(n, 100 + step, step % 5 == 0 ? 1e-12F : 1e-3F);
      g[5] = 0x7f00;                     // about 1.7e38: out of bounds
      g[3 * kBlock + 1] = 0x0003;        // subnormal
      g[4 * kBlock + 1] = 0x5000;        // an outlier that pushes all other codes to zero
      if (step % 4 == 0) g[9 * kBlock + step] = step % 8 == 0 ? 0x7f80 : 0xffc1;
      if (step % 6 == 0) g[36 * kBlock + 200] = 0x7fc0;  // in the last whole block
      for (std::size_t i = 12 * kBlock; i < 15 * kBlock; ++i) g[i] = 0;
      AdamWParams a;
      a.rule = GetParam().rule;
      a.lr = 1e-2F;
      a.weight_decay = 0.01F;
      a.step = step;
      a.gradient_scale = step % 3 == 0 ? -0.37F : 1.0F;
      a.rounding_key = 1234567;
      a.first_element = (1ULL << 32) - 5 * kBlock;  // the counter's upper half changes inside the call
      const State e = expected.view(), s = got.view(), t = other.view();
      const UpdateResult x = update_with(scalar, a, g.data(), e, e, n);
      const bool in_place = step % 2 == 0;
      const UpdateResult y = update_with(set, a, g.data(), s, in_place ? s : t, n);
      if (!in_place) {
        if (GetParam().rule == Rule::lion || GetParam().rule == Rule::sgd) other.v = got.v;
        std::swap(got, other);
      }
      ASSERT_EQ(x.skipped, y.skipped);
      ASSERT_EQ(x.updated, y.updated);
      const bool same = expected == got;
      ASSERT_TRUE(same) << set.name << " step " << step;
    }
  }
}

std::string name_of(const testing::TestParamInfo<Variant>& info) {
  const char* rules[] = {"", "adamw", "adam", "lion", "sgd"};
  const char* formats[] = {"", "block8", "f32", "bf16"};
  const Variant& x = info.param;
  return std::string(rules[static_cast<int>(x.rule)]) + "_" + formats[static_cast<int>(x.m)] + "_" + formats[static_cast<int>(x.v)] + "_" +
         (x.master == MasterFormat::split ? "split" : "sr");
}

INSTANTIATE_TEST_SUITE_P(All, Parity, testing::ValuesIn(variants()), name_of);

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
        const bool minus = Signed && (base >> 8 & 1) != 0;  // blocks alternate; next to every boundary both signs are tested below
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
        for (std::uint32_t i = 0; i < kBlock; ++i) ASSERT_EQ(codes[i], encoded<Signed>(x[i], 1.0F)) << set.name << " " << x[i];
      }
      while (rank + 1 < edges.size() && edges[rank + 1] <= base + kBlock - 1) ++rank;
    }
    EXPECT_EQ(rank, edges.size() - 1);
  }
}

TEST(ParityOfCodes, EncodesEverySignedFloat) { encode_all<true>(); }
TEST(ParityOfCodes, EncodesEveryUnsignedFloat) { encode_all<false>(); }

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
