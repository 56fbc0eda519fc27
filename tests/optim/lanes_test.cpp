// The body of the device kernels, its lanes one after the other on the host: the bits of the scalar kernels, and no
// byte beyond them.
#include <gtest/gtest.h>

#include <array>

#include "optim/update_lanes.h"
#include "tests/optim/variants.h"

namespace tierflow::optim {
namespace {

// As a warp: every lane does its share, then all have the largest of their numbers.
template <class Own, int Count>
struct HostLanes {
  template <class Work>
  void each(Work work) {
    for (Own& own : lanes) work(own);
  }
  template <class Number>
  std::uint32_t largest(Number number) {
    std::uint32_t most = 0;
    for (int lane = 0; lane < Count; ++lane) most = std::max(most, number(lane, lanes[lane]));
    return most;
  }
  // Lanes read what others hold before any adds, as a shuffle does.
  void fold(int apart) {
    const auto before = lanes;
    for (int lane = 0; lane + apart < Count; ++lane) lanes[lane].sum += before[lane + apart].sum;
  }
  std::array<Own, Count> lanes;
};

std::size_t update_in_lanes(const Update& u, std::size_t block) {
  HostLanes<LaneBlock, kUpdateLanes> lanes;
  bool updated = false;
  switch (u.rule) {
    case Rule::adamw:
      updated = update_block_in_lanes<Rule::adamw>(lanes, u, block);
      break;
    case Rule::adam:
      updated = update_block_in_lanes<Rule::adam>(lanes, u, block);
      break;
    case Rule::lion:
      updated = update_block_in_lanes<Rule::lion>(lanes, u, block);
      break;
    case Rule::sgd:
      updated = update_block_in_lanes<Rule::sgd>(lanes, u, block);
  }
  std::size_t count = 0;
  for (const LaneBlock& lane : lanes.lanes) count += static_cast<std::size_t>(lane.count());
  EXPECT_EQ(count, std::min(kBlock, u.n - block * kBlock));
  return updated ? 0 : count;
}

// What the fixtures call a set of kernels.
std::size_t update_blocks(const Update& u, std::size_t begin, std::size_t end) {
  std::size_t skipped = 0;
  for (std::size_t block = end; block-- > begin;) skipped += update_in_lanes(u, block);  // in any order
  return skipped;
}

const Kernels& lane_kernels() {
  static const Kernels kernels{"LANES", update_blocks, nullptr, nullptr, nullptr};
  return kernels;
}

class Lanes : public testing::TestWithParam<Variant> {};

TEST_P(Lanes, SameBitsAsScalar) {
  const auto with = [](const Kernels& kernels) -> UpdateCall {
    return [&kernels](const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                      std::size_t n) { return update_with(kernels, params, gradient, from, to, n); };
  };
  for (const std::size_t n : {37 * kBlock + 19, 2 * kBlock, std::size_t{5}, kBlock + 8})
    expect_same_bits(GetParam(), n, with(all_kernels().back()), with(lane_kernels()));
}

INSTANTIATE_TEST_SUITE_P(All, Lanes, testing::ValuesIn(variants()), variant_name);

TEST(LanesOfBlocks, EndBelowTheSmallestAbsmax) {
  expect_blocks_to_end_below_the_smallest_absmax(
      [](const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to, std::size_t n) {
        return update_with(lane_kernels(), params, gradient, from, to, n);
      });
}

TEST(LanesOfSums, SameBitsAsScalar) {
  for (const std::size_t n : {kNormSegment, kNormSegment - 1, std::size_t{1}, std::size_t{47}, std::size_t{300}}) {
    auto g = gradients(n, 5, 7.0F);
    HostLanes<LaneSum, kSumLanes> lanes;
    double expected = 0;
    EXPECT_TRUE(sum_segment_scalar(g.data(), n, &expected));
    EXPECT_TRUE(sum_segment_in_lanes(lanes, g.data(), n));
    EXPECT_EQ(lanes.lanes[0].sum, expected);
    g[n / 2] = 0xff80;
    EXPECT_FALSE(sum_segment_in_lanes(lanes, g.data(), n));
  }
}

}  // namespace
}  // namespace tierflow::optim
