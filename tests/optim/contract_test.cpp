// What a call promises beside its numbers: arguments are checked, reports are true, the caller's floating-point
// environment neither matters nor changes.
#include <gtest/gtest.h>

#include <array>
#include <cfenv>
#include <functional>
#include <limits>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "optim/kernels.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

struct Call {
  StateArrays arrays{MasterFormat::split, MomentFormat::block8, 2 * kBlock};
  Array<std::uint16_t> g = gradients(2 * kBlock, 1);
  AdamWParams params;
  State from = arrays.view(), to = from;
  const std::uint16_t* gradient = g.data();

  std::string refusal() {
    try {
      adamw_update(params, gradient, from, to, kBlock);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST(Arguments, EachContractIsCheckedAndNamed) {
  struct {
    std::function<void(Call&)> broken;
    const char* says;
  } const cases[] = {
      {[](Call&) {}, "accepted"},
      {[](Call& c) { c.params.rule = static_cast<Rule>(0); }, "optim: unknown rule"},
      {[](Call& c) { c.params.rule = static_cast<Rule>(5); }, "optim: unknown rule"},
      {[](Call& c) { c.params.step = 0; }, "optim: step counts from 1"},
      {[](Call& c) { c.params.first_element = 255; }, "optim: first_element must be a multiple of the block"},
      {[](Call& c) { c.params.first_element = 256; }, "accepted"},
      {[](Call& c) { c.gradient = nullptr; }, "optim: the gradient must be aligned to 64 bytes"},
      {[](Call& c) { c.gradient += 16; }, "optim: the gradient must be aligned to 64 bytes"},
      {[](Call& c) { c.gradient += 32; }, "accepted"},
      {[](Call& c) { c.from.master = static_cast<MasterFormat>(3); }, "optim: unknown master format"},
      {[](Call& c) { c.from.hi = nullptr; }, "optim: hi must be aligned to 64 bytes"},
      {[](Call& c) { c.to.hi += 16; }, "optim: hi must be aligned to 64 bytes"},
      {[](Call& c) { c.from.lo = nullptr; }, "optim: lo must be aligned to 64 bytes"},
      {[](Call& c) { c.to.lo += 16; }, "optim: lo must be aligned to 64 bytes"},
      {[](Call& c) { c.from.m.format = static_cast<MomentFormat>(0); }, "optim: unknown moment format"},
      {[](Call& c) { c.to.v.format = static_cast<MomentFormat>(4); }, "optim: unknown moment format"},
      {[](Call& c) { c.from.m.values = nullptr; }, "optim: moment values must be aligned to 64 bytes"},
      {[](Call& c) { c.to.v.values = static_cast<std::byte*>(c.to.v.values) + 32; },
       "optim: moment values must be aligned to 64 bytes"},
      {[](Call& c) { c.from.v.absmax = nullptr; }, "optim: block8 needs absmax, aligned to 4 bytes"},
      {[](Call& c) { c.to.m.absmax = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(c.to.m.absmax) + 2); },
       "optim: block8 needs absmax, aligned to 4 bytes"},
      {[](Call& c) { c.to.master = MasterFormat::bf16_sr; }, "optim: both states must have the same formats"},
      {[](Call& c) { c.to.m.format = MomentFormat::bf16; }, "optim: both states must have the same formats"},
      {[](Call& c) { c.to.v.format = MomentFormat::bf16; }, "optim: both states must have the same formats"},
      // Lion and SGD have no second moment, and bf16_sr no lower half.
      {[](Call& c) { c.params.rule = Rule::lion, c.from.v = c.to.v = {}; }, "accepted"},
      {[](Call& c) { c.params.rule = Rule::sgd, c.from.v = c.to.v = {}; }, "accepted"},
      {[](Call& c) { c.params.rule = Rule::lion, c.to.v.format = MomentFormat::bf16; }, "accepted"},
      {[](Call& c) { c.params.rule = Rule::adam, c.from.v = {}; }, "optim: moment values must be aligned to 64 bytes"},
      {[](Call& c) { c.from.master = c.to.master = MasterFormat::bf16_sr, c.from.lo = c.to.lo = nullptr; }, "accepted"},
  };
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    Call call;
    cases[i].broken(call);
    EXPECT_EQ(call.refusal(), cases[i].says) << "case " << i;
  }
}

TEST(Arguments, MomentsAreChecked) {
  MomentArray array(MomentFormat::block8, kBlock, true);
  Moment bad = array.view();
  bad.absmax = nullptr;
  std::vector<float> values(kBlock);
  EXPECT_THROW(zero_moment(bad, kBlock, true), std::invalid_argument);
  EXPECT_THROW(encode_moment(values.data(), bad, kBlock, true), std::invalid_argument);
  EXPECT_THROW(decode_moment(bad, values.data(), kBlock, true), std::invalid_argument);
  zero_moment({}, 0, true);  // nothing asked for, nothing checked
  encode_moment(nullptr, {}, 0, true);
  decode_moment({}, nullptr, 0, true);
}

TEST(Arguments, ZeroedMomentsAreZeroAndEndWhereTheyShould) {
  const std::size_t n = kBlock + 3;
  for (const MomentFormat format : {MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16})
    for (const bool is_signed : {false, true}) {
      MomentArray array(format, 2 * kBlock, is_signed);
      std::fill(array.bytes.begin(), array.bytes.end(), 0xa5);
      std::fill(array.absmax.begin(), array.absmax.end(), 7.0F);
      zero_moment(array.view(), n, is_signed);
      std::vector<float> values(n, 1.0F);
      decode_moment(array.view(), values.data(), n, is_signed);
      for (const float value : values) ASSERT_EQ(value, 0.0F);
      const std::size_t size = format == MomentFormat::block8 ? 1 : format == MomentFormat::bf16 ? 2 : 4;
      const int zero = format == MomentFormat::block8 && is_signed ? kZeroCodeSigned : 0;
      for (std::size_t i = 0; i < array.bytes.size(); ++i) ASSERT_EQ(array.bytes[i], i < size * n ? zero : 0xa5) << i;
      if (format == MomentFormat::block8) {
        EXPECT_EQ(array.absmax[0], 0.0F);
        EXPECT_EQ(array.absmax[1], 0.0F);
        EXPECT_EQ(array.absmax[2], 7.0F);
      }
    }
}

TEST(Arguments, WhatAStateLacksItLacksFurtherOnToo) {
  StateArrays s(MasterFormat::bf16_sr, MomentFormat::f32, 2 * kBlock);
  State state = s.view();
  state.v = {};
  const State later = state_from(state, kBlock);
  EXPECT_EQ(later.hi, state.hi + kBlock);
  EXPECT_EQ(later.lo, nullptr);
  EXPECT_EQ(later.m.values, static_cast<float*>(state.m.values) + kBlock);
  EXPECT_EQ(later.m.absmax, nullptr);
  EXPECT_EQ(later.v.values, nullptr);
}

// Where the call updates, in vectors and in the rest, and where it leaves a block as it was.
TEST(SecondMoment, IsLeftAloneByLionAndSgd) {
  const std::size_t n = 2 * kBlock + 5;
  for (const Kernels& kernels : all_kernels())
    for (const Rule rule : {Rule::lion, Rule::sgd})
      for (const MomentFormat format : {MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16}) {
        StateArrays s(MasterFormat::split, format, n), to(MasterFormat::split, format, n);
        fill(s, n, 45);
        fill(to, n, 46);
        const MomentArray before = s.v, before_there = to.v;
        auto g = gradients(n, 47);
        g[kBlock + 3] = 0x7f80;
        AdamWParams a;
        a.rule = rule;
        EXPECT_EQ(update_with(kernels, a, g.data(), s.view(), to.view(), n).skipped, kBlock);
        EXPECT_TRUE(to.v == before_there) << kernels.name;
        EXPECT_EQ(update_with(kernels, a, g.data(), s.view(), s.view(), n).skipped, kBlock);
        EXPECT_TRUE(s.v == before) << kernels.name;
      }
}

std::vector<float> master_of(const StateArrays& s, std::size_t n) {
  std::vector<float> p(n);
  for (std::size_t i = 0; i < n; ++i)
    p[i] = s.master == MasterFormat::split ? float_of(joined(s.hi[i], s.lo[i])) : float_from_bf16(s.hi[i]);
  return p;
}

// Every report, with any set of the others, over a partial last block and a block that is left as it was.
TEST(Reports, SayWhatEachBlockSaw) {
  const std::size_t n = 4 * kBlock + 9, blocks = 5;
  for (const MasterFormat master : {MasterFormat::split, MasterFormat::bf16_sr})
    for (const bool skip_call : {false, true})
      for (int wanted = 0; wanted < 8; ++wanted) {
        StateArrays s(master, MomentFormat::block8, n);
        fill(s, n, 41);
        const auto before = master_of(s, n);
        auto g = gradients(n, 42);
        g[kBlock + 3] = 0x7f80;
        AdamWParams a;
        a.lr = 1e-2F;
        a.gradient_scale = 0.5F;
        a.skip_call_if_not_finite = skip_call;
        std::array<double, 5> gradient{}, update{};
        gradient.fill(-1), update.fill(-1);
        std::array<std::uint8_t, 5> finite{};
        finite.fill(9);
        BlockReports reports;
        if ((wanted & 1) != 0) reports.gradient_squares = gradient.data();
        if ((wanted & 2) != 0) reports.update_squares = update.data();
        if ((wanted & 4) != 0) reports.finite = finite.data();
        const UpdateResult result = adamw_update(a, g.data(), s.view(), s.view(), n, reports);
        EXPECT_EQ(result.skipped, skip_call ? n : kBlock);
        EXPECT_EQ(result.updated, n - result.skipped);
        const auto after = master_of(s, n);
        for (std::size_t block = 0; block < blocks; ++block) {
          double gradient_squares = 0, update_squares = 0;
          for (std::size_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
            gradient_squares += std::pow(0.5 * float_from_bf16(g[i]), 2);
            update_squares += std::pow(after[i] - before[i], 2);
          }
          EXPECT_EQ(update_squares > 0, !skip_call && block != 1);
          if ((wanted & 1) == 0)
            EXPECT_EQ(gradient[block], -1);
          else if (block != 1)
            EXPECT_NEAR(gradient[block], gradient_squares, 1e-12 * gradient_squares);
          else
            EXPECT_EQ(gradient[block], std::numeric_limits<double>::infinity());
          if ((wanted & 2) == 0)
            EXPECT_EQ(update[block], -1);
          else
            EXPECT_NEAR(update[block], update_squares, 1e-12 * update_squares);
          EXPECT_EQ(finite[block], (wanted & 4) == 0 ? 9 : block != 1);
        }
      }
}

TEST(Reports, ChangeNoBit) {
  const std::size_t n = 3 * kBlock + 100;
  StateArrays plain(MasterFormat::bf16_sr, MomentFormat::block8, n), reported = plain;
  fill(plain, n, 43);
  fill(reported, n, 43);
  const auto g = gradients(n, 44);
  std::array<double, 4> squares{};
  AdamWParams a;
  a.lr = 1e-2F;
  a.rounding_key = 5;
  adamw_update(a, g.data(), plain.view(), n);
  adamw_update(a, g.data(), reported.view(), reported.view(), n, {.update_squares = squares.data()});
  EXPECT_TRUE(plain == reported);
}

// Infinity less infinity would be no number.
TEST(Reports, ABlockLeftAsItWasHasNotChangedWhateverItHolds) {
  StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock);
  s.hi[7] = 0x7f80;
  s.hi[8] = 0x7fc0;
  Array<std::uint16_t> g(kBlock, 0);
  g[3] = 0x7f80;
  double squares = -1;
  EXPECT_EQ(adamw_update({}, g.data(), s.view(), s.view(), kBlock, {.update_squares = &squares}).skipped, kBlock);
  EXPECT_EQ(squares, 0);
}

