// Updates that were missed, replayed: the bits of as many updates with gradients of zero.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>

#include "optim/adamw.h"
#include "tests/optim/fixture.h"

namespace tierflow::optim {
namespace {

class CatchUp : public testing::TestWithParam<std::tuple<Rule, MasterFormat, MomentFormat, float>> {};

TEST_P(CatchUp, HasTheBitsOfUpdatesWithGradientsOfZero) {
  const auto [rule, master, moments, decay] = GetParam();
  const std::size_t n = 40 * kBlock + 41;
  for (const int count : {0, 1, 2, 30}) {
    SCOPED_TRACE(count);
    StateArrays expected(master, moments, n);
    fill(expected, n, 7);                 // some blocks have moments of zero
    if (master == MasterFormat::split) {  // and of these some have weights that are no numbers, or zeros of either sign
      const std::size_t first = 5 * kBlock;
      const float odd[] = {0.0F, -0.0F, std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::signaling_NaN(), 1e-42F};
      split_master(odd, expected.hi.data() + first, expected.lo.data() + first, 5);
    }
    StateArrays replayed = expected;
    std::vector<AdamWParams> updates;
    for (int i = 0; i < count; ++i)
      updates.push_back({.lr = 1e-3F * static_cast<float>(1 + i % 5),
                         .weight_decay = decay,
                         .step = 3 + i,
                         .rounding_key = 11,
                         .first_element = 2 * kBlock,
                         .rule = rule});
    const Array<std::uint16_t> zeros(n + 32);
    for (const AdamWParams& update : updates)
      EXPECT_EQ(adamw_update(update, zeros.data(), expected.view(), n).updated, n);
    const StateArrays before = replayed;
    adamw_catch_up(updates, replayed.view(), n);
    EXPECT_TRUE(replayed == expected);
    EXPECT_EQ(replayed == before, count == 0);
  }
}

void expect_replayed(const std::vector<AdamWParams>& updates, StateArrays state, std::size_t n, bool has_v = true) {
  StateArrays expected = state;
  const Array<std::uint16_t> zeros(n);
  State one = expected.view(), replayed = state.view();
  if (!has_v) one.v = replayed.v = {};
  for (const AdamWParams& update : updates) adamw_update(update, zeros.data(), one, n);
  adamw_catch_up(updates, replayed, n);
  EXPECT_TRUE(state == expected);
}

// Twenty updates, each of which halves both moments.
std::vector<AdamWParams> halving() {
  return {20, {.lr = 1e-2F, .beta1 = 0.5F, .beta2 = 0.5F, .step = 5}};
}

TEST(CatchUpRests, NotWhileAMomentHasABitLeft) {
  const std::size_t n = 2 * kBlock + 41;
  for (const MomentFormat format : {MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16})
    for (const bool of_m : {true, false})
      for (const std::size_t at : {std::size_t{0}, kBlock - 1, kBlock + 128, n - 1})
        for (const float value : {0.3F, 4.0F, 0x1p-90F}) {  // a half of 4 has one byte that is not zero
          StateArrays s(MasterFormat::split, format, n);
          std::fill(s.hi.begin(), s.hi.end(), 0x3f80);
          std::vector<float> moment(n, 0.0F);
          moment[at] = value;
          encode_moment(moment.data(), of_m ? s.m.view() : s.v.view(), n, of_m);
          SCOPED_TRACE(testing::Message() << (of_m ? "m" : "v") << " at " << at << ": " << value);
          expect_replayed(halving(), s, n);
        }
}

TEST(CatchUpRests, NotWhileAllBytesOfItsMomentsAreTheSame) {
  StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock);
  const std::vector<float> twice(kBlock, 2 * float_of(0x3a3a3a3aU));
  encode_moment(twice.data(), s.m.view(), kBlock, true);
  encode_moment(twice.data(), s.v.view(), kBlock, false);
  expect_replayed(halving(), s, kBlock);
}

TEST(CatchUpRests, NotWhereOneOfTheUpdatesDecays) {
  StateArrays s(MasterFormat::split, MomentFormat::block8, kBlock);
  std::fill(s.hi.begin(), s.hi.end(), 0x3f80);
  std::vector<AdamWParams> updates = halving();
  updates[3].weight_decay = 0.5F;
  expect_replayed(updates, s, kBlock);
}

TEST(CatchUpOfOneMoment, IsForLionAndSgd) {
  for (const Rule rule : {Rule::lion, Rule::sgd}) {
    StateArrays s(MasterFormat::split, MomentFormat::f32, kBlock + 9);
    zero_moment(s.m.view(), kBlock + 9, true);
    expect_replayed({3, {.lr = 1e-2F, .rule = rule}}, s, kBlock + 9, /*has_v=*/false);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CatchUp,
                         testing::Combine(testing::Values(Rule::adamw, Rule::adam, Rule::lion, Rule::sgd),
                                          testing::Values(MasterFormat::split, MasterFormat::bf16_sr),
                                          testing::Values(MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16),
                                          testing::Values(0.0F, 0.1F)));

}  // namespace
}  // namespace tierflow::optim
