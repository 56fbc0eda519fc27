// A client that learns inside its visits which units it needs, and needs random ones, beside a plain loop that has all
// of them: under small budgets, delays and poison.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <random>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/visit_check.h"
#include "swap/visit_planner.h"
#include "tests/swap/visit_toy.h"

namespace tierflow::swap {
namespace {

struct Case {
  std::uint64_t host = 0, device = 0, chaos = 0;
  int units_per_need = 1;
  bool async = false;  // computation is enqueued, and the client goes on
};

class OnDemandTest : public ::testing::TestWithParam<Case> {
 protected:
  OnDemandTest()
      : folder_(std::filesystem::current_path() / ("on-demand-test-" + std::to_string(::getpid()))),
        layout_(units(),
                {{.units = {0}},
                 {.units = {1}, .on_demand = {4, 5, 6, 7, 8}},
                 {.units = {2}, .on_demand = {7, 8}},
                 {.units = {3}}},
                kChunkQuantum) {
    std::filesystem::create_directories(folder_);
  }
  ~OnDemandTest() override { std::filesystem::remove_all(folder_); }

  static std::vector<UnitShape> units() {
    std::vector<UnitShape> shapes;
    for (const std::uint64_t elements : {100, 20, 40, 90, 80, 70, 90, 60, 90})
      shapes.push_back({.name = "unit" + std::to_string(shapes.size()),
                        .groups = {{.elements = elements * 1024, .state_bytes_element = 4, .precision = "a"}}});
    shapes[6].groups[0].trainable = false;
    return shapes;
  }