TEST(Reports, ACallThatIsLeftOutNamesTheBlocksThatItsScaleMakesTooLarge) {
  const std::size_t n = 2 * kBlock + 3;
  for (const auto& [scale, finite] : {std::pair{2.0F, 0}, {0.5F, 1}}) {
    StateArrays s(MasterFormat::split, MomentFormat::f32, n);
    Array<std::uint16_t> g(n, 0);
    g[0] = 0x7f80;
    g[kBlock + 9] = bf16_from_float(0x1p59F);
    AdamWParams a;
    a.gradient_scale = scale;
    a.skip_call_if_not_finite = true;
    std::array<std::uint8_t, 3> found{9, 9, 9};
    EXPECT_EQ(adamw_update(a, g.data(), s.view(), s.view(), n, {.finite = found.data()}).skipped, n);
    EXPECT_EQ(found, (std::array<std::uint8_t, 3>{0, static_cast<std::uint8_t>(finite), 1})) << scale;
  }
}

// 2^60, scaled, is where a gradient counts as not finite.
TEST(Reports, TheLargestGradientIsBelowTheLimit) {
  for (const auto& [gradient, scale, updated] : {std::tuple{0x1p60F, 1.0F, false},
                                                 {0x1p60F, 0.99F, true},
                                                 {0x1p59F, 1.99F, true},
                                                 {-0x1p59F, 2.0F, false},
                                                 {0x1p59F, -2.0F, false},
                                                 {0x1p59F, -1.99F, true}}) {
    StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock);
    Array<std::uint16_t> g(kBlock, 0);
    g[255] = bf16_from_float(gradient);
    AdamWParams a;
    a.gradient_scale = scale;
    for (const bool skip_call : {false, true}) {
      a.skip_call_if_not_finite = skip_call;
      EXPECT_EQ(adamw_update(a, g.data(), s.view(), kBlock).updated, updated ? kBlock : 0) << gradient << " " << scale;
    }
  }
}

