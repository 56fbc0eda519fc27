// The device's half of an arrangement, byte by byte: what a budget leaves is given out in a fixed order.
#include "swap/arrange_device.h"

#include <gmock/gmock.h>

namespace tierflow::swap {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Shape { plain, tied, on_demand };

// Embedding, three blocks, head: 64, 32, 40, 36 and 48 Ki elements, two bytes each as weights and four as gradients.
Layout layout(Shape shape = Shape::plain) {
  std::vector<UnitShape> units;
  for (const std::uint64_t kibi : {64, 32, 40, 36, 48})
    units.push_back({.name = "unit", .groups = {{.elements = kibi << 10, .state_bytes_element = 4, .precision = "a"}}});
  std::vector<StageShape> stages = {{.units = {0}, .backward_needs_weights = false},
                                    {.units = {1}, .carry_bytes = 5000},
                                    {.units = {2}, .carry_bytes = 6000},
                                    {.units = {3}, .carry_bytes = 7000},
                                    {.units = {4}, .carry_bytes = 9000}};
  if (shape == Shape::tied) stages[4].units.push_back(0);
  if (shape == Shape::on_demand) {
    for (const std::uint64_t kibi : {20, 18}) {
      stages[2].on_demand.push_back(static_cast<int>(units.size()));
      units.push_back(
          {.name = "needed", .groups = {{.elements = kibi << 10, .state_bytes_element = 4, .precision = "a"}}});
    }
  }
  return Layout(units, stages, kChunkQuantum);
}

constexpr std::uint64_t kKi = 1024;
constexpr std::uint64_t kWorkspace = 1000, kCarries = 2 * (5000 + 6000 + 7000), kSlot = 8192;
constexpr std::uint64_t kFixed = (128 + 256) * kKi + kWorkspace;  // the embedding's weights and gradient

struct Result {
  io::Error error;
  Arrangement made;
};

Result device(std::uint64_t budget, ArrangeRequest request = {}, Shape shape = Shape::plain, bool deferred = false) {
  const Layout made = layout(shape);
  Result result;
  result.made.deferred.assign(made.chunks().size(), deferred);
  request.device_budget = budget;
  request.workspace = kWorkspace;
  request.micro_batches = 2;
  result.made.micro_batches = 2;
  result.error = arrange_device(made, request, result.made);
  return result;
}

std::vector<bool> on_storage(const Arrangement& made) {
  std::vector<bool> by_item;
  for (const Item& item : made.items) by_item.push_back(item.on_storage);
  return by_item;
}

// What leaves the device of each item: of its stage's input, of its activations.
std::vector<std::pair<std::uint64_t, std::uint64_t>> leaving(const Arrangement& made) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> by_item;
  for (const Item& item : made.items) by_item.emplace_back(item.input_bytes, item.activation_bytes);
  return by_item;
}

std::vector<Activations> activations(const Arrangement& made) {
  std::vector<Activations> by_item;
  for (const Item& item : made.items) by_item.push_back(item.activations);
  return by_item;
}

// By stage: whether its input leaves the device.
std::vector<bool> inputs(const Arrangement& made) {
  std::vector<bool> by_stage(5, false);
  for (const Item& item : made.items)
    if (item.input_bytes != 0) by_stage[item.made_by.stage] = true;
  EXPECT_EQ(made.inputs_that_leave(), std::count(by_stage.begin(), by_stage.end(), true));
  return by_stage;
}

std::vector<bool> leaves(std::initializer_list<int> stages) {
  std::vector<bool> all(5, false);
  for (const int stage : stages) all[stage] = true;
  return all;
}

