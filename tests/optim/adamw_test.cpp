// The update against double arithmetic, and its promises on edges.
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "optim/adamw_device.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

struct Reference {
  double p, m, v;
};

Reference exact_step(const AdamWParams& a, double g, Reference e) {
  g *= a.gradient_scale;
  const double b1 = a.beta1, b2 = a.beta2;
  e.m = b1 * e.m + (1 - b1) * g;
  e.v = b2 * e.v + (1 - b2) * g * g;
  const double m = e.m / (1 - std::pow(b1, a.step)), v = e.v / (1 - std::pow(b2, a.step));
  e.p = e.p * (1 - double{a.lr} * a.weight_decay) - a.lr * m / (std::sqrt(v) + a.eps);
  return e;
}

AdamWParams usual() {
  AdamWParams a;
  a.lr = 1e-3F;
  a.weight_decay = 0.1F;
  a.step = 7;
  a.gradient_scale = 0.73F;
  return a;
}

std::vector<float> master_of(StateArrays& s, std::size_t n) {
  std::vector<float> p(n);
  if (s.master == MasterFormat::split)
    join_master(s.hi.data(), s.lo.data(), p.data(), n);
  else
    for (std::size_t i = 0; i < n; ++i) p[i] = float_from_bf16(s.hi[i]);
  return p;
}

std::vector<float> moment_of(MomentArray& m, std::size_t n, bool is_signed) {
  std::vector<float> values(n);
  decode_moment(m.view(), values.data(), n, is_signed);
  return values;
}

class AdamW : public testing::TestWithParam<MomentFormat> {};

TEST_P(AdamW, OneStepFollowsDoubleArithmetic) {
  const std::size_t n = 20 * kBlock + 77;
  StateArrays s(MasterFormat::split, GetParam(), n);
  fill(s, n, 1);
  const auto g = gradients(n, 2);
  AdamWParams a = usual();
  a.update_bound = std::numeric_limits<float>::infinity();
  const auto p = master_of(s, n), m = moment_of(s.m, n, true), v = moment_of(s.v, n, false);
  const UpdateResult result = adamw_update(a, g.data(), s.view(), n);
  EXPECT_EQ(result.updated, n);
  EXPECT_EQ(result.skipped, 0U);
  const auto q = master_of(s, n), m2 = moment_of(s.m, n, true), v2 = moment_of(s.v, n, false);
  for (std::size_t i = 0; i < n; ++i) {
    const Reference e = exact_step(a, float_from_bf16(g[i]), {p[i], m[i], v[i]});
    const double step = std::abs(e.p - p[i]);
    ASSERT_NEAR(q[i], e.p, 6e-7 * step + 1.3e-7 * std::abs(p[i]) + 1e-12) << i;
    if (GetParam() == MomentFormat::f32) {
      ASSERT_NEAR(m2[i], e.m, 2e-7 * (std::abs(m[i]) + std::abs(e.m)));
      ASSERT_NEAR(v2[i], e.v, 4e-7 * e.v);
    } else if (GetParam() == MomentFormat::bf16) {
      ASSERT_NEAR(m2[i], e.m, std::abs(e.m) / 250 + 1e-40);
      ASSERT_NEAR(v2[i], e.v, e.v / 250 + 1e-40);
    }
  }
}

TEST_P(AdamW, CutsAtBlocksDoNotMatter) {
  for (MasterFormat master : {MasterFormat::split, MasterFormat::bf16_sr}) {
    const std::size_t n = 9 * kBlock + 131;
    StateArrays whole(master, GetParam(), n), cut(master, GetParam(), n);
    fill(whole, n, 1);
    fill(cut, n, 1);
    for (int step = 1; step <= 5; ++step) {
      const auto g = gradients(n, 10 + step);
      AdamWParams a = usual();
      a.step = step;
      a.rounding_key = 99;
      a.first_element = 512;
      adamw_update(a, g.data(), whole.view(), n);
      for (std::size_t first = 0, blocks = 1; first < n; first += blocks * kBlock, ++blocks) {
        a.first_element = 512 + first;
        adamw_update(a, g.data() + first, cut.view(first), std::min(n - first, blocks * kBlock));
      }
      ASSERT_TRUE(whole == cut) << step;
    }
  }
}