  std::filesystem::path folder_;
  Layout layout_;
};

TEST_P(OnDemandTest, RandomNeedsHaveTheBitsOfThePlainLoop) {
  const Case& budgets = GetParam();
  auto arrangement = arrange(layout_, {.host_budget = budgets.host,
                                       .device_budget = budgets.device,
                                       .sums = true,
                                       .units_per_need = budgets.units_per_need});
  ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
  auto device = open_cpu_device({.chaos_seed = budgets.chaos, .async_compute = budgets.async});
  auto store = Store::create({.volume = {.folders = {folder_}, .allow_buffered = true, .allow_any_filesystem = true},
                              .scratch = {.gradient_sums = true}},
                             layout_);
  ASSERT_TRUE(store.ok()) << store.error().message();
  auto executor = Executor::create(*device, store.value().get(), layout_, *arrangement, {.chaos_seed = budgets.chaos});
  ASSERT_TRUE(executor.ok()) << executor.error().message();
  const int unit_count = static_cast<int>(layout_.units().size());
  std::vector<std::vector<std::uint16_t>> words(unit_count);
  std::vector<std::vector<std::byte>> state(unit_count);
  std::vector<std::vector<float>> sums(unit_count);
  const auto access = [&](ExtentKind kind, const Chunk& chunk, bool writes, const auto& use) {
    return (*executor)->access(kind, chunk.id, writes, use);
  };
  for (const Chunk& chunk : layout_.chunks()) {
    auto& all = words[chunk.unit];
    for (std::uint64_t i = 0; i < chunk.elements; ++i) all.push_back(word_at(chunk.unit, chunk.first + i));
    state[chunk.unit].resize(all.size());
    ASSERT_FALSE(access(ExtentKind::hi, chunk, true, [&](std::span<std::byte> bytes) {
      std::copy_n(all.begin() + chunk.first, chunk.elements, reinterpret_cast<std::uint16_t*>(bytes.data()));
    }));
    if (!chunk.trainable) continue;
    ASSERT_FALSE(access(ExtentKind::state, chunk, true,
                        [](std::span<std::byte> bytes) { std::ranges::fill(bytes, std::byte{0}); }));
  }

  VisitPlanner planner(layout_, *arrangement);
  VisitChecker checker(layout_, *arrangement);
  const auto work = std::make_shared<Work>();
  std::minstd_rand random(5);
  int count = 0;
  // One part of a visit: the weights are compared, and each gradient grows by what this part brings.
  const auto compute = [&](const Entered& entered, const std::vector<bool>& these) {
    ++count;
    ASSERT_EQ(entered.visit->weights.size(), these.size());
    device->enqueue(StreamId::compute,
                    [&, arena = entered.arena, visit = *entered.visit, wanted = these, number = count](auto&) {
                      const std::vector<int>& own = layout_.stages()[visit.stage].units;
                      for (std::size_t position = 0; position < wanted.size(); ++position) {
                        const int unit = visit.unit(own, position);
                        const auto* seen = reinterpret_cast<const std::uint16_t*>(arena + visit.weights[position]);
                        ASSERT_TRUE(std::ranges::equal(words[unit], std::span(seen, words[unit].size())))
                            << "stale weights of " << unit;
                        if (!wanted[position]) continue;
                        auto* sum = reinterpret_cast<float*>(arena + visit.gradients[position]);
                        sums[unit].resize(words[unit].size(), 0.0F);
                        for (std::size_t i = 0; i < words[unit].size(); ++i) {
                          const float brings = value_of(rounded(gradient_at(words[unit][i], number, i)), 0);
                          sum[i] = visit.fresh_gradient[position] ? brings : sum[i] + brings;
                          sums[unit][i] += brings;
                        }
                      }
                    });
  };
  const auto visit = [&](int stage, Pass pass) {
    if (HasFatalFailure()) return;  // a plan that was not appended leaves a gap
    const StageShape& shape = layout_.stages()[stage];
    const VisitRequest request{
        .stage = stage, .pass = pass, .gradients = std::vector<bool>(shape.units.size(), pass == Pass::backward)};
    Plan plan = planner.visit(request);
    ASSERT_FALSE(checker.visit(plan, request));
    (*executor)->append(std::move(plan), work);
    auto entered = (*executor)->enter(stage, pass, 0);
    ASSERT_TRUE(entered.ok()) << entered.error().message();
    // What the stage's own gradient is rounded from: one part brings it, further parts leave it alone.
    compute(*entered, request.gradients);
    for (int parts = shape.on_demand.empty() ? 0 : static_cast<int>(random() % 5); parts > 0; --parts) {
      NeedRequest need;
      for (int i = static_cast<int>(random() % budgets.units_per_need); i >= 0; --i)
        if (const int unit = shape.on_demand[random() % shape.on_demand.size()];
            std::ranges::find(need.units, unit) == need.units.end())
          need.units.push_back(unit);
      std::vector<bool> wanted(shape.units.size(), false);
      for (const int unit : need.units) {
        need.gradients.push_back(pass == Pass::backward && layout_.gradient_bytes(unit) != 0);
        wanted.push_back(need.gradients.back());
      }
      auto part = planner.need(need);
      ASSERT_TRUE(part.ok()) << part.error().message();
      const io::Error wrong = checker.need(*part, need);
      ASSERT_FALSE(wrong) << wrong.message();
      entered = (*executor)->need(std::move(part).value(), work);
      ASSERT_TRUE(entered.ok()) << entered.error().message();
      compute(*entered, wanted);
      if (HasFatalFailure()) return;
    }
    ASSERT_FALSE((*executor)->leave());
  };
  const int stages = static_cast<int>(layout_.stages().size());
  for (int round = 0; round < 4; ++round) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int stage = 0; stage < stages; ++stage) visit(stage, Pass::forward);
      for (int stage = stages - 1; stage >= 0; --stage) visit(stage, Pass::backward);
      if (HasFatalFailure()) return;
    }
    Plan closing = planner.close();
    ASSERT_FALSE(checker.close(closing));
    (*executor)->append(std::move(closing), work);
    ASSERT_FALSE(device->synchronize(device->record(StreamId::compute)));
    std::vector<int> owed;
    for (int unit = 0; unit < unit_count; ++unit) {
      ASSERT_EQ(planner.gradients_of(unit) != 0, !sums[unit].empty()) << unit;
      if (sums[unit].empty()) continue;
      owed.push_back(unit);
      for (std::size_t i = 0; i < words[unit].size(); ++i)
        apply(words[unit][i], rounded(sums[unit][i]), state[unit][i]);
      sums[unit].clear();
    }
    ASSERT_FALSE((*executor)->finish_updates());
    Plan next = planner.owe(owed);
    ASSERT_FALSE(checker.owe(next, owed));
    (*executor)->append(std::move(next), work);
  }
  for (int unit = 0; unit < unit_count; ++unit) {
    Plan last = planner.apply_owed(unit);
    ASSERT_FALSE(checker.apply_owed(last, unit));
    (*executor)->append(std::move(last), work);
  }
  ASSERT_FALSE((*executor)->drain());
  for (const Chunk& chunk : layout_.chunks())
    ASSERT_FALSE(access(ExtentKind::hi, chunk, false, [&](std::span<std::byte> bytes) {
      EXPECT_TRUE(std::equal(words[chunk.unit].begin() + chunk.first,
                             words[chunk.unit].begin() + chunk.first + chunk.elements,
                             reinterpret_cast<const std::uint16_t*>(bytes.data())))
          << "unit " << chunk.unit;
    }));
  executor->reset();
  store.value()->remove_files();
}