TEST(ArrangeDevice, ABudgetBelowTheSmallestIsRefusedWithThatOne) {
  const std::uint64_t smallest = kFixed + 2 * kSlot;
  const io::Error error = device(smallest - 1).error;
  EXPECT_EQ(error.kind, io::ErrorKind::usage);
  EXPECT_THAT(error.detail, AllOf(HasSubstr("--device-memory"), HasSubstr("401KiB; "),
                                  HasSubstr("fewer --micro-batches, or a smaller --micro-batch or --seq")));
  const Arrangement made = device(smallest).made;
  EXPECT_FALSE(device(smallest).error);
  EXPECT_EQ(made.weight_ring, 128 * kKi);
  EXPECT_EQ(made.gradient_ring, 256 * kKi);
  EXPECT_EQ(made.held_gradients, 0U);
  EXPECT_EQ(made.slots, 2);
  EXPECT_EQ(made.slot_bytes, kSlot);
  EXPECT_EQ(inputs(made), leaves({1, 2, 3}));
  EXPECT_EQ(activations(made), std::vector<Activations>(8, Activations::recompute));
  EXPECT_EQ(on_storage(made), std::vector<bool>(8, false));
  using Bytes = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_THAT(leaving(made), ElementsAre(Bytes(0, 0), Bytes(0, 0), Bytes(5000, 0), Bytes(5000, 0), Bytes(6000, 0),
                                         Bytes(6000, 0), Bytes(7000, 0), Bytes(7000, 0)));
  for (int item = 0; item < 8; ++item) {
    EXPECT_EQ(made.items[item].made_by, (Computation{item / 2, Pass::forward, item % 2}));
    EXPECT_EQ(made.items[item].read_by, (Computation{item / 2, Pass::backward, item % 2}));
  }

  EXPECT_EQ(made.on_device, std::vector<bool>(made.deferred.size(), false));
  EXPECT_EQ(made.update_slots.count, 0);
}

TEST(ArrangeDevice, SizesInWordsAreRoundedUp) {
  EXPECT_THAT(too_small("--x", (16 << 20) - 1, (16 << 20) + 1, "use less").detail,
              ::testing::StrEq("--x 16384KiB is too small: the smallest that works is 17MiB; use less"));
  EXPECT_THAT(too_small("--x", 1025, 16 << 20, "").detail, AllOf(HasSubstr("--x 2KiB"), HasSubstr("is 16MiB")));
}

TEST(ArrangeDevice, InputsOfTheLastStagesThatFitStay) {
  EXPECT_EQ(inputs(device(kFixed + 2 * kSlot + 9999).made), leaves({1, 2, 3}));
  EXPECT_EQ(inputs(device(kFixed + 2 * kSlot + 10000).made), leaves({2, 3}));
  EXPECT_EQ(inputs(device(kFixed + 2 * kSlot + 13999).made), leaves({1, 3}));
  EXPECT_EQ(inputs(device(kFixed + 2 * kSlot + 14000).made), leaves({1, 2}));
  const Arrangement most = device(kFixed + kCarries - 1).made;
  EXPECT_EQ(inputs(most), leaves({1, 2}));
  EXPECT_EQ(most.slots, 2);
  const Arrangement all = device(kFixed + kCarries).made;
  EXPECT_EQ(inputs(all), leaves({}));
  EXPECT_EQ(all.slots, 0);
  EXPECT_EQ(all.weight_ring, 128 * kKi);
}

TEST(ArrangeDevice, WhatIsLeftGoesToRingsInTurnAndThenToWeights) {
  std::uint64_t budget = kFixed + kCarries;
  const auto rings = [&budget](std::uint64_t more) {
    const Arrangement made = device(budget += more).made;
    EXPECT_EQ(inputs(made), leaves({}));
    return std::pair(made.weight_ring / kKi, made.gradient_ring / kKi);
  };
  using Rings = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_EQ(rings(80 * kKi), Rings(128 + 80, 256));    // one block's weights ahead
  EXPECT_EQ(rings(160 * kKi), Rings(208, 256 + 160));  // one block's gradient
  EXPECT_EQ(rings(80 * kKi), Rings(208 + 80, 416));
  EXPECT_EQ(rings(4 * kKi), Rings(288 + 4, 416));
  EXPECT_EQ(rings(4 * kKi - 1), Rings(292, 416));  // whole sectors, within the budget
  EXPECT_EQ(rings(1), Rings(292 + 4, 416));
  EXPECT_EQ(rings(1 << 30), Rings(440 + 80, 416));  // all weights and a block's beside: no more is of use
}

TEST(ArrangeDevice, ActivationsAreKeptBeforeMoreWeights) {
  ArrangeRequest request;
  request.activation_bytes = {400, 8000, 16000, 24000, 0};
  const std::uint64_t budget = kFixed + kCarries + (80 + 160 + 80) * kKi;
  const auto kept = [&](std::uint64_t more) {
    const Arrangement made = device(budget + more, request).made;
    std::vector<int> items;
    for (int item = 0; item < static_cast<int>(made.items.size()); ++item)
      if (made.items[item].activations == Activations::keep) items.push_back(item);
    return items;
  };
  EXPECT_THAT(kept(8999), ElementsAre());
  EXPECT_THAT(kept(9000), ElementsAre(3));  // an eighth more than it says; the first stage has nothing to keep
  EXPECT_THAT(kept(27000 + 26999), ElementsAre(5, 7));
  EXPECT_THAT(kept(27000 + 27000), ElementsAre(6, 7));
  EXPECT_THAT(kept(2 * (27000 + 18000 + 9000)), ElementsAre(2, 3, 4, 5, 6, 7));
  EXPECT_EQ(device(budget + 27000 + 4096, request).made.weight_ring, (288 + 4) * kKi);
  request.train = false;
  EXPECT_THAT(kept(1 << 30), ElementsAre());
}

