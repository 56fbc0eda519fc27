// Budgets into arrangements: what waits for the next forward.
#include "swap/arrange.h"

#include <gmock/gmock.h>

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

TEST(Arrange, DefersAShareOfEachUnit) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 6; ++unit) {
    const std::uint64_t elements = (130 + 40 * static_cast<std::uint64_t>(unit)) * 1024;
    units.push_back({.name = "unit", .groups = {{.elements = elements, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}, .carry_bytes = unit == 0 ? 0 : kSector});
  }
  const Layout layout(units, stages, kChunkQuantum);
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    const Arrangement arrangement =
        arrange(layout,
                {.host_budget = 64 * kMiB, .device_budget = 64 * kMiB, .staged = false, .deferred_share = share})
            .value();
    EXPECT_EQ(arrangement.gradient_resident, arrangement.deferred);  // where everything is resident
    for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
      double deferred = 0;
      for (const Chunk& chunk : layout.chunks_of(unit))
        if (arrangement.deferred[layout.first_chunk(unit) + chunk.index])
          deferred += static_cast<double>(chunk.elements);
      EXPECT_NEAR(deferred, share * static_cast<double>(layout.unit_elements(unit)), kChunkQuantum) << unit;
    }
  }
  // Without storage gradients that do not fit are not deferred; the run is not refused for them.
  ArrangeRequest request{.device_budget = 64 * kMiB, .staged = false, .storage = false};
  for (request.host_budget = kMiB; !arrange(layout, request).ok();) request.host_budget += 64 * 1024;
  request.deferred_share = 1;
  EXPECT_EQ(arrange(layout, request).value().deferred, std::vector<bool>(layout.chunks().size(), false));
  request.host_budget += 64 * kMiB;
  EXPECT_EQ(arrange(layout, request).value().deferred, std::vector<bool>(layout.chunks().size(), true));
}

