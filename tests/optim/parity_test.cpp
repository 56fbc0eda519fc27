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