TEST(ArrangeDevice, NothingIsKeptOfAStageWhoseInputLeaves) {
  ArrangeRequest request;
  request.activation_bytes = {0, 80, 80, 80, 0};
  const std::uint64_t budget = kFixed + 2 * kSlot;
  const Arrangement none = device(budget + 9999, request).made;
  EXPECT_EQ(inputs(none), leaves({1, 2, 3}));
  EXPECT_EQ(none.count(Activations::keep), 0);
  const Arrangement made = device(budget + 10000 + 2 * 90, request).made;
  EXPECT_EQ(inputs(made), leaves({2, 3}));
  EXPECT_EQ(made.count(Activations::keep), 2);
  EXPECT_TRUE(made.items[2].activations == Activations::keep && made.items[3].activations == Activations::keep);
}

// An evaluation may use what a step has for saved inputs and kept activations: only what it wants beyond is left free.
TEST(ArrangeDevice, RoomForEvaluationsIsLeftBesideTheWeights) {
  const auto ring = [](std::uint64_t wanted, bool keeps) {
    ArrangeRequest request{.evaluation_workspace = wanted};
    if (keeps) request.activation_bytes = {0, 0, 0, 24000, 0};
    const std::uint64_t kept = keeps ? 2 * 27000 : 0;
    return device(kFixed + kCarries + (80 + 160 + 80 + 40) * kKi + kept, request).made.weight_ring / kKi;
  };
  for (const bool keeps : {false, true}) {
    const std::uint64_t of_step = kCarries + (keeps ? 2 * 27000 : 0);
    EXPECT_EQ(ring(0, keeps), 288U + 40);
    EXPECT_EQ(ring(of_step, keeps), 288U + 40);
    EXPECT_EQ(ring(of_step + 8 * kKi, keeps), 288U + 32);
    EXPECT_EQ(ring(1 << 30, keeps), 288U + 20);  // half of the room at most
  }
}

TEST(ArrangeDevice, AnEvaluationHasNoGradientsAndSavesNothing) {
  ArrangeRequest request{.device_update_share = 1, .train = false};
  const Result made = device(128 * kKi + kWorkspace, request);
  ASSERT_FALSE(made.error);
  EXPECT_TRUE(device(128 * kKi + kWorkspace - 1, request).error);
  EXPECT_EQ(made.made.weight_ring, 128 * kKi);
  EXPECT_EQ(made.made.gradient_ring, 0U);
  EXPECT_EQ(made.made.slots, 0);
  EXPECT_EQ(inputs(made.made), leaves({}));
  EXPECT_EQ(made.made.update_slots.count, 0);
}

// Each pass takes the same order: a ring that is too small would hold none of what comes next.
TEST(ArrangeDevice, WordsStayWhereNothingIsTrained) {
  ArrangeRequest request{.train = false};
  const auto places = [&](std::uint64_t ring) {
    const Arrangement made = device(ring + kWorkspace, request).made;
    EXPECT_EQ(made.weight_ring, ring);
    return std::pair(made.passing_ring() / kKi, made.word_places);
  };
  const std::uint64_t none = kNowhere;
  // A ring for the embedding's 128 Ki, and two blocks of at most 80 ahead; beside it one of the blocks.
  EXPECT_EQ(places((128 + 160 + 72) * kKi - kSector), std::pair(356UL, std::vector(5, none)));
  EXPECT_EQ(places((128 + 160 + 72) * kKi), std::pair(288UL, std::vector{none, none, none, 288 * kKi, none}));
  // With the embedding's place the others need 96 Ki for the head, and two blocks.
  EXPECT_EQ(places((128 + 96 + 160) * kKi), std::pair(256UL, std::vector{256 * kKi, none, none, none, none}));
  const auto all = places(440 * kKi);
  EXPECT_EQ(all, std::pair(0UL, std::vector{0 * kKi, 128 * kKi, 192 * kKi, 272 * kKi, 344 * kKi}));
  request.train = true;
  const Arrangement step = device(1 << 30, request).made;
  EXPECT_EQ(step.weight_ring - step.passing_ring(), 440 * kKi);
  EXPECT_EQ(step.word_place(4), step.weight_ring - 96 * kKi);
  const Arrangement less = device(kFixed + kCarries + (80 + 160 + 80 + 100) * kKi, request).made;
  ASSERT_LT(less.weight_ring, 440 * kKi);
  EXPECT_EQ(less.word_places, std::vector(5, none));
}

