// Each rule in double arithmetic beside the program's, the coefficients of a call, and the numbers that rounding draws.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "optim/kernels.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

struct Exact {
  double p, m, v, direction;  // `direction`: what Lion takes the sign of
};

Exact exact_step(const AdamWParams& a, double g, Exact e) {
  const double b1 = a.beta1, b2 = a.beta2, lr = a.lr, kept = 1 - lr * a.weight_decay;
  g *= a.gradient_scale;
  if (a.rule == Rule::adam || a.rule == Rule::sgd) g += a.weight_decay * e.p;
  if (a.rule == Rule::lion) {
    const double direction = b1 * e.m + (1 - b1) * g;
    const double sign = direction > 0 ? 1 : direction < 0 ? -1 : 0;
    return {kept * e.p - lr * sign, b2 * e.m + (1 - b2) * g, e.v, direction};
  }
  if (a.rule == Rule::sgd) {
    const double m = b1 * e.m + g;
    return {e.p - lr * m, m, e.v, m};
  }
  const double m = b1 * e.m + (1 - b1) * g, v = b2 * e.v + (1 - b2) * g * g;
  const double step = m / (1 - std::pow(b1, a.step)) / (std::sqrt(v / (1 - std::pow(b2, a.step))) + a.eps);
  return {(a.rule == Rule::adamw ? kept : 1) * e.p - lr * step, m, v, m};
}

class Rules : public testing::TestWithParam<Rule> {};

TEST_P(Rules, OneStepFollowsDoubleArithmetic) {
  const std::size_t n = 6 * kBlock + 41;
  StateArrays s(MasterFormat::split, MomentFormat::f32, n);
  fill(s, n, 31);
  std::vector<float> p(n), m(n), v(n), q(n), m2(n), v2(n);
  join_master(s.hi.data(), s.lo.data(), p.data(), n);
  decode_moment(s.m.view(), m.data(), n, true);
  decode_moment(s.v.view(), v.data(), n, false);
  const auto g = gradients(n, 32);
  AdamWParams a;
  a.rule = GetParam();
  a.lr = 2e-3F;
  a.beta1 = 0.8F;
  a.beta2 = 0.97F;
  a.eps = 1e-6F;
  a.weight_decay = 0.3F;
  a.step = 5;
  a.gradient_scale = -0.61F;
  EXPECT_EQ(adamw_update(a, g.data(), s.view(), n).updated, n);
  join_master(s.hi.data(), s.lo.data(), q.data(), n);
  decode_moment(s.m.view(), m2.data(), n, true);
  decode_moment(s.v.view(), v2.data(), n, false);
  std::size_t compared = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Exact e = exact_step(a, float_from_bf16(g[i]), {p[i], m[i], v[i], 0});
    const double pull = a.weight_decay * std::abs(p[i]);  // what Adam and SGD add to the gradient
    ASSERT_NEAR(m2[i], e.m, 3e-7 * (std::abs(m[i]) + std::abs(e.m) + pull)) << i;
    ASSERT_NEAR(v2[i], e.v, 1e-6 * (e.v + 0.03 * pull * pull)) << i;
    if (a.rule == Rule::lion && std::abs(e.direction) < 1e-6 * std::abs(m[i])) continue;  // either sign is right
    ASSERT_NEAR(q[i], e.p, 1e-6 * std::abs(e.p - p[i]) + 1.3e-7 * std::abs(p[i]) + 1e-9) << i;
    ++compared;
  }
  EXPECT_GT(compared, n - 10);
}

// What has neither gradient nor moment moves by its decay alone; Lion takes no step in no direction.
TEST_P(Rules, NothingMovesWithoutAReason) {
  StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock);
  fill(s, kBlock, 33);
  zero_moment(s.m.view(), kBlock, true);
  zero_moment(s.v.view(), kBlock, false);
  const StateArrays before = s;
  const Array<std::uint16_t> g(kBlock, 0);
  AdamWParams a;
  a.rule = GetParam();
  a.lr = 0.1F;
  adamw_update(a, g.data(), s.view(), kBlock);
  EXPECT_TRUE(s == before);
}