// Units of 64, 32, 40, 36 and 48 Ki elements: two bytes each as words, four as state, two as a gradient that waits.
Layout five_units(bool second_is_trainable = true) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (const std::uint64_t kibi : {64, 32, 40, 36, 48}) {
    const bool trainable = second_is_trainable || units.size() != 1;
    units.push_back(
        {.name = "unit",
         .groups = {{.trainable = trainable, .elements = kibi << 10, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {static_cast<int>(stages.size())}});
  }
  return Layout(units, stages, kChunkQuantum);
}

TEST(Arrange, WithoutStorageTheSmallestHostBudgetIsEverythingThatARunNeeds) {
  const auto smallest = [](const Layout& layout, ArrangeRequest request, std::uint64_t kibi) {
    request.device_budget = 64 * kMiB;
    request.storage = false;
    request.host_budget = kibi * 1024 - 1;
    const io::Result<Arrangement> refused = arrange(layout, request);
    ASSERT_FALSE(refused.ok()) << kibi;
    EXPECT_THAT(refused.error().detail, ::testing::AllOf(::testing::HasSubstr("--host-memory"),
                                                         ::testing::HasSubstr(std::to_string(kibi) + "KiB; "),
                                                         ::testing::HasSubstr("--storage")));
    ++request.host_budget;
    io::Result<Arrangement> made = arrange(layout, request);
    ASSERT_TRUE(made.ok()) << kibi;
    EXPECT_EQ(made->host_bytes(layout), request.host_budget);
    EXPECT_EQ(made->hi_resident, std::vector<bool>(5, true));
    EXPECT_EQ(made->state_buffers, 0);
  };
  smallest(five_units(), {}, 440 + 880 + 440);
  smallest(five_units(false), {}, 440 + 752 + 376);
  smallest(five_units(), {.train = false}, 440);
  smallest(five_units(), {.staged = false}, 440 + 880 + 2 * 128);  // two buffers for gradients on their way
  smallest(five_units(), {.staged = false, .sums = true}, 440 + 880 + 440 + 2 * 128);
  smallest(five_units(false), {.staged = false, .sums = true}, 440 + 752 + 376 + 2 * 128);
}

TEST(Arrange, ARunWhoseUpdatesDoNotWaitTakesTwoMoreBuffersWhereTheyFit) {
  ArrangeRequest request{.device_budget = 64 * kMiB, .staged = false};
  for (const auto& [kibi, buffers] : {std::pair{1576U, 2}, {1576U + 255, 2}, {1576U + 256, 4}, {4096U, 4}}) {
    request.host_budget = kibi * 1024;
    io::Result<Arrangement> made = arrange(five_units(), request);
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(made->word_buffers, buffers) << kibi;
  }
}

TEST(Arrange, WithStorageTheFewestBuffersAreEnough) {
  const auto smallest = [](ArrangeRequest request, std::uint64_t kibi, int words, int states) {
    request.device_budget = 64 * kMiB;
    request.host_budget = kibi * 1024 - 1;
    const io::Result<Arrangement> refused = arrange(five_units(), request);
    ASSERT_FALSE(refused.ok()) << kibi;
    EXPECT_THAT(refused.error().detail, ::testing::HasSubstr(std::to_string(kibi) + "KiB; "));
    ++request.host_budget;
    io::Result<Arrangement> made = arrange(five_units(), request);
    ASSERT_TRUE(made.ok()) << kibi;
    EXPECT_EQ(made->word_buffers, words);
    EXPECT_EQ(made->state_buffers, states);
    for (const auto* resident : {&made->hi_resident, &made->state_resident, &made->gradient_resident})
      EXPECT_EQ(*resident, std::vector<bool>(5, false));
  };
  smallest({}, 2 * 128 + 256, 2, 1);
  smallest({.staged = false, .sums = true}, 4 * 128 + 256, 4, 1);
  smallest({.train = false}, 128, 1, 0);
}

// Units on demand come first here, and are kept last.
TEST(Arrange, WhatIsAlwaysReadIsKeptBeforeWhatIsOnDemand) {
  const std::vector<UnitShape> units(8, {.name = "unit", .groups = {{.trainable = false, .elements = 64 << 10}}});
  const Layout layout(units, {{.units = {6}, .on_demand = {0, 1, 2, 3, 4, 5}}, {.units = {7}}}, kChunkQuantum);
  ArrangeRequest request{.device_budget = 64 * kMiB, .train = false};
  constexpr std::uint64_t kUnit = 128 << 10;
  std::vector<std::ptrdiff_t> always, on_demand;
  for (request.host_budget = kUnit; request.host_budget <= 7 * kUnit; request.host_budget += kUnit) {
    const std::vector<bool> resident = arrange(layout, request).value().hi_resident;
    on_demand.push_back(std::count(resident.begin(), resident.begin() + 6, true));
    always.push_back(std::count(resident.begin() + 6, resident.end(), true));
  }
  EXPECT_THAT(always, ::testing::ElementsAre(0, 1, 1, 2, 2, 2, 2));
  EXPECT_THAT(on_demand, ::testing::ElementsAre(0, 0, 0, 0, 0, 1, 1));
}

// Adapters beside a frozen base: what is trained has its place in RAM before any of the base has one.
TEST(Arrange, WhatIsTrainedIsKeptBeforeWhatIsFrozen) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 40; ++unit) {
    units.push_back(
        {.name = "unit",
         .groups = {{.elements = 4 << 10, .state_bytes_element = 4, .precision = "a"},
                    {.trainable = false, .elements = 64 << 10, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}});
  }
  const Layout layout(units, stages, kChunkQuantum);
  const auto kept = [&](const ArrangeRequest& request) {
    const Arrangement made = arrange(layout, request).value();
    EXPECT_LE(made.host_bytes(layout), request.host_budget);
    int trained = 0, frozen = 0;
    for (const Chunk& chunk : layout.chunks()) {
      const bool hi = made.resident(ExtentKind::hi, chunk.id);
      if (!chunk.trainable) {
        frozen += hi ? 1 : 0;
        continue;
      }
      const bool gradient = !made.deferred[chunk.id] || made.resident(ExtentKind::gradient, chunk.id),
                 low = !request.sums || made.resident(ExtentKind::gradient_low, chunk.id);
      trained += hi && gradient && low && made.resident(ExtentKind::state, chunk.id) ? 1 : 0;
    }
    return std::pair(trained, frozen);
  };
  ArrangeRequest request{.host_budget = 4 * kMiB, .device_budget = 64 * kMiB};
  for (const bool staged : {true, false}) {
    request.staged = staged;
    const auto [trained, frozen] = kept(request);
    EXPECT_EQ(trained, 40);
    EXPECT_GT(frozen, 5);  // with what is left
    EXPECT_LT(frozen, 40);
  }
  request.sums = true;
  EXPECT_EQ(kept(request).first, 40);
  request = {.host_budget = kMiB, .device_budget = 64 * kMiB};
  const auto [trained, frozen] = kept(request);
  EXPECT_LT(trained, 40);
  EXPECT_EQ(frozen, 0);
}

}  // namespace
}  // namespace tierflow::swap