TEST(ArrangeDevice, WordsThatStayAreSpreadEvenly) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 14; ++unit) {
    const std::uint64_t kibi = unit == 0 || unit == 13 ? 40 : 64;
    units.push_back({.name = "unit", .groups = {{.elements = kibi << 10, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}, .carry_bytes = kSector});
  }
  const Layout shapes(units, stages, kChunkQuantum);
  const auto staying = [&](std::uint64_t ring) {
    Arrangement made;
    made.deferred.assign(shapes.chunks().size(), false);
    EXPECT_FALSE(arrange_device(shapes, {.device_budget = ring, .train = false}, made));
    EXPECT_EQ(made.weight_ring, ring);
    std::vector<int> stay;
    std::uint64_t end = made.passing_ring();
    for (int unit = 0; unit < 14; ++unit) {
      if (made.word_place(unit) == kNowhere) continue;
      EXPECT_EQ(made.word_place(unit), end);
      end += shapes.unit_word_bytes(unit);
      stay.push_back(unit);
    }
    EXPECT_EQ(end, ring);
    return stay;
  };
  const std::uint64_t block = 128 * kKi, ends = 2 * 80 * kKi;
  EXPECT_THAT(staying(3 * block), ElementsAre());
  EXPECT_THAT(staying(3 * block + ends), ElementsAre(0, 13));
  EXPECT_THAT(staying(5 * block + ends - kSector), ElementsAre(0, 12, 13));
  EXPECT_THAT(staying(7 * block + ends), ElementsAre(0, 3, 6, 9, 12, 13));
  EXPECT_THAT(staying(12 * block + ends - kSector), ElementsAre(0, 2, 3, 5, 6, 8, 9, 11, 12, 13));
}

TEST(ArrangeDevice, TiedGradientsAreHeldApartUnlessTheyAreSums) {
  ArrangeRequest request;
  const std::uint64_t weights = (96 + 128) * kKi;
  const std::uint64_t held = weights + (256 + 192) * kKi + kWorkspace + 2 * kSlot;
  EXPECT_TRUE(device(held - 1, request, Shape::tied).error);
  const Arrangement apart = device(held, request, Shape::tied).made;
  EXPECT_EQ(apart.weight_ring, weights);
  EXPECT_EQ(apart.held_gradients, 256 * kKi);
  EXPECT_EQ(apart.gradient_ring, 192 * kKi);
  request.sums = true;
  EXPECT_TRUE(device(held - 1, request, Shape::tied).error);
  const Arrangement together = device(held, request, Shape::tied).made;
  EXPECT_EQ(together.held_gradients, 0U);
  EXPECT_EQ(together.gradient_ring, (192 + 256) * kKi);
}

TEST(ArrangeDevice, UnitsOnDemandHaveAsManyPlacesAsANeedNames) {
  ArrangeRequest request{.sums = true, .units_per_need = 3};
  const std::uint64_t smallest = kFixed + 3 * (40 + 80) * kKi + 2 * kSlot;
  EXPECT_TRUE(device(smallest - 1, request, Shape::on_demand).error);
  const Result made = device(smallest, request, Shape::on_demand);
  ASSERT_FALSE(made.error);
  EXPECT_EQ(made.made.needed_ring, 3 * 40 * kKi);
  EXPECT_EQ(made.made.needed_gradients, 3 * 80 * kKi);
  request.sums = false;
  EXPECT_THAT(device(1 << 30, request, Shape::on_demand).error.detail, HasSubstr("single visits"));
}

// Beside what has to fit: one that comes while another is computed with, then all that the other units leave room for.
TEST(ArrangeDevice, UnitsOnDemandStayWhereNothingIsTrained) {
  const ArrangeRequest request{.train = false};
  const std::uint64_t smallest = (128 + 40) * kKi + kWorkspace, blocks = 2 * 80 * kKi, all = (40 + 36) * kKi;
  EXPECT_TRUE(device(smallest - 1, request, Shape::on_demand).error);
  EXPECT_EQ(device(smallest, request, Shape::on_demand).made.needed_ring, 40 * kKi);
  EXPECT_EQ(device(smallest + blocks + 40 * kKi, request, Shape::on_demand).made.needed_ring, 80 * kKi);
  EXPECT_EQ(device(1 << 30, request, Shape::on_demand).made.needed_ring, std::max(80 * kKi, all));
}