// ---- the floating-point environment

std::uint64_t control() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fU;  // without the flags of what has happened
#else
  return static_cast<std::uint64_t>(std::fegetround());
#endif
}

// Runs `body` in every rounding mode, and with subnormal numbers flushed, and checks that it leaves the mode alone.
void in_each_environment(const std::function<void()>& body) {
  std::fenv_t usual;
  std::fegetenv(&usual);
  for (const int mode : {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD})
    for (const bool flush : {false, true}) {
      std::fesetround(mode);
#if defined(__x86_64__)
      if (flush) _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
      const std::uint64_t before = control();
      body();
      const std::uint64_t after = control();
      std::fesetenv(&usual);
      ASSERT_EQ(before, after) << "mode " << mode << (flush ? ", flushed" : "");
    }
}

TEST(Environment, NeitherMattersNorChanges) {
  const std::size_t n = 6 * kBlock + 5;
  StateArrays start(MasterFormat::split, MomentFormat::block8, n);
  fill(start, n, 51);
  std::vector<float> tiny(n);
  for (std::size_t i = 0; i < n; ++i) tiny[i] = static_cast<float>(i) * 0x1p-146F * (i < kBlock ? 0x1p50F : 1);
  const auto g = gradients(n, 52);
  AdamWParams a;
  a.lr = 1e-3F;
  a.step = 9;
  a.weight_decay = 0.1F;
  struct Results {
    StateArrays state;
    MomentArray moment{MomentFormat::block8, 6 * kBlock + 5, false};
    std::vector<float> decoded = std::vector<float>(6 * kBlock + 5);
    double sum = 0;
    Coefficients k = {};
  };
  const auto compute = [&] {
    Results r{start};
    adamw_update(a, g.data(), r.state.view(), n);
    encode_moment(tiny.data(), r.moment.view(), n, false);
    decode_moment(start.v.view(), r.decoded.data(), n, false);
    gradient_norm_squared(g.data(), n, &r.sum);
    r.k = digested(a, g.data(), start.view(), start.view(), n).k;
    return r;
  };
  const Results usual = compute();
  std::vector<Results> others;
  in_each_environment([&] { others.push_back(compute()); });
  ASSERT_EQ(others.size(), 8U);
  for (const Results& other : others) {
    EXPECT_TRUE(other.state == usual.state);
    EXPECT_TRUE(other.moment == usual.moment);
    EXPECT_EQ(std::memcmp(other.decoded.data(), usual.decoded.data(), 4 * n), 0);
    EXPECT_EQ(other.sum, usual.sum);
    EXPECT_EQ(std::memcmp(&other.k, &usual.k, sizeof usual.k), 0);
  }
}

