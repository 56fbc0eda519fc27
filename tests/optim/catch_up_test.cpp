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

INSTANTIATE_TEST_SUITE_P(All, CatchUp,
                         testing::Combine(testing::Values(Rule::adamw, Rule::adam, Rule::lion, Rule::sgd),
                                          testing::Values(MasterFormat::split, MasterFormat::bf16_sr),
                                          testing::Values(MomentFormat::block8, MomentFormat::f32, MomentFormat::bf16),
                                          testing::Values(0.0F, 0.1F)));

}  // namespace
}  // namespace tierflow::optim