TEST(ArrangeDevice, UpdatesRunThereWhereThreeSlotsFit) {
  ArrangeRequest request{.device_update_share = 1, .update_scratch = 5000};
  // The embedding's weights are not there in the backward: the head's chunk is the largest. bf16 gradient, state,
  // scratch.
  const std::uint64_t slot = (96 + 192 + 8) * kKi, smallest = kFixed + 2 * kSlot, with = smallest + 3 * slot + kSector;
  const Arrangement without = device(with - 1, request).made;
  EXPECT_EQ(without.update_slots.count, 0);
  EXPECT_EQ(without.on_device, std::vector<bool>(without.deferred.size(), false));
  const Arrangement made = device(with, request).made;
  EXPECT_EQ(made.update_slots.count, 3);
  EXPECT_EQ(made.update_slots.state, 96 * kKi);
  EXPECT_EQ(made.update_slots.scratch, (96 + 192) * kKi);
  EXPECT_EQ(made.update_slots.bytes, slot);
  EXPECT_EQ(made.on_device, (std::vector<bool>{false, true, true, true, true}));
  EXPECT_EQ(inputs(made), leaves({1, 2, 3}));  // nothing was left
  // An update that waits for the next forward finds the embedding's weights too.
  const Arrangement later = device(1 << 30, request, Shape::plain, true).made;
  EXPECT_EQ(later.on_device, std::vector<bool>(5, true));
  EXPECT_EQ(later.update_slots.bytes, (128 + 256 + 8) * kKi);
  // A share goes to whole units, evenly by their elements: 64 and 36 Ki of 220 Ki.
  request.device_update_share = 0.5;
  EXPECT_EQ(device(1 << 30, request, Shape::plain, true).made.on_device,
            (std::vector<bool>{true, false, false, true, false}));
  request.device_update_share = 0;
  EXPECT_EQ(device(1 << 30, request, Shape::plain, true).made.update_slots.count, 0);
}

TEST(ArrangeDevice, GradientsAreRoundedThereWhereTwoSlotsFit) {
  ArrangeRequest request{.gradient_slots = true};
  const std::uint64_t slot = 128 * kKi, smallest = kFixed + 2 * kSlot, with = smallest + 2 * slot + kSector;
  EXPECT_EQ(device(smallest, request).made.gradient_slot, 0U);  // what works without them works
  EXPECT_EQ(device(with - 1, request).made.gradient_slot, 0U);
  const Arrangement made = device(with, request).made;
  EXPECT_EQ(made.gradient_slot, slot);
  EXPECT_EQ(made.gradient_slots_begin() % kSector, 0U);
  EXPECT_GE(made.gradient_slots_begin(), made.slot_offset(made.slots));
  EXPECT_EQ(made.device_bytes(), made.gradient_slots_begin() + 2 * slot);
  EXPECT_LE(made.device_bytes() + kWorkspace, with);
  EXPECT_EQ(device(with, {}).made.gradient_slot, 0U);
  // Gradients that the device uses up need none: the embedding's leaves.
  request.device_update_share = 1;
  EXPECT_EQ(device(1 << 30, request).made.gradient_slot, slot);
  EXPECT_EQ(device(1 << 30, request, Shape::plain, true).made.gradient_slot, slot);
  EXPECT_GE(device(1 << 30, request).made.gradient_slots_begin(), device(1 << 30, request).made.update_slots_end());
  request.train = false;
  EXPECT_EQ(device(1 << 30, request).made.gradient_slot, 0U);
}

TEST(ArrangeDevice, WhatMeasuringFindsLiesBehindEachRoundedGradient) {
  const ArrangeRequest request{.gradient_slots = true, .measured_bytes = 100};
  const Arrangement made = device(1 << 30, request).made;
  EXPECT_EQ(made.measured_bytes, 100U);
  EXPECT_EQ(made.gradient_slot, 128 * kKi + kSector);
  EXPECT_EQ(made.device_bytes(), made.gradient_slots_begin() + 2 * made.gradient_slot);
  EXPECT_EQ(device(kFixed + 2 * kSlot, request).made.measured_bytes, 0U);  // no slots, no measuring
}

