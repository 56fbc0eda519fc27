// Budgets into arrangements: what waits for the next forward, and where activations go.
#include "swap/arrange.h"

#include <gmock/gmock.h>

#include <set>

#include "tests/swap/toy_model.h"

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

// Whoever gives what is asked for is not refused once more.
TEST(Arrange, TheSmallestHostBudgetThatIsToldCountsWhatIsSetAside) {
  for (const bool storage : {false, true}) {
    ArrangeRequest request;
    request.device_budget = 64 * kMiB;
    request.storage = storage;
    request.host_workspace = 3 * kMiB;
    const io::Result<Arrangement> refused = arrange(five_units(), request);
    ASSERT_FALSE(refused.ok());
    const std::string& told = refused.error().detail;
    const std::string before = "the smallest that works is ";
    ASSERT_NE(told.find(before), std::string::npos) << told;
    request.host_budget = std::stoull(told.substr(told.find(before) + before.size())) * 1024;
    EXPECT_TRUE(arrange(five_units(), request).ok()) << told;
    request.host_budget -= 1024;
    EXPECT_FALSE(arrange(five_units(), request).ok()) << told;
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

// Units on demand come first here. They have the RAM that is left, as slots that any of them may have.
TEST(Arrange, WhatIsAlwaysReadIsKeptBeforeWhatIsOnDemand) {
  const std::vector<UnitShape> units(8, {.name = "unit", .groups = {{.trainable = false, .elements = 64 << 10}}});
  const Layout layout(units, {{.units = {6}, .on_demand = {0, 1, 2, 3, 4, 5}}, {.units = {7}}}, kChunkQuantum);
  constexpr std::uint64_t kUnit = 128 << 10;
  ArrangeRequest request{.device_budget = 2 * kUnit, .train = false};
  std::vector<std::ptrdiff_t> always, on_demand;
  for (request.host_budget = kUnit; request.host_budget <= 7 * kUnit; request.host_budget += kUnit) {
    const Arrangement made = arrange(layout, request).value();
    const std::vector<bool>& resident = made.hi_resident;
    EXPECT_EQ(std::count(resident.begin(), resident.begin() + 6, true), 0);
    EXPECT_LE(made.host_bytes(layout), request.host_budget);
    on_demand.push_back(made.cached_units);
    always.push_back(std::count(resident.begin() + 6, resident.end(), true));
  }
  EXPECT_THAT(always, ::testing::ElementsAre(0, 1, 1, 2, 2, 2, 2));
  EXPECT_THAT(on_demand, ::testing::ElementsAre(0, 0, 0, 0, 0, 1, 1));
  // What stays on the device needs no RAM.
  request.device_budget = 4 * kUnit;
  request.host_budget = 3 * kUnit;
  const Arrangement made = arrange(layout, request).value();
  EXPECT_EQ(std::ranges::count(made.hi_resident, true), 0);
  EXPECT_EQ(made.cached_units, 1);
}

TEST(Arrange, NoMoreUnitsOnDemandHaveASlotThanThereAre) {
  constexpr std::uint64_t kUnit = 128 << 10;
  std::vector<UnitShape> units(8, {.name = "unit", .groups = {{.trainable = false, .elements = 64 << 10}}});
  for (const int unit : {6, 7}) units[unit].groups[0].elements *= 16;
  const Layout layout(units, {{.units = {6}, .on_demand = {0, 1, 2, 3, 4, 5}}, {.units = {7}}}, kChunkQuantum);
  const Arrangement made =
      arrange(layout, {.host_budget = 30 * kUnit, .device_budget = 64 * kUnit, .train = false}).value();
  EXPECT_EQ(made.cached_units, 6);
  EXPECT_LE(made.host_bytes(layout), 30 * kUnit);
}

// What stays on the device is read once.
TEST(Arrange, WhatStaysOnTheDeviceHasTheRamThatIsLeft) {
  constexpr std::uint64_t kUnit = 128 << 10;
  const std::vector<UnitShape> units(40, {.name = "unit", .groups = {{.trainable = false, .elements = 64 << 10}}});
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 40; ++unit) stages.push_back({.units = {unit}});
  const Layout layout(units, stages, kChunkQuantum);
  ArrangeRequest request{.device_budget = 24 * kUnit, .train = false};
  std::vector<int> with_all_others;
  for (request.host_budget = 2 * kUnit; request.host_budget < 40 * kUnit; request.host_budget += kUnit) {
    const Arrangement made = arrange(layout, request).value();
    EXPECT_LE(made.host_bytes(layout), request.host_budget);
    int others = 0, staying = 0;
    for (int unit = 0; unit < 40; ++unit)
      (made.word_place(unit) == kNowhere ? others : staying) += made.hi_resident[unit] ? 1 : 0;
    EXPECT_TRUE(staying == 0 || others == 19) << others;
    if (others == 19) with_all_others.push_back(staying);
  }
  EXPECT_THAT(with_all_others, ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12));
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

TEST(Arrange, TakesNoMoreThanTheHostsBudget) {
  const toy::Toy toy = toy::make_toy(false, 3);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  const std::vector<std::uint64_t> swapped{0, 8192, 8192, 8192, 0};
  for (ArrangeRequest request :
       {ArrangeRequest{.gradient_slots = true, .measured_bytes = 24}, ArrangeRequest{.state_on_device = true},
        ArrangeRequest{.swapped_bytes = swapped, .swap_to_host = 2, .swap_to_storage = 2}}) {
    request.device_budget = 64 * kMiB;
    request.micro_batches = 2;
    bool everything = false;
    for (request.host_budget = kMiB / 2; request.host_budget < 8 * kMiB; request.host_budget += kSector) {
      const auto made = arrange(layout, request);
      if (!made.ok()) continue;
      ASSERT_LE(made.value().host_bytes(layout), request.host_budget);
      everything = std::ranges::count(made.value().hi_resident, false) == 0;
    }
    EXPECT_TRUE(everything);
  }
}

TEST(Arrange, NamesTheSmallestBudgetThatWorks) {
  const toy::Toy toy = toy::make_toy(false, 3);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  for (const bool staged : {true, false}) {
    ArrangeRequest request{.host_budget = 1, .device_budget = 64 * kMiB, .micro_batches = 2, .staged = staged};
    const auto refused = arrange(layout, request);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().kind, io::ErrorKind::usage);
    EXPECT_NE(refused.error().detail.find("the smallest that works is"), std::string::npos) << refused.error().detail;
    request.device_budget = 1;
    EXPECT_NE(arrange(layout, request).error().detail.find("--device-memory"), std::string::npos);
  }
}