// Squares of sizes so far apart that their sum rounds, and of subnormal numbers.
TEST(Environment, DoesNotMatterToSumsOfSquares) {
  const std::size_t n = 3 * 16 + 5;  // in vectors, and in the rest
  Array<std::uint16_t> g(n, 0x3f81);
  std::fill_n(g.begin(), 16, bf16_from_float(0x1p40F));
  const Array<std::uint16_t> subnormal(n, 1);  // 2^-133
  const auto sums = [&] {
    std::array<double, 2> found{};
    gradient_norm_squared(g.data(), n, &found[0]);
    gradient_norm_squared(subnormal.data(), n, &found[1]);
    return found;
  };
  const auto usual = sums();
  EXPECT_EQ(usual[1], static_cast<double>(n) * 0x1p-266);
  std::vector<std::array<double, 2>> others;
  in_each_environment([&] { others.push_back(sums()); });
  for (const auto& other : others) EXPECT_EQ(other, usual);
}

#if defined(__x86_64__)
// A caller may have asked for a signal at every result that rounds.
TEST(Environment, NothingTrapsInACall) {
  const std::size_t n = kBlock + 3;
  StateArrays s(MasterFormat::split, MomentFormat::block8, n);
  fill(s, n, 53);
  const auto g = gradients(n, 54);
  std::vector<float> values(n, 0.3F), decoded(n);
  values[1] = 0.7F;
  MomentArray moment(MomentFormat::block8, n, true);
  double sum = 0;
  const unsigned usual = _mm_getcsr(), trapping = usual & ~0x1fbfU;  // no exception masked, none seen yet
  _mm_setcsr(trapping);
  adamw_update({}, g.data(), s.view(), n);
  encode_moment(values.data(), moment.view(), n, true);
  decode_moment(moment.view(), decoded.data(), n, true);
  gradient_norm_squared(g.data(), n, &sum);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(usual);
  EXPECT_EQ(after, trapping);
}
#endif

