#include "io/layout.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

namespace tierflow::io {
namespace {

struct Case {
  std::uint64_t bytes;
  std::uint64_t unit;
  std::vector<std::uint32_t> weights;
};

class LayoutTest : public ::testing::TestWithParam<Case> {};

TEST_P(LayoutTest, EveryByteHasOnePlaceOfItsOwnInsideItsMember) {
  const Case& c = GetParam();
  const Layout layout(c.bytes, c.unit, c.weights);
  std::set<std::pair<std::uint32_t, std::uint64_t>> places;
  std::uint64_t next = 0;
  layout.split(0, c.bytes, 16, [&](const Piece& piece) {
    EXPECT_EQ(piece.volume_offset, next);
    EXPECT_LE(piece.length, 16U);
    EXPECT_LE(piece.member_offset + piece.length, layout.member_bytes(piece.member));
    for (std::uint64_t i = 0; i < piece.length; ++i) {
      EXPECT_TRUE(places.emplace(piece.member, piece.member_offset + i).second);
    }
    next += piece.length;
  });
  EXPECT_EQ(next, c.bytes);
  EXPECT_EQ(places.size(), c.bytes);
}

TEST_P(LayoutTest, AnyCutAgreesWithTheWhole) {
  const Case& c = GetParam();
  const Layout layout(c.bytes, c.unit, c.weights);
  std::map<std::uint64_t, std::pair<std::uint32_t, std::uint64_t>> where;
  layout.split(0, c.bytes, 1, [&](const Piece& p) { where[p.volume_offset] = {p.member, p.member_offset}; });
  for (std::uint64_t offset = 0; offset < c.bytes; offset += 7) {
    const std::uint64_t length = std::min<std::uint64_t>(c.bytes - offset, 3 * offset % 61 + 1);
    std::uint64_t covered = 0;
    layout.split(offset, length, 1000, [&](const Piece& p) {
      for (std::uint64_t i = 0; i < p.length; ++i) {
        EXPECT_EQ(where.at(p.volume_offset + i), std::pair(p.member, p.member_offset + i));
      }
      covered += p.length;
    });
    EXPECT_EQ(covered, length);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayoutTest,
                         ::testing::Values(Case{1000, 16, {1}}, Case{1000, 16, {1, 1}}, Case{1024, 32, {1, 3}},
                                           Case{7, 16, {1, 1, 1}}, Case{2000, 8, {5, 1, 2}}));

// And no more closely: small weights leave a row of stripes short.
TEST(WeightsTest, FollowTheSpeedsToWithinThreePercent) {
  EXPECT_EQ(weights_for(std::vector<double>{1.0, 1.05}), (std::vector<std::uint32_t>{1, 1}));
  EXPECT_EQ(weights_for(std::vector<double>{2.0, 2.0}), (std::vector<std::uint32_t>{1, 1}));
  EXPECT_EQ(weights_for(std::vector<double>{1.0, 3.0}), (std::vector<std::uint32_t>{1, 3}));
  for (const std::vector<double>& speeds : {std::vector<double>{7.1, 3.3}, {6.9, 6.5, 3.1}, {1.0, 1.07, 2.5, 2.4}}) {
    const std::vector<std::uint32_t> weights = weights_for(speeds);
    double slowest = 0;
    for (std::size_t i = 0; i < speeds.size(); ++i) slowest = std::max(slowest, weights[i] / speeds[i]);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    EXPECT_GE(total / slowest, 0.97 * std::accumulate(speeds.begin(), speeds.end(), 0.0));
  }
}

TEST(WeightsTest, TheFastestHasSixteenUnitsAtMost) {
  EXPECT_EQ(weights_for(std::vector<double>{16.0, 1.0}), (std::vector<std::uint32_t>{16, 1}));
  EXPECT_EQ(weights_for(std::vector<double>{0.0, 1.0}), (std::vector<std::uint32_t>{1, 16}));
}

TEST(WeightsTest, SurviveNonsense) {
  EXPECT_EQ(weights_for(std::vector<double>{0.0, 0.0}), (std::vector<std::uint32_t>{1, 1}));
  EXPECT_EQ(weights_for(std::vector<double>{}).size(), 0U);
  EXPECT_EQ(weights_for(std::vector<double>{1e-9, 1.0}).front(), 1U);
}

}  // namespace
}  // namespace tierflow::io