TEST_P(AdamW, BufferToBufferIsInPlace) {
  const std::size_t n = 5 * kBlock + 3;
  StateArrays s(MasterFormat::split, GetParam(), n), target(MasterFormat::split, GetParam(), n);
  fill(s, n, 4);
  const StateArrays before = s;
  auto g = gradients(n, 5);
  g[kBlock + 1] = 0x7fc0;
  adamw_update(usual(), g.data(), s.view(), target.view(), n);
  EXPECT_TRUE(s == before);
  adamw_update(usual(), g.data(), s.view(), n);
  EXPECT_TRUE(s == target);
}

TEST_P(AdamW, NonFiniteGradientsLeaveTheirBlockAlone) {
  const std::size_t n = 4 * kBlock;
  for (std::uint16_t bad : {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81, 0x7e00}) {
    StateArrays clean(MasterFormat::split, GetParam(), n), s(MasterFormat::split, GetParam(), n);
    fill(clean, n, 4);
    fill(s, n, 4);
    const StateArrays before = s;
    auto g = gradients(n, 5);
    AdamWParams a = usual();
    adamw_update(a, g.data(), clean.view(), n);
    g[2 * kBlock + 200] = bad;
    std::uint8_t finite[4];
    double squares[4];
    const UpdateResult result =
        adamw_update(a, g.data(), s.view(), s.view(), n, {.update_squares = squares, .finite = finite});
    EXPECT_EQ(result.skipped, kBlock);
    EXPECT_EQ(result.updated, n - kBlock);
    for (std::size_t i = 0; i < n; ++i) {
      const StateArrays& expected = i / kBlock == 2 ? before : clean;
      ASSERT_EQ(s.hi[i], expected.hi[i]);
      ASSERT_EQ(s.lo[i], expected.lo[i]);
      ASSERT_EQ(s.m.absmax[i / kBlock], expected.m.absmax[i / kBlock]);
    }
    for (int b = 0; b < 4; ++b) {
      EXPECT_EQ(finite[b], b != 2);
      EXPECT_EQ(squares[b] > 0, b != 2);
    }
    StateArrays skipped = before;
    a.skip_call_if_not_finite = true;
    EXPECT_EQ(adamw_update(a, g.data(), skipped.view(), n).skipped, n);
    EXPECT_TRUE(skipped == before);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, AdamW, testing::Values(MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16),
                         [](const auto& info) {
                           return info.param == MomentFormat::block8 ? "block8"
                                  : info.param == MomentFormat::f32  ? "f32"
                                                                     : "bf16";
                         });

TEST(AdamWEdges, EveryBf16Gradient) {
  const std::size_t n = 65536;
  StateArrays s(MasterFormat::split, MomentFormat::f32, n);
  Array<std::uint16_t> g(n);
  for (std::size_t i = 0; i < n; ++i) g[i] = static_cast<std::uint16_t>(i);
  AdamWParams a;
  a.lr = 1e-3F;
  const UpdateResult result = adamw_update(a, g.data(), s.view(), n);
  EXPECT_EQ(result.updated + result.skipped, n);
  const auto p = master_of(s, n), m = moment_of(s.m, n, true), v = moment_of(s.v, n, false);
  for (std::size_t i = 0; i < n; ++i) {
    const double x = float_from_bf16(g[i]);
    ASSERT_FALSE(std::isnan(p[i]) || std::isnan(m[i]) || std::isnan(v[i])) << i;
    if (p[i] == 0) continue;
    const Reference e = exact_step(a, x, {0, 0, 0});
    ASSERT_NEAR(p[i], e.p, 1e-6 * std::abs(e.p) + 1e-30) << x;
  }
}

TEST(AdamWEdges, ZeroGradientMovesByDecayAlone) {
  const std::size_t n = 2 * kBlock;
  StateArrays s(MasterFormat::split, MomentFormat::block8, n);
  fill(s, n, 3);
  zero_moment(s.m.view(), n, true);
  zero_moment(s.v.view(), n, false);
  const auto before = master_of(s, n);
  Array<std::uint16_t> g(n, 0x8000);
  AdamWParams a = usual();
  a.weight_decay = 0;
  StateArrays still = s;
  adamw_update(a, g.data(), still.view(), n);
  EXPECT_EQ(master_of(still, n), before);
  a.weight_decay = 0.5F;
  adamw_update(a, g.data(), s.view(), n);
  const auto after = master_of(s, n);
  for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(after[i], before[i] * static_cast<float>(1 - double{a.lr} * 0.5));
  EXPECT_EQ(s.m.absmax[0], 0.0F);
  EXPECT_EQ(s.v.absmax[1], 0.0F);
}

// v rounded to zero beside an m that is not: the step stays within what exact Adam can take.
TEST(AdamWEdges, VanishedVarianceIsBounded) {
  const std::size_t n = kBlock;
  StateArrays s(MasterFormat::split, MomentFormat::block8, n);
  std::vector<float> m(n, 1e-4F), v(n, 1e-12F);
  m[0] = 1e-2F;
  v[0] = 1.0F;  // all other v become code 0
  encode_moment(m.data(), s.m.view(), n, true);
  encode_moment(v.data(), s.v.view(), n, false);
  Array<std::uint16_t> g(n, 0);
  AdamWParams a;
  a.lr = 1e-3F;
  a.step = 1000;
  StateArrays free = s;
  adamw_update(a, g.data(), s.view(), n);
  const auto p = master_of(s, n);
  for (std::size_t i = 1; i < n; ++i)
    EXPECT_NEAR(p[i], -a.lr * 7.27 * std::sqrt(1 - std::pow(0.999, 1000)), a.lr * 0.1);
  a.update_bound = std::numeric_limits<float>::infinity();
  adamw_update(a, g.data(), free.view(), n);
  EXPECT_GT(std::abs(master_of(free, n)[1]), 1.0F);
}

TEST(AdamWEdges, StochasticRoundingHasTheRightMean) {
  const std::size_t n = 1 << 16;
  StateArrays s(MasterFormat::bf16_sr, MomentFormat::f32, n);
  for (std::size_t i = 0; i < n; ++i) s.hi[i] = 0x3f80;  // 1: neighbours are 2^-7 above and 2^-8 below
  Array<std::uint16_t> g(n, bf16_from_float(-1.0F));
  AdamWParams a;
  a.lr = 0x1p-7F * 0.3F;
  adamw_update(a, g.data(), s.view(), n);
  std::size_t up = 0;
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_TRUE(s.hi[i] == 0x3f80 || s.hi[i] == 0x3f81);
    up += s.hi[i] == 0x3f81;
  }
  EXPECT_NEAR(static_cast<double>(up) / n, 0.3, 5 * std::sqrt(0.21 / n));
}