std::string rule_name(const testing::TestParamInfo<Rule>& info) {
  const char* names[] = {"", "adamw", "adam", "lion", "sgd"};
  return names[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Rules, testing::Values(Rule::adamw, Rule::adam, Rule::lion, Rule::sgd), rule_name);

TEST(CoefficientsOfACall, AreRoundedOnceFromDouble) {
  AdamWParams a;
  a.lr = 3e-4F;
  a.beta1 = 0.85F;
  a.beta2 = 0.995F;
  a.weight_decay = 0.2F;
  a.gradient_scale = 0.25F;
  for (const std::int64_t step : {1LL, 2LL, 3LL, 7LL, 64LL, 1000LL, 123457LL, 1LL << 33}) {
    a.step = step;
    const Coefficients k = coefficients_of(a, false);
    const long double correction1 = 1 - std::pow(static_cast<long double>(a.beta1), step);
    const long double correction2 = 1 - std::pow(static_cast<long double>(a.beta2), step);
    EXPECT_LE(ulps(k.step_size, static_cast<float>(a.lr / correction1)), 1) << step;
    EXPECT_LE(ulps(k.root_correction2, static_cast<float>(1 / std::sqrt(correction2))), 1) << step;
    EXPECT_EQ(k.scale, 0.25F);
    EXPECT_EQ(k.rest1, static_cast<float>(1 - double{a.beta1}));
    EXPECT_EQ(k.rest2, static_cast<float>(1 - double{a.beta2}));
    EXPECT_EQ(k.decay, static_cast<float>(1 - double{a.lr} * a.weight_decay));
    EXPECT_EQ(k.l2, 0.0F);
    EXPECT_EQ(k.bound, std::numeric_limits<float>::infinity());
  }
  a.eps = 0;
  EXPECT_EQ(coefficients_of(a, false).eps, 0x1p-100F);
  for (const Rule rule : {Rule::adam, Rule::sgd}) {
    a.rule = rule;
    EXPECT_EQ(coefficients_of(a, false).decay, 1.0F);
    EXPECT_EQ(coefficients_of(a, false).l2, a.weight_decay);
  }
  for (const Rule rule : {Rule::lion, Rule::sgd}) {
    a.rule = rule;
    EXPECT_EQ(coefficients_of(a, false).step_size, a.lr);
  }
}

TEST(CoefficientsOfACall, TheDecayIsRoundedOnce) {
  AdamWParams a;
  for (const Rule rule : {Rule::adamw, Rule::lion})
    for (int i = 1; i < 200; ++i) {
      a.rule = rule;
      a.lr = 1e-3F * static_cast<float>(i);
      a.weight_decay = 0.11F + 0.37F / static_cast<float>(i);
      EXPECT_EQ(coefficients_of(a, false).decay, static_cast<float>(1 - double{a.lr} * a.weight_decay)) << i;
    }
}

// The most that Adam's |m| / sqrt(v) can be: gradients that grow by b2/b1 a step come closest to it.
TEST(CoefficientsOfACall, TheBoundIsThatOfTheWorstGradients) {
  for (const auto& [beta1, beta2] : {std::pair{0.9F, 0.999F}, {0.8F, 0.95F}, {0.5F, 0.9F}}) {
    AdamWParams a;
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.step = 1 << 20;
    const double ratio = double{beta2} / beta1;
    double g = 1, m = 0, v = 0;
    for (int i = 0; i < 300; ++i, g *= ratio) {
      m = beta1 * m + (1 - double{beta1}) * g;
      v = beta2 * v + (1 - double{beta2}) * g * g;
    }
    const double worst = m / std::sqrt(v), bound = coefficients_of(a, true).bound;
    EXPECT_GE(bound, worst) << beta1;
    EXPECT_LE(bound, 1.002 * worst) << beta1;
    a.step = 3;  // the bound is for what the kernel divides: sqrt(v) with its correction
    EXPECT_NEAR(coefficients_of(a, true).bound, bound * std::sqrt(1 - std::pow(double{beta2}, 3)), 1e-5 * bound);
    a.update_bound = 0.5F;
    EXPECT_EQ(coefficients_of(a, true).bound, 0.5F);
  }
  AdamWParams diverges;
  diverges.beta1 = 0.99F;
  diverges.beta2 = 0.9F;
  EXPECT_EQ(coefficients_of(diverges, true).bound, std::numeric_limits<float>::infinity());
}

TEST(UpdateBound, IsThereWhereEitherMomentHasEightBits) {
  const auto bound = [](Rule rule, MomentFormat m, MomentFormat v) {
    StateArrays s(MasterFormat::split, m, kBlock);
    s.v = MomentArray(v, kBlock, false);
    const Array<std::uint16_t> g(kBlock, 0);
    AdamWParams a;
    a.rule = rule;
    return digested(a, g.data(), s.view(), s.view(), kBlock).k.bound;
  };
  using enum MomentFormat;
  for (const Rule rule : {Rule::adamw, Rule::adam}) {
    const float both = bound(rule, block8, block8);
    EXPECT_LT(both, 8.0F);
    EXPECT_EQ(bound(rule, block8, f32), both);
    EXPECT_EQ(bound(rule, f32, block8), both);
    EXPECT_EQ(bound(rule, bf16, f32), std::numeric_limits<float>::infinity());
  }
}

TEST(UpdateBound, HoldsBothSigns) {
  StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock);
  std::vector<float> m(kBlock, 1.0F), v(kBlock, 1e-6F), p(kBlock);
  for (std::size_t i = 0; i < kBlock; i += 2) m[i] = -1.0F;
  m[7] = 1e-9F;  // within the bound
  encode_moment(m.data(), s.m.view(), kBlock, true);
  encode_moment(v.data(), s.v.view(), kBlock, false);
  const Array<std::uint16_t> g(kBlock, 0);
  AdamWParams a;
  a.lr = 1e-2F;
  a.step = 1 << 20;
  a.update_bound = 2.0F;
  adamw_update(a, g.data(), s.view(), kBlock);
  join_master(s.hi.data(), s.lo.data(), p.data(), kBlock);
  for (std::size_t i = 0; i < kBlock; ++i) {
    if (i == 7)
      EXPECT_NEAR(p[i], -a.lr * 0.9 * 1e-9 / std::sqrt(0.999e-6), 1e-13);
    else
      EXPECT_EQ(p[i], i % 2 == 0 ? 0.02F : -0.02F) << i;
  }
}