INSTANTIATE_TEST_SUITE_P(
    Budgets, OnDemandTest,
    ::testing::Values(Case{.host = 64 << 20, .device = 64 << 20, .units_per_need = 5},
                      Case{.host = 64 << 20, .device = 64 << 20, .chaos = 7, .units_per_need = 2},
                      Case{.host = 2 << 20, .device = 1300 << 10},
                      Case{.host = 2 << 20, .device = 1300 << 10, .chaos = 3},
                      Case{.host = 3 << 20, .device = 2 << 20, .chaos = 11, .units_per_need = 2},
                      Case{.host = 64 << 20, .device = 1300 << 10, .async = true},
                      Case{.host = 2 << 20, .device = 1300 << 10, .chaos = 5, .async = true},
                      Case{.host = 64 << 20, .device = 2 << 20, .chaos = 13, .units_per_need = 2, .async = true},
                      Case{.host = 2 << 20, .device = 2 << 20, .chaos = 19, .units_per_need = 2}));

// Passes without gradients whose parts are planned ahead of their computation, of several micro-batches each.
TEST_P(OnDemandTest, PartsThatArePlannedAheadHaveTheirUnits) {
  const Case& budgets = GetParam();
  auto arrangement = arrange(
      layout_, {.host_budget = budgets.host, .device_budget = budgets.device, .micro_batches = 3, .train = false});
  ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
  auto device = open_cpu_device({.chaos_seed = budgets.chaos, .async_compute = budgets.async});
  auto store =
      Store::create({.volume = {.folders = {folder_}, .allow_buffered = true, .allow_any_filesystem = true}}, layout_);
  ASSERT_TRUE(store.ok()) << store.error().message();
  auto executor = Executor::create(*device, store.value().get(), layout_, *arrangement, {.chaos_seed = budgets.chaos});
  ASSERT_TRUE(executor.ok()) << executor.error().message();
  for (const Chunk& chunk : layout_.chunks())
    ASSERT_FALSE((*executor)->access(ExtentKind::hi, chunk.id, true, [&](std::span<std::byte> bytes) {
      auto* words = reinterpret_cast<std::uint16_t*>(bytes.data());
      for (std::uint64_t i = 0; i < chunk.elements; ++i) words[i] = word_at(chunk.unit, chunk.first + i);
    }));
  VisitPlanner planner(layout_, *arrangement);
  VisitChecker checker(layout_, *arrangement);
  std::minstd_rand random(7);
  for (int pass = 0; pass < 6; ++pass)
    for (int stage = 0; stage < static_cast<int>(layout_.stages().size()); ++stage) {
      const StageShape& shape = layout_.stages()[stage];
      const VisitRequest request{.stage = stage,
                                 .pass = Pass::evaluate,
                                 .gradients = std::vector<bool>(shape.units.size(), false),
                                 .micro_batches = 1 + static_cast<int>(random() % 3)};
      Plan plan = planner.visit(request);
      ASSERT_FALSE(checker.visit(plan, request));
      (*executor)->append(std::move(plan), nullptr);
      std::vector<int> needed = {-1};  // the visit before its parts
      for (const int unit : shape.on_demand)
        if (random() % 2 != 0) needed.push_back(unit);
      if (random() % 4 != 0) planner.will_need({needed.begin() + 1, needed.end()});
      for (const int unit : needed) {
        if (unit < 0) continue;
        const NeedRequest need{.units = {unit}, .gradients = {false}};
        auto part = planner.need(need);
        ASSERT_TRUE(part.ok()) << part.error().message();
        const io::Error wrong = checker.need(*part, need);
        ASSERT_FALSE(wrong) << wrong.message();
        (*executor)->append(std::move(part).value(), nullptr);
      }
      for (const int unit : needed)
        for (int micro_batch = 0; micro_batch < request.micro_batches; ++micro_batch) {
          auto at = (*executor)->enter(stage, Pass::evaluate, micro_batch);
          ASSERT_TRUE(at.ok()) << at.error().message();
          ASSERT_EQ(at->visit->needed, unit < 0 ? std::vector<int>{} : std::vector<int>{unit});
          device->enqueue(StreamId::compute, [&, arena = at->arena, visit = *at->visit](auto&) {
            for (std::size_t position = 0; position < visit.weights.size(); ++position) {
              const int seen = visit.unit(layout_.stages()[visit.stage].units, position);
              const auto* words = reinterpret_cast<const std::uint16_t*>(arena + visit.weights[position]);
              for (std::uint64_t i = 0; i < layout_.unit_elements(seen); i += 61)
                ASSERT_EQ(words[i], word_at(seen, i)) << "unit " << seen;
            }
          });
          ASSERT_FALSE((*executor)->leave());
        }
    }
  ASSERT_FALSE((*executor)->drain());
  executor->reset();
  store.value()->remove_files();
}