std::vector<Activations> activations_of(const Arrangement& arrangement) {
  std::vector<Activations> by_item;
  for (const Item& item : arrangement.items) by_item.push_back(item.activations);
  return by_item;
}

TEST(Arrange, KeepsTheLastActivationsThatFitAndSwapsThoseBefore) {
  const toy::Toy toy = toy::make_toy(false, 4);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  const int stages = static_cast<int>(layout.stages().size()), items = 2 * (stages - 1);
  ArrangeRequest request{.host_budget = 64 * kMiB, .device_budget = 64 * kMiB, .micro_batches = 2};
  EXPECT_EQ(activations_of(arrange(layout, request).value()), std::vector<Activations>(items, Activations::recompute));
  request.activation_bytes.assign(stages, kMiB);
  request.activation_bytes.front() = request.activation_bytes.back() = 0;
  request.swapped_bytes.assign(stages, kMiB / 4);
  request.swapped_bytes.front() = request.swapped_bytes.back() = 0;
  std::vector<Activations> all(items, Activations::keep);
  for (const int item : {0, 1}) all[item] = Activations::recompute;
  EXPECT_EQ(activations_of(arrange(layout, request).value()), all);
  request.train = false;
  EXPECT_EQ(activations_of(arrange(layout, request).value()), std::vector<Activations>(items, Activations::recompute));
  request.train = true;
  request.swap_to_host = request.swap_to_storage = 2;
  request.swap_workspace = kMiB;
  std::set<std::ptrdiff_t> kept_counts;
  for (; request.device_budget > kMiB; request.device_budget -= kMiB) {
    const auto arranged = arrange(layout, request);
    if (!arranged.ok()) break;
    const Arrangement& at = arranged.value();
    const std::ptrdiff_t kept = at.count(Activations::keep), swapped = at.count(Activations::swap);
    kept_counts.insert(kept);
    // From the last block's items to the first's: kept, to the host, to storage, computed again.
    for (int item = 2, from_last = items - 3; item < items; ++item, --from_last) {
      const Activations expected = from_last < kept             ? Activations::keep
                                   : from_last < kept + swapped ? Activations::swap
                                                                : Activations::recompute;
      EXPECT_EQ(at.items[item].activations, expected) << item << " of " << kept << " and " << swapped;
      EXPECT_EQ(at.items[item].on_storage, expected == Activations::swap && from_last >= kept + 2) << item;
    }
    EXPECT_TRUE(swapped == std::min<std::ptrdiff_t>(4, items - 2 - kept) || swapped == 0);
    EXPECT_LE(at.device_bytes() + kept * kMiB + (swapped != 0 ? request.swap_workspace : 0), request.device_budget);
    EXPECT_LE(at.host_bytes(layout), request.host_budget);
  }
  EXPECT_GT(kept_counts.size(), 4U);
}