// Behind all else, and only where all weights lie on the device.
TEST(ArrangeDevice, StateStaysWhereAllElseHasRoom) {
  ArrangeRequest request{.update_scratch = 5000};
  for (const bool deferred : {false, true}) {
    const Arrangement without = device(1 << 30, request, Shape::plain, deferred).made;
    request.state_on_device = true;
    // A slot is for the gradient, where that does not stay, and for scratch. State is four bytes an element.
    const auto slots = [&](std::uint64_t kibi) { return 3 * (deferred ? 8 : 8 + 2 * kibi) * kKi + 2 * kSector; };
    const std::uint64_t bytes = (deferred ? 6 : 4) * kKi, all = without.device_bytes() + kWorkspace + kCarries;
    const auto made_of = [&](std::uint64_t budget) {
      const Arrangement made = device(budget, request, Shape::plain, deferred).made;
      EXPECT_LE(made.device_bytes() + kWorkspace + kCarries, budget);
      EXPECT_EQ(made.weight_ring, without.weight_ring);
      return made;
    };
    EXPECT_EQ(made_of(all + 32 * bytes + slots(32) - 1).device_resident, 0U);
    const Arrangement first = made_of(all + 32 * bytes + slots(32));
    ASSERT_EQ(first.device_resident, 32 * bytes);
    EXPECT_EQ(first.on_device, (std::vector<bool>{false, true, false, false, false}));
    EXPECT_EQ(first.device_state[0], kNowhere);
    EXPECT_EQ(first.device_state[1], first.device_resident_begin());
    EXPECT_EQ(first.device_gradient[1], deferred ? first.device_state[1] + 128 * kKi : kNowhere);
    EXPECT_EQ(first.device_place(ExtentKind::state, 1), first.device_state[1]);
    EXPECT_EQ(first.device_place(ExtentKind::hi, 1), kNowhere);
    // All but the embedding's, whose words are not there in the backward.
    const Arrangement most = made_of(1 << 30);
    EXPECT_EQ(most.device_resident, 156 * bytes);
    EXPECT_EQ(most.on_device, (std::vector<bool>{false, true, true, true, true}));
    EXPECT_EQ(most.update_slots.bytes, (deferred ? 8 : 8 + 2 * 48) * kKi);
    request.state_on_device = false;
  }
  request.state_on_device = true;
  request.train = false;
  EXPECT_EQ(device(1 << 30, request).made.device_resident, 0U);
}

TEST(ArrangeDevice, SwapsTakeTheHostFirstAndThenStorage) {
  ArrangeRequest request;
  request.swapped_bytes = {0, 4000, 9000, 5000, 0};
  request.swap_to_host = 2;
  request.swap_to_storage = 2;
  request.swap_workspace = 3000;
  const std::uint64_t slot = 8 * kKi + 12 * kKi, with = kFixed + 2 * slot + 3000;
  const Arrangement none = device(with - 1, request).made;
  EXPECT_EQ(none.slot_bytes, none.slots == 0 ? 0 : kSlot);
  EXPECT_EQ(activations(none), std::vector<Activations>(8, Activations::recompute));
  const Arrangement made = device(with, request).made;
  EXPECT_EQ(made.slots, 2);
  EXPECT_EQ(made.slot_bytes, slot);
  constexpr Activations kAgain = Activations::recompute, kSwap = Activations::swap;
  EXPECT_THAT(activations(made), ElementsAre(kAgain, kAgain, kAgain, kAgain, kSwap, kSwap, kSwap, kSwap));
  EXPECT_THAT(on_storage(made), ElementsAre(false, false, false, false, true, true, false, false));
  using Bytes = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_THAT(leaving(made), ElementsAre(Bytes(0, 0), Bytes(0, 0), Bytes(5000, 0), Bytes(5000, 0), Bytes(6000, 9000),
                                         Bytes(6000, 9000), Bytes(7000, 5000), Bytes(7000, 5000)));
  EXPECT_EQ(made.items[4].bytes(), slot);
  request.storage = false;
  EXPECT_EQ(on_storage(device(with, request).made), std::vector<bool>(8, false));
  // Where all that could be swapped is kept, there is nothing to swap, and no slot is taken for it.
  request.activation_bytes = {0, 8000, 16000, 24000, 0};
  const Arrangement kept = device(1 << 30, request).made;
  EXPECT_EQ(kept.slots, 0);
  EXPECT_EQ(kept.slot_bytes, 0U);
}

}  // namespace
}  // namespace tierflow::swap