TEST(OnDemand, RefusesWhatNobodyArranged) {
  std::vector<UnitShape> units;
  for (int unit = 0; unit < 4; ++unit)
    units.push_back({.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}});
  EXPECT_THROW(Layout(units, {{.units = {0}, .on_demand = {1}}, {.units = {1}}}, kChunkQuantum), std::logic_error);
  EXPECT_THROW(Layout(units, {{.units = {0}}, {.units = {1}, .on_demand = {0}}}, kChunkQuantum), std::logic_error);
  const Layout layout(units, {{.units = {0}, .on_demand = {1, 2}}, {.units = {3}}}, kChunkQuantum);
  const auto whole_steps = arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20});
  ASSERT_FALSE(whole_steps.ok());
  EXPECT_NE(whole_steps.error().message().find("units on demand"), std::string::npos);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  VisitPlanner planner(layout, arrangement);
  const auto refused = [&](const std::vector<int>& needed) {
    const auto plan = planner.need({.units = needed, .gradients = std::vector<bool>(needed.size(), false)});
    return plan.ok() ? std::string() : plan.error().message();
  };
  EXPECT_NE(refused({1}).find("no visit"), std::string::npos);
  planner.visit({.stage = 0, .gradients = {false}});
  EXPECT_EQ(refused({1}), "");
  EXPECT_NE(refused({3}).find("stage 0 does not have unit 3"), std::string::npos);
  EXPECT_NE(refused({1, 1}).find("unit 1 is named twice"), std::string::npos);
  EXPECT_NE(refused({1, 2}).find("16384 bytes"), std::string::npos);
  planner.close();
  EXPECT_NE(refused({1}).find("no visit"), std::string::npos);
}

TEST(OnDemand, NothingIsNeededBehindAVisitsEnd) {
  const std::vector<UnitShape> units(
      2, {.name = "unit", .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "a"}}});
  const Layout layout(units, {{.units = {0}, .on_demand = {1}}}, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 8 << 20, .device_budget = 8 << 20, .sums = true}).value();
  const std::pair<const char*, std::function<void(VisitPlanner&)>> ends[] = {
      {"close", [](VisitPlanner& planner) { planner.close(); }},
      {"owe", [](VisitPlanner& planner) { planner.owe({}); }},
      {"drop", [](VisitPlanner& planner) { planner.drop(0); }},
      {"apply_owed", [](VisitPlanner& planner) { planner.apply_owed(0); }},
      {"commit", [](VisitPlanner& planner) { planner.commit(); }}};
  for (const auto& [name, end] : ends) {
    VisitPlanner planner(layout, arrangement);
    planner.visit({.stage = 0, .gradients = {false}});
    EXPECT_TRUE(planner.need({.units = {1}, .gradients = {false}}).ok());
    end(planner);
    EXPECT_FALSE(planner.need({.units = {1}, .gradients = {false}}).ok()) << name;
  }
}

}  // namespace
}  // namespace tierflow::swap
