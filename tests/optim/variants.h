#pragma once
// Every combination of rule and formats, and twenty steps of each by two implementations.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/optim/fixture.h"

namespace tierflow::optim {

struct Variant {
  Rule rule;
  MomentFormat m, v;
  MasterFormat master;
};

inline std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (Rule rule : {Rule::adamw, Rule::adam, Rule::lion, Rule::sgd})
    for (MomentFormat format : {MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16})
      for (MasterFormat master : {MasterFormat::split, MasterFormat::bf16_sr})
        all.push_back({rule, format, format, master});
  all.push_back({Rule::adamw, MomentFormat::block8, MomentFormat::f32, MasterFormat::split});
  return all;
}

inline std::string variant_name(const testing::TestParamInfo<Variant>& info) {
  const char* rules[] = {"", "adamw", "adam", "lion", "sgd"};
  const char* formats[] = {"", "block8", "f32", "bf16"};
  const Variant& x = info.param;
  return std::string(rules[static_cast<int>(x.rule)]) + "_" + formats[static_cast<int>(x.m)] + "_" +
         formats[static_cast<int>(x.v)] + "_" + (x.master == MasterFormat::split ? "split" : "sr");
}

inline StateArrays arrays(const Variant& variant, std::size_t n) {
  StateArrays s(variant.master, variant.m, n);
  s.v = MomentArray(variant.v, n, false);
  fill(s, n, 21);
  return s;
}

// An update of n elements, as adamw_update.
using UpdateCall = std::function<UpdateResult(const AdamWParams& params, const std::uint16_t* gradient,
                                              const State& from, const State& to, std::size_t n)>;

// Twenty steps from trained-looking states, in place and not: gradients with outliers, zeros, subnormal numbers, and
// now and then one that is not finite. The arrays are compared whole, beyond their n elements too.
inline void expect_same_bits(const Variant& variant, std::size_t n, const UpdateCall& reference,
                             const UpdateCall& tested, bool skip_call_if_not_finite = false) {
  StateArrays expected = arrays(variant, n), got = arrays(variant, n), other = arrays(variant, n);
  for (int step = 1; step <= 20; ++step) {
    auto g = gradients(n, 100 + step, step % 5 == 0 ? 1e-12F : 1e-3F);
    const auto set = [&](std::size_t i, std::uint16_t bits) {
      if (i < n) g[i] = bits;
    };
    if (step % (skip_call_if_not_finite ? 5 : 2) == 1) set(5, 0x7f00);  // about 1.7e38: out of bounds, to be copied
    set(3 * kBlock + 1, 0x0003);                                        // subnormal
    set(4 * kBlock + 1, 0x5000);  // an outlier that pushes all other codes to zero
    if (step % 4 == 0) set(9 * kBlock + step, step % 8 == 0 ? 0x7f80 : 0xffc1);
    if (step % 6 == 0) set(36 * kBlock + 200, 0x7fc0);  // in the last whole block
    for (std::size_t i = 12 * kBlock; i < 15 * kBlock; ++i) set(i, 0);
    AdamWParams a;
    a.rule = variant.rule;
    a.lr = 1e-2F;
    a.weight_decay = 0.01F;
    a.step = step;
    a.gradient_scale = step % 3 == 0 ? -0.37F : 1.0F;
    a.rounding_key = 1234567;
    a.first_element = (1ULL << 32) - 5 * kBlock;  // the counter's upper half changes inside the call
    a.skip_call_if_not_finite = skip_call_if_not_finite;
    const State e = expected.view(), s = got.view(), t = other.view();
    const UpdateResult x = reference(a, g.data(), e, e, n);
    const bool in_place = step % 2 == 0;
    const UpdateResult y = tested(a, g.data(), s, in_place ? s : t, n);
    if (!in_place) {
      if (variant.rule == Rule::lion || variant.rule == Rule::sgd) other.v = got.v;
      std::swap(got, other);
    }
    ASSERT_EQ(x.skipped, y.skipped) << "step " << step;
    ASSERT_EQ(x.updated, y.updated) << "step " << step;
    const bool same = expected == got;
    ASSERT_TRUE(same) << "step " << step << " of " << n;
  }
}

// Of both moments, in whole blocks and in the rest: a largest number of 2^-96 is kept, and half of it is zeros.
inline void expect_blocks_to_end_below_the_smallest_absmax(const UpdateCall& tested) {
  const std::size_t n = kBlock + 8;
  for (const bool ends : {false, true}) {
    StateArrays s(MasterFormat::split, MomentFormat::block8, n);
    const StateArrays zeros = s;
    std::vector<float> moment(n, 0.0F);
    moment[3] = moment[kBlock + 1] = ends ? 0x1p-96F : 0x1p-95F;
    encode_moment(moment.data(), s.m.view(), n, true);
    encode_moment(moment.data(), s.v.view(), n, false);
    const Array<std::uint16_t> g(n, 0);
    tested({.beta1 = 0.5F, .beta2 = 0.5F}, g.data(), s.view(), s.view(), n);
    for (const MomentArray* found : {&s.m, &s.v})
      for (const int block : {0, 1}) EXPECT_EQ(found->absmax[block], ends ? 0.0F : 0x1p-96F) << block;
    EXPECT_EQ(s.m == zeros.m, ends);
    EXPECT_EQ(s.v == zeros.v, ends);
  }
}

}  // namespace tierflow::optim