// The generator is part of what a state means: resumed runs draw the same numbers.
TEST(Rounding, DrawsWhatItAlwaysDrew) {
  struct {
    std::uint64_t key, step, element;
    std::uint32_t bits;
  } const known[] = {
      {0, 1, 0, 0xfbfc},
      {1234567, 1, 0, 0xd0d1},
      {1234567, 1, 1, 0xc83f},
      {1234567, 2, 1, 0x5208},
      {1234567, 1, (1ULL << 32) + 1, 0x9941},
      {~0ULL, 1000, (5ULL << 40) + 77, 0x31fa},
  };
  for (const auto& [key, step, element, bits] : known)
    EXPECT_EQ(rounding_bits(rounding_key(key, step, element), static_cast<std::uint32_t>(element)), bits) << element;
}

TEST(Rounding, AnUpdateDrawsForItsKeyItsStepAndItsElements) {
  const std::size_t n = kBlock + 3;  // in vectors, and in the rest
  const Array<std::uint16_t> g(n, 0x3f80);
  AdamWParams a;
  a.rule = Rule::sgd;
  a.lr = 0x1.8p-10F;
  for (const std::uint64_t key : {std::uint64_t{0}, std::uint64_t{1234567}, ~std::uint64_t{0}})
    for (const std::int64_t step : {1, 2, 1000})
      for (const std::uint64_t first : {std::uint64_t{0}, 7 * kBlock, (std::uint64_t{5} << 32) + kBlock}) {
        a.rounding_key = key;
        a.step = step;
        a.first_element = first;
        StateArrays s(MasterFormat::bf16_sr, MomentFormat::f32, n);
        std::fill_n(s.hi.begin(), n, 0x3f80);
        adamw_update(a, g.data(), s.view(), n);
        const RoundingKey drawn = rounding_key(key, static_cast<std::uint64_t>(step), first);
        for (std::size_t i = 0; i < n; ++i)
          ASSERT_EQ(s.hi[i],
                    stochastically_narrowed(1 - a.lr, rounding_bits(drawn, static_cast<std::uint32_t>(first + i))))
              << key << " " << step << " " << first + i;
      }
}

TEST(Rounding, TakesTheNeighbourAboveAsOftenAsTheRestSays) {
  EXPECT_EQ(stochastically_narrowed(float_of(0x3f800001U), 0xffff), 0x3f81);  // 1 of 65536 goes up
  EXPECT_EQ(stochastically_narrowed(float_of(0x3f800001U), 0xfffe), 0x3f80);
  EXPECT_EQ(stochastically_narrowed(float_of(0x3f80ffffU), 0), 0x3f80);
  EXPECT_EQ(stochastically_narrowed(float_of(0x3f80ffffU), 1), 0x3f81);
  EXPECT_EQ(stochastically_narrowed(float_of(0xbf808000U), 0x8000), 0xbf81);  // away from zero, the sign kept
  EXPECT_EQ(stochastically_narrowed(1.0F, 0xffff), 0x3f80);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(stochastically_narrowed(infinity, 0xffff), 0x7f80);
  EXPECT_EQ(stochastically_narrowed(-infinity, 0xffff), 0xff80);
  EXPECT_TRUE(std::isnan(float_from_bf16(stochastically_narrowed(float_of(0x7f800001U), 0))));
  EXPECT_EQ(bf16_from_float(float_of(0xff800001U)), 0xffc0);  // quiet, the sign kept
}

}  // namespace
}  // namespace tierflow::optim