TEST(DeviceUpdate, WithoutCudaEveryCallSaysThatThereIsNone) {
  if (device_update_is_built()) GTEST_SKIP() << "this build has CUDA";
  EXPECT_THROW(adamw_update_on_device({}, nullptr, {}, {}, 0, nullptr, {}), std::runtime_error);
  EXPECT_THROW(gradient_norm_squared_on_device(nullptr, 0, nullptr, nullptr, {}), std::runtime_error);
  EXPECT_THROW(split_master_on_device(nullptr, nullptr, nullptr, 0, {}), std::runtime_error);
  EXPECT_THROW(join_master_on_device(nullptr, nullptr, nullptr, 0, {}), std::runtime_error);
}

TEST(AdamWEdges, ArgumentsAreChecked) {
  StateArrays s(MasterFormat::split, MomentFormat::block8, kBlock);
  auto g = gradients(kBlock, 1);
  const AdamWParams a;
  EXPECT_THROW(adamw_update(a, g.data() + 1, s.view(), 8), std::invalid_argument);
  State bad = s.view();
  bad.lo += 8;
  EXPECT_THROW(adamw_update(a, g.data(), bad, 8), std::invalid_argument);
  bad = s.view();
  bad.v.absmax = nullptr;
  EXPECT_THROW(adamw_update(a, g.data(), bad, 8), std::invalid_argument);
  AdamWParams late = a;
  late.step = 0;
  EXPECT_THROW(adamw_update(late, g.data(), s.view(), 8), std::invalid_argument);
  EXPECT_EQ(adamw_update(a, nullptr, State{}, 0).updated, 0U);
}

}  // namespace
}  // namespace tierflow::optim