// Inputs that leave the device go on to storage where the host has no room for them.
TEST(Arrange, SavesOnStorageWhatTheHostHasNoRoomFor) {
  toy::Toy toy = toy::make_toy(false, 4);
  for (StageShape& stage : toy.stages)
    if (stage.carry_bytes != 0) stage.carry_bytes = kMiB;
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  ArrangeRequest request{.host_budget = 6 * kMiB, .device_budget = 4 * kMiB, .micro_batches = 4};
  const auto on_host = [&](std::uint64_t budget) {
    request.host_budget = budget;
    const auto arranged = arrange(layout, request);
    EXPECT_TRUE(arranged.ok()) << arranged.error().message();
    EXPECT_LE(arranged.value().host_bytes(layout), budget);
    return arranged.value().saved_on_host();
  };
  EXPECT_EQ(on_host(40 * kMiB), 16 * kMiB);
  EXPECT_LT(on_host(12 * kMiB), 12 * kMiB);
  EXPECT_EQ(on_host(2 * kMiB + 512 * 1024), 0U);
  request.storage = false;
  EXPECT_FALSE(arrange(layout, request).ok());
}

// They are read only when they are needed.
TEST(Arrange, SparseChunksAreTheLastInRam) {
  const GroupShape dense{.elements = 2 * kChunkQuantum, .state_bytes_element = 4};
  GroupShape sparse{.elements = 32 * kSparseQuantum, .state_bytes_element = 4, .sparse_elements = kSparseQuantum};
  const Layout layout({{.name = "sparse", .groups = {sparse}}, {.name = "dense", .groups = {dense}}},
                      {{.units = {0}}, {.units = {1}, .carry_bytes = kSector}}, kChunkQuantum);
  int some = 0;
  for (std::uint64_t budget = kMiB; budget < 6 * kMiB; budget += kMiB / 8) {
    auto made = arrange(layout, {.host_budget = budget, .device_budget = 64 * kMiB});
    if (!made.ok()) continue;
    std::uint64_t of_sparse = 0;
    bool all_dense = true;
    for (const Chunk& chunk : layout.chunks())
      if (chunk.sparse)
        of_sparse += made->hi_resident[chunk.id] ? chunk.word_bytes() : 0;
      else
        all_dense = all_dense && made->hi_resident[chunk.id];
    if (!all_dense) {
      EXPECT_LT(of_sparse, kChunkQuantum * 2) << "room for a chunk of the others";
    }
    some += of_sparse != 0 ? 1 : 0;
  }
  EXPECT_GT(some, 0);
}

TEST(Arrange, FewerMicroBatchesAreAdvisedWhereThereAreSeveral) {
  const toy::Toy toy = toy::make_toy(false, 1);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  for (const int micro_batches : {1, 2}) {
    const auto made = arrange(layout, {.host_budget = 64 * kMiB, .micro_batches = micro_batches});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().detail.find("fewer --micro-batches") != std::string::npos, micro_batches > 1);
  }
}

TEST(Arrange, OnlyWhatGoesOnToStorageIsStored) {
  Arrangement made;
  made.items = {{.input_bytes = 100, .activation_bytes = 5000},
                {.input_bytes = 100, .activation_bytes = 5000, .on_storage = true},
                {}};
  EXPECT_EQ(made.stored_activations(), (std::vector<std::uint64_t>{0, 3 * kSector, 0}));
  EXPECT_EQ(made.saved_on_host(), 3 * kSector);
}

TEST(Arrange, StateThatIsRewrittenStaysInRamWithTheRest) {
  const Layout layout(
      {{.name = "unit",
        .groups = {{.elements = kElementsPad, .state_bytes_element = 4},
                   {.trainable = false, .rewritten = true, .elements = kElementsPad, .state_bytes_element = 2},
                   {.trainable = false, .elements = kElementsPad}}}},
      {{.units = {0}}}, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 * kMiB, .device_budget = 64 * kMiB}).value();
  EXPECT_EQ(made.state_resident, (std::vector<bool>{true, true, false}));
}

}  // namespace
}  // namespace tierflow::swap