TEST(Environment, SubnormalNumbersAreKept) {
  const std::size_t n = kBlock + 3;  // in vectors, and in the rest
  StateArrays s(MasterFormat::split, MomentFormat::f32, n);
  const std::vector<float> m(n, 0x1p-140F), p(n, 0x1p-133F);
  split_master(p.data(), s.hi.data(), s.lo.data(), n);
  encode_moment(m.data(), s.m.view(), n, true);
  Array<std::uint16_t> g(n, 0);
  AdamWParams a;
  a.rule = Rule::sgd;
  a.lr = 1;
  a.beta1 = 0.5F;
  adamw_update(a, g.data(), s.view(), n);
  std::vector<float> m2(n);
  decode_moment(s.m.view(), m2.data(), n, true);
  const auto p2 = master_of(s, n);
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_EQ(m2[i], 0x1p-141F) << i;
    ASSERT_EQ(p2[i], 0x1p-133F - 0x1p-141F) << i;
  }
  std::fill(g.begin(), g.end(), 1);  // 2^-133
  double sum = 0;
  EXPECT_TRUE(gradient_norm_squared(g.data(), n, &sum));
  EXPECT_EQ(sum, static_cast<double>(n) * 0x1p-266);
}

}  // namespace
}  // namespace tierflow::optim
