// Plans as data: the checker proves random ones and refuses damaged ones, the simulator's clock obeys what can be
// worked out by hand, and a timeline names what compute waited for.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <ranges>
#include <utility>

#include "swap/arrange.h"
#include "swap/check.h"
#include "swap/planner.h"
#include "swap/simulator.h"

namespace tierflow::swap {
namespace {

struct Shapes {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
};

Shapes random_shapes(std::minstd_rand& random) {
  Shapes shapes;
  const bool tied = random() % 3 == 0;
  const int blocks = 1 + static_cast<int>(random() % 6);
  const auto unit = [&](const char* name, std::uint64_t most, bool trainable) {
    UnitShape shape{.name = name};
    const std::uint64_t matrix = kElementsPad * (1 + random() % std::max<std::uint64_t>(1, most / kElementsPad));
    shape.groups.push_back({.elements = matrix, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"});
    if (random() % 2 == 0)
      shape.groups.push_back({.elements = kElementsPad, .state_bytes_element = 10, .precision = "b"});
    for (GroupShape& group : shape.groups) group.trainable = trainable;
    if (random() % 4 == 0) {
      const std::uint64_t more = kElementsPad * (1 + random() % 60);
      shape.groups.push_back(
          {.trainable = false, .rewritten = more / kElementsPad % 2 == 0, .elements = more, .state_bytes_element = 2});
    }
    if (most == 0) shape.groups.clear();  // a layer without parameters
    shapes.units.push_back(std::move(shape));
  };
  const bool frozen = random() % 4 == 0;
  unit("embedding", 400 * 1024, true);
  shapes.stages.push_back({.units = {0}, .backward_needs_weights = false});
  for (int block = 0; block < blocks; ++block) {
    unit("block", random() % 8 == 0 ? 0 : 300 * 1024, !(frozen && random() % 2 == 0));
    shapes.stages.push_back({.units = {1 + block}, .carry_bytes = kSector * (1 + random() % 8)});
    if (random() % 3 == 0) shapes.stages.back().together = 2 + static_cast<int>(random() % 2);
  }
  unit("head", tied ? kElementsPad : 300 * 1024, true);
  shapes.stages.push_back({.units = {1 + blocks}, .carry_bytes = kSector});
  if (tied) shapes.stages.back().units.push_back(0);
  return shapes;
}

// A stage for each.
Shapes equal_units(int count) {
  Shapes shapes;
  for (int unit = 0; unit < count; ++unit) {
    shapes.units.push_back(
        {.name = "unit", .groups = {{.elements = 80 * 1024, .state_bytes_element = 4, .precision = "a"}}});
    shapes.stages.push_back({.units = {unit}, .carry_bytes = unit == 0 ? 0 : kSector});
  }
  return shapes;
}

struct Planned {
  std::unique_ptr<Layout> layout;
  Arrangement arrangement;
};

// Budgets from the smallest that works to more than enough.
Planned random_arrangement(std::minstd_rand& random) {
  Planned planned;
  Shapes shapes = random_shapes(random);
  planned.layout = std::make_unique<Layout>(std::move(shapes.units), std::move(shapes.stages), kChunkQuantum);
  ArrangeRequest request{.micro_batches = 1 + static_cast<int>(random() % 4), .staged = random() % 2 == 0};
  if (random() % 2 == 0) request.deferred_share = static_cast<double>(random() % 5) / 4;
  if (random() % 2 == 0) request.device_update_share = static_cast<double>(1 + random() % 4) / 4;
  request.update_scratch = random() % 2 == 0 ? 0 : 1000;
  request.gradient_slots = planned.layout->chunks().size() % 2 == 0;
  request.measured_bytes = planned.layout->chunks().size() % 4 == 0 ? 24 : 0;
  request.state_on_device = planned.layout->chunks().size() % 3 != 0;
  if (random() % 2 == 0) {
    for (std::size_t stage = 0; stage < planned.layout->stages().size(); ++stage) {
      const bool block = stage > 0 && stage + 1 < planned.layout->stages().size();
      request.activation_bytes.push_back(block && random() % 4 != 0 ? random() % (1 << 20) : 0);
      request.swapped_bytes.push_back(request.activation_bytes.back() / 2);
    }
    request.swap_to_host = static_cast<int>(random() % 6);
    request.swap_to_storage = static_cast<int>(random() % 6);
    request.swap_workspace = random() % (1 << 20);
  }
  for (std::uint64_t mebibytes = 1;; mebibytes += 1 + random() % 2) {
    request.host_budget = request.device_budget = (mebibytes << 20) + random() % (1 << 20);
    if (random() % 2 == 0) request.host_budget += random() % (16 << 20);
    if (random() % 2 == 0) request.device_budget += random() % (16 << 20);
    auto result = arrange(*planned.layout, request);
    if (!result.ok()) continue;
    planned.arrangement = std::move(result).value();
    return planned;
  }
}

bool defers(const Arrangement& arrangement) {
  return std::find(arrangement.deferred.begin(), arrangement.deferred.end(), true) != arrangement.deferred.end();
}

Rates rates_of(const Layout& layout) {
  return {.machine = {.disk_read = 1e9,
                      .disk_write = 5e8,
                      .upload = 8e9,
                      .download = 8e9,
                      .cast = 1e9,
                      .fill = 2e10,
                      .measure = 4e9,
                      .checksum = 8e9,
                      .cores = 2,
                      .threads = 2},
          .update = {{"a", 1e9}, {"b", 2e9}},
          .stages = std::vector<StageSeconds>(
              layout.stages().size(), StageSeconds{.forward = 1e-3, .backward = 3e-3, .head = 4e-3, .evaluate = 1e-3})};
}

// A device that holds every word, and updates each where it lies, gets none of them after the first step.
TEST(Planner, WordsUpdatedOnTheDeviceAreNotUploadedAgain) {
  for (const bool staged : {false, true})
    for (const double share : {0.0, 0.5, 1.0}) {
      std::vector<UnitShape> units;
      std::vector<StageShape> stages;
      for (int unit = 0; unit < 6; ++unit) {
        units.push_back({.name = "unit", .groups = {{.elements = 4 * kChunkQuantum, .state_bytes_element = 4}}});
        stages.push_back({.units = {unit}, .carry_bytes = kSector});
      }
      const Layout layout(units, stages, kChunkQuantum);
      auto arranged = arrange(layout, {.host_budget = 64 << 20,
                                       .device_budget = 64 << 20,
                                       .staged = staged,
                                       .device_update_share = share,
                                       .storage = false});
      ASSERT_TRUE(arranged.ok());
      const Arrangement& made = *arranged;
      Planner planner(layout, made);
      PlanChecker checker(layout, made);
      int uploaded = 0, updated = 0;
      for (int step = 0; step < 3; ++step) {
        const bool pending = step > 0 && defers(made);
        const Plan plan = planner.train_step(pending, false);
        ASSERT_EQ(checker.train_step(plan, pending, false).message(), "");
        uploaded = static_cast<int>(std::ranges::count(plan.tasks, TaskKind::upload_hi, &Task::kind));
        updated = static_cast<int>(std::ranges::count(plan.tasks, TaskKind::update_on_device, &Task::kind));
      }
      const int on_the_host = static_cast<int>(std::ranges::count(made.on_device, false));
      EXPECT_EQ(uploaded, on_the_host) << staged << share;
      EXPECT_EQ(updated, 24 - on_the_host);
      EXPECT_EQ(on_the_host, 24 - static_cast<int>(24 * share));
    }
}

TEST(PlanChecker, ProvesThousandsOfRandomPlans) {
  std::minstd_rand random(11);
  int plans = 0;
  std::map<TaskKind, int> of_kind;
  for (int round = 0; round < 2500; ++round) {
    const Planned planned = random_arrangement(random);
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    bool pending = false;
    for (int step = 0; step < 3; ++step) {
      const bool commits = random() % 2 == 0;
      const Plan plan = planner.train_step(pending, commits);
      for (const Task& task : plan.tasks) ++of_kind[task.kind];
      const io::Error error = checker.train_step(plan, pending, commits);
      ASSERT_FALSE(error) << "round " << round << " step " << step << ": " << error.message();
      // A step that is skipped leaves nothing to apply.
      pending = defers(planned.arrangement) && random() % 4 != 0;
      ++plans;
    }
    if (pending) {
      const io::Error error = checker.flush(planner.flush());
      ASSERT_FALSE(error) << "round " << round << " flush: " << error.message();
      ++plans;
    }
    for (int pass = 0; pass < 3; ++pass) {
      const int micro_batches = 1 + static_cast<int>(random() % planned.arrangement.micro_batches);
      const Plan plan = planner.evaluate(micro_batches, random() % 3 != 0);
      ASSERT_EQ(std::ranges::count(plan.tasks, TaskKind::compute, &Task::kind),
                std::ssize(planned.layout->stages()) * micro_batches);
      const io::Error error = checker.evaluate(plan);
      ASSERT_FALSE(error) << "round " << round << " evaluate: " << error.message();
      ++plans;
    }
    const io::Error error = checker.train_step(planner.train_step(false), false);
    ASSERT_FALSE(error) << "round " << round << " step after evaluations: " << error.message();
    ++plans;
  }
  EXPECT_GT(plans, 10000);
  for (const TaskKind kind : {TaskKind::save_activations, TaskKind::load_activations, TaskKind::read_activations,
                              TaskKind::write_activations, TaskKind::commit, TaskKind::keep_gradient})
    EXPECT_GT(of_kind[kind], 1000) << task_name(kind);
}

// Generation passes over the same weights again and again: the links must not rest while a pass ends.
TEST(Planner, AnExpectedEvaluationIsFetchedWhileTheLastOneEnds) {
  const Shapes shapes = equal_units(6);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement arrangement =
      arrange(layout, {.host_budget = 512 << 10, .device_budget = 800 << 10, .micro_batches = 1}).value();
  ASSERT_LT(arrangement.weight_ring, 4 * layout.unit_word_bytes(0)) << "some of the weights must move in each pass";
  const auto uploads = [&](const Plan& plan, int unit) {
    return std::ranges::count_if(plan.tasks, [&](const Task& task) {
      return task.kind == TaskKind::upload_hi && layout.chunks()[task.chunk].unit == unit;
    });
  };
  const auto all = [&](const Plan& plan) {
    std::ptrdiff_t count = 0;
    for (int unit = 0; unit < 6; ++unit) count += uploads(plan, unit);
    return count;
  };
  const std::ptrdiff_t chunks = std::ssize(layout.chunks_of(0));
  Planner planner(layout, arrangement), without(layout, arrangement);
  const Plan first = planner.evaluate(1, true), alone = without.evaluate(1);
  ASSERT_EQ(all(alone), 6 * chunks);
  EXPECT_EQ(uploads(first, 0), 2 * chunks);
  // Behind the last computation's fetch, before the computation itself: it serves the next pass meanwhile.
  const auto compute = std::find_if(first.tasks.rbegin(), first.tasks.rend(),
                                    [&](const Task& task) { return task.kind == TaskKind::compute; });
  EXPECT_TRUE(std::any_of(first.tasks.begin(), compute.base(), [&, seen = 0](const Task& task) mutable {
    return task.kind == TaskKind::upload_hi && layout.chunks()[task.chunk].unit == 0 && ++seen > chunks;
  }));
  std::ptrdiff_t moved = all(first), moved_alone = all(alone);
  for (const bool another : {true, true, false}) {
    const Plan next = planner.evaluate(1, another);
    EXPECT_EQ(uploads(next, 0), another ? chunks : 0);
    moved += all(next);
    moved_alone += all(without.evaluate(1));
  }
  EXPECT_EQ(moved, moved_alone) << "nothing is fetched twice";
}

// Where nothing is trained, what has room on the device comes once, and what has not comes in each pass.
TEST(Planner, EvaluationsMoveWhatDoesNotStay) {
  Shapes shapes = equal_units(12);
  shapes.stages.back().units.push_back(0);  // tied
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const std::uint64_t words = layout.unit_word_bytes(0);
  for (const std::uint64_t host : {std::uint64_t{1} << 20, 13 * words}) {
    const Arrangement made =
        arrange(layout, {.host_budget = host, .device_budget = 9 * words, .micro_batches = 1, .train = false}).value();
    std::uint64_t passing = 0;
    for (const Chunk& chunk : layout.chunks()) {
      const bool stays = made.word_place(chunk.unit) != kNowhere;
      passing += stays ? 0 : chunk.word_bytes();
      EXPECT_FALSE(host == 1 << 20 && stays && made.hi_resident[chunk.id]) << "it is read once";
    }
    ASSERT_EQ(passing, 6 * words);  // beside a ring of three, six stay
    Planner planner(layout, made);
    PlanChecker checker(layout, made);
    for (int pass = 0; pass < 4; ++pass) {
      const Plan plan = planner.evaluate(1);
      ASSERT_EQ(checker.evaluate(plan).message(), "");
      std::uint64_t moved = 0;
      for (const Task& task : plan.tasks)
        if (task.kind == TaskKind::upload_hi) moved += layout.chunks()[task.chunk].word_bytes();
      EXPECT_LE(moved, pass == 0 ? 12 * words : passing);
      EXPECT_GE(moved, pass == 0 ? 12 * words : passing - 3 * words);  // the ring still holds what came last
    }
  }
}

// What the backward takes next waits on its lane for nothing that is needed later.
TEST(Planner, SavedActivationsComeAheadOfOtherWeightsAndUpdates) {
  int followed = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::minstd_rand random(seed);
    const Planned planned = random_arrangement(random);
    if (std::ranges::any_of(planned.arrangement.items, &Item::on_storage)) continue;
    Planner planner(*planned.layout, planned.arrangement);
    const std::vector<Task> tasks = planner.train_step(false).tasks;
    const auto is_load = [](const Task& task) { return task.kind == TaskKind::load_activations; };
    for (auto task = tasks.begin(); task != tasks.end(); ++task) {
      if (task->kind != TaskKind::compute || task->pass != Pass::backward || task->device_offset == kNowhere) continue;
      if (std::find_if(task, tasks.end(), is_load) == tasks.end()) break;
      EXPECT_TRUE(is_load(task[1])) << "seed " << seed << ": " << task_name(task[1].kind);
      ++followed;
    }
  }
  EXPECT_GT(followed, 200);
}

// What the way back takes first comes while the last stage is computed.
TEST(Planner, SavedActivationsComeBesideTheHead) {
  const Shapes shapes = equal_units(4);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 << 20,
                                            .device_budget = 64 << 20,
                                            .swapped_bytes = {0, 8192, 8192, 0},
                                            .swap_to_host = 4,
                                            .micro_batches = 2})
                               .value();
  const std::vector<Task> tasks = Planner(layout, made).train_step(false).tasks;
  const auto load = std::ranges::find(tasks, TaskKind::load_activations, &Task::kind);
  ASSERT_NE(load, tasks.end());
  EXPECT_LT(load, std::ranges::find_if(tasks, [](const Task& task) {
              return task.kind == TaskKind::compute && task.pass == Pass::head;
            }));
}

TEST(Planner, FourVisitsAreFetchedAheadWhereTheyHaveRoom) {
  const Shapes shapes = equal_units(12);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20}).value();
  const std::vector<Task> tasks = Planner(layout, made).evaluate(1).tasks;
  const auto compute = std::ranges::find(tasks, TaskKind::compute, &Task::kind);
  EXPECT_EQ(std::count_if(tasks.begin(), compute, [](const Task& task) { return task.kind == TaskKind::upload_hi; }),
            (1 + kLookahead) * std::ssize(layout.chunks_of(0)));
}

// What moves a unit's words serves the visit that they come for, though another one computes meanwhile.
TEST(Planner, AFetchServesItsOwnVisit) {
  const Shapes shapes = equal_units(6);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 2 << 20, .device_budget = 64 << 20}).value();
  Planner planner(layout, made);
  for (const Plan& plan : {planner.evaluate(1), planner.train_step(false)})
    for (const Task& task : plan.tasks)
      if (task.kind == TaskKind::upload_hi) {
        EXPECT_EQ(task.stage, layout.chunks()[task.chunk].unit);
      }
}

// What is fetched for the next evaluation is only cached when the plan ends: it takes no room for good.
TEST(Planner, EvaluationsThatFollowOneAnotherAllFetchAhead) {
  const Shapes shapes = equal_units(12);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  Arrangement made = arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .train = false}).value();
  made.weight_ring = (2 + kLookahead) * layout.unit_word_bytes(0);
  made.word_places.clear();
  Planner planner(layout, made);
  for (int evaluation = 0; evaluation < 5; ++evaluation) {
    int newest = 0;
    for (const Task& task : planner.evaluate(1, /*another=*/true).tasks) {
      if (task.kind == TaskKind::upload_hi) newest = layout.chunks()[task.chunk].unit;
      if (task.kind == TaskKind::compute && task.stage < 8) {
        EXPECT_EQ(newest, task.stage + kLookahead) << evaluation;
      }
    }
  }
}

// As far ahead of the backward as there is room, with a buffer read anew for each that was loaded.
TEST(Planner, SavedActivationsFillSlotsAndBuffers) {
  const Shapes shapes = equal_units(8);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 << 20,
                                            .device_budget = 64 << 20,
                                            .swapped_bytes = {0, 8192, 8192, 8192, 8192, 8192, 8192, 0},
                                            .swap_to_storage = 12,
                                            .micro_batches = 2})
                               .value();
  ASSERT_EQ(made.activation_buffers, 4);
  ASSERT_EQ(made.slots, 2);
  const std::vector<Task> tasks = Planner(layout, made).train_step(false).tasks;
  const auto backward = std::ranges::find_if(
      tasks, [](const Task& task) { return task.kind == TaskKind::compute && task.pass == Pass::backward; });
  const auto before = [&](TaskKind kind) { return std::ranges::count(tasks.begin(), backward, kind, &Task::kind); };
  EXPECT_EQ(before(TaskKind::load_activations), made.slots);
  EXPECT_EQ(before(TaskKind::read_activations), made.slots + made.activation_buffers);
}

TEST(Planner, WordsThatStayInRamAreUpdatedThere) {
  const Shapes shapes = equal_units(4);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 << 20,
                                            .device_budget = 64 << 20,
                                            .staged = false,
                                            .gradient_slots = true,
                                            .measured_bytes = 24})
                               .value();
  const Plan plan = Planner(layout, made).train_step(false);
  EXPECT_EQ(std::ranges::count(plan.tasks, TaskKind::download_hi, &Task::kind), 0);
  // The gradient was measured on its way, which the clock has to know.
  for (const Task& task : plan.tasks)
    if (task.kind == TaskKind::update) {
      EXPECT_TRUE(task.measures && task.found);
    }
}

TEST(Planner, AnUndoingServesNoVisit) {
  const Shapes shapes = equal_units(4);
  const Layout layout(shapes.units, shapes.stages, kChunkQuantum);
  const Arrangement made = arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20}).value();
  Planner planner(layout, made);
  planner.train_step(false, /*commits=*/true, Updates::at_once);
  const Plan plan = planner.undo();
  EXPECT_FALSE(plan.tasks.empty());
  for (const Task& task : plan.tasks) EXPECT_EQ(task.stage, -1);
}

// With another range it would wait for tasks that it has nothing to do with.
TEST(Planner, AComputationTouchesItsSlotAndNoMore) {
  std::minstd_rand random(7);
  for (int found = 0; found < 200;) {
    const Planned planned = random_arrangement(random);
    for (const Task& task : Planner(*planned.layout, planned.arrangement).train_step(false).tasks) {
      if (task.kind != TaskKind::compute || task.device_offset == kNowhere) continue;
      ++found;
      const std::uint64_t end = task.device_offset + planned.arrangement.items[task.item].bytes();
      const auto slot = std::ranges::find(task.accesses, end, &Access::end);
      ASSERT_NE(slot, task.accesses.end());
      EXPECT_EQ(slot->space, Space::device);
      EXPECT_EQ(slot->begin, task.device_offset);
      EXPECT_TRUE(slot->writes);
    }
  }
}

// Damages plans in one way and counts in how many of the sequences that is noticed.
int noticed(const std::function<bool(Plan&, std::minstd_rand&)>& damage, int rounds) {
  std::minstd_rand random(5);
  int found = 0, tried = 0;
  while (tried < rounds) {
    const Planned planned = random_arrangement(random);
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    bool pending = false, damaged = false, error = false;
    for (int step = 0; step < 3; ++step) {
      Plan plan = planner.train_step(pending, step == 1);
      if (step == 1) damaged = damage(plan, random);
      error = error || checker.train_step(plan, pending, step == 1);
      pending = defers(planned.arrangement);
    }
    if (!damaged) continue;
    ++tried;
    found += error ? 1 : 0;
  }
  return found;
}

// The same of one task of a kind.
int noticed_in(TaskKind kind, const std::function<bool(Task&)>& damage, int rounds) {
  return noticed(
      [&](Plan& plan, std::minstd_rand& random) {
        std::vector<Task*> suitable;
        for (Task& task : plan.tasks)
          if (task.kind == kind) suitable.push_back(&task);
        return !suitable.empty() && damage(*suitable[random() % suitable.size()]);
      },
      rounds);
}

TEST(PlanCheckerControl, NoticesAMissingDependency) {
  const auto forget = [](Task& task) { return !std::exchange(task.dependencies, {}).empty(); };
  EXPECT_EQ(noticed_in(TaskKind::compute, forget, 20), 20);
}
TEST(PlanCheckerControl, NoticesAnUploadOfAnotherChunk) {
  const auto rename = [](Task& task) {
    task.chunk = task.chunk == 0 ? 1 : 0;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::upload_hi, rename, 20), 20);
}
TEST(PlanCheckerControl, NoticesActivationsOfAnotherMicroBatch) {
  const auto rename = [](Task& task) {
    task.stage += task.stage == 1 ? 1 : -1;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::read_activations, rename, 20), 20);
  EXPECT_EQ(noticed_in(TaskKind::load_activations, rename, 20), 20);
}
TEST(PlanCheckerControl, NoticesAnotherItem) {
  const auto rename = [](Task& task) {
    if (task.item == -1) return false;
    task.item += task.item == 0 ? 1 : -1;
    return true;
  };
  for (const TaskKind kind : {TaskKind::compute, TaskKind::save_activations, TaskKind::write_activations,
                              TaskKind::read_activations, TaskKind::load_activations})
    EXPECT_EQ(noticed_in(kind, rename, 20), 20) << task_name(kind);
}
TEST(PlanCheckerControl, NoticesAnItemThatIsNotMadeOrNotRead) {
  const auto forget = [](Task& task) {
    // Where nothing of it moves, nothing else shows.
    return task.device_offset == kNowhere && std::exchange(task.item, -1) != -1;
  };
  EXPECT_EQ(noticed_in(TaskKind::compute, forget, 20), 20);
}
// Each of two backwards names what the other reads; nothing of either moves.
TEST(PlanCheckerControl, NoticesItemsThatChangePlaces) {
  const auto exchange = [](Plan& plan, std::minstd_rand&) {
    Task* first = nullptr;
    for (Task& task : plan.tasks) {
      if (task.item == -1 || task.pass != Pass::backward || task.device_offset != kNowhere) continue;
      if (first != nullptr && first->activations == task.activations) {
        std::swap(first->item, task.item);
        return true;
      }
      if (first == nullptr) first = &task;
    }
    return false;
  };
  EXPECT_EQ(noticed(exchange, 20), 20);
}
// Each of two pieces comes from the other's place on the host, and waits for whoever made it.
TEST(PlanCheckerControl, NoticesBytesOfAnotherItem) {
  const auto exchange = [](Plan& plan, std::minstd_rand&) {
    Task* first = nullptr;
    for (Task& task : plan.tasks) {
      if (task.kind != TaskKind::load_activations || task.words.where != HostRef::Where::activations) continue;
      if (first == nullptr || first->bytes != task.bytes) {
        first = &task;
        continue;
      }
      std::swap(first->words, task.words);
      const TaskId id = plan.first_id + static_cast<TaskId>(first - plan.tasks.data());
      for (const TaskId dependency : task.dependencies)
        if (dependency < id) first->dependencies.push_back(dependency);
      task.dependencies.insert(task.dependencies.end(), first->dependencies.begin(), first->dependencies.end());
      return true;
    }
    return false;
  };
  EXPECT_EQ(noticed(exchange, 20), 20);
}
TEST(PlanCheckerControl, NoticesActivationsThatAreNotSwappedAsArranged) {
  const auto recompute = [](Task& task) {
    return std::exchange(task.activations, Activations::recompute) == Activations::swap;
  };
  EXPECT_EQ(noticed_in(TaskKind::compute, recompute, 20), 20);
}
TEST(PlanCheckerControl, NoticesAComputationThatIsNotOfItsVisit) {
  const auto rename = [](Task& task) {
    task.pass = task.pass == Pass::head ? Pass::backward : Pass::head;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::compute, rename, 20), 20);
}
TEST(PlanCheckerControl, NoticesAnUpdateThatIsLeftOut) {
  const auto leave_out = [](Task& task) {
    task = {.kind = TaskKind::measure, .lane = Lane::update, .chunk = task.chunk, .gradient = task.gradient};
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::update, leave_out, 20), 20);
}
TEST(PlanCheckerControl, NoticesARangeBeyondTheArena) {
  const auto move_away = [](Task& task) {
    task.device_offset = std::uint64_t{1} << 40;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::upload_hi, move_away, 20), 20);
}
TEST(PlanCheckerControl, NoticesADeviceUpdateThatDoesNotWait) {
  const auto forget = [](Task& task) { return !std::exchange(task.dependencies, {}).empty(); };
  EXPECT_EQ(noticed_in(TaskKind::update_on_device, forget, 20), 20);
  EXPECT_EQ(noticed_in(TaskKind::download_state, forget, 20), 20);
}
TEST(PlanCheckerControl, NoticesADeviceUpdateInAnotherSlot) {
  const auto move_away = [](Task& task) {
    if (task.held_state != kNowhere) return false;  // its state is in none
    task.slot -= kSector;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::update_on_device, move_away, 20), 20);
}
TEST(PlanCheckerControl, NoticesStateOnTheDeviceThatIsAnother) {
  const auto move_away = [](Task& task) {
    if (task.held_state == kNowhere) return false;
    task.held_state += kSector;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::update_on_device, move_away, 20), 20);
  const auto forget = [](Task& task) {
    return task.held_state != kNowhere && std::exchange(task.held_state, kNowhere) != kNowhere;
  };
  EXPECT_EQ(noticed_in(TaskKind::update_on_device, forget, 20), 20);
}
TEST(PlanCheckerControl, NoticesAGradientThatIsNotKept) {
  const auto forget = [](Task& task) { return !std::exchange(task.dependencies, {}).empty(); };
  EXPECT_EQ(noticed_in(TaskKind::keep_gradient, forget, 20), 20);
  const auto elsewhere = [](Task& task) {
    task.held_gradient = task.slot;
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::keep_gradient, elsewhere, 20), 20);
  const auto leave_out = [](Task& task) {
    task = {.kind = TaskKind::compute, .lane = Lane::compute};
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::keep_gradient, leave_out, 20), 20);
}
TEST(PlanCheckerControl, NoticesACommitThatDoesNotWait) {
  const auto forget = [](Task& task) { return !std::exchange(task.dependencies, {}).empty(); };
  EXPECT_EQ(noticed_in(TaskKind::commit, forget, 20), 20);
  const auto leave_out = [](Task& task) {
    task = {.kind = TaskKind::compute, .lane = Lane::compute};
    return true;
  };
  EXPECT_EQ(noticed_in(TaskKind::commit, leave_out, 20), 20);
}
// What the drive has of the step before is written over while it is being committed.
TEST(PlanCheckerControl, NoticesAWriteThatDoesNotWaitForTheCommit) {
  const auto rush = [](Plan& plan, std::minstd_rand&) {
    const auto commit = std::find_if(plan.tasks.begin(), plan.tasks.end(),
                                     [](const Task& task) { return task.kind == TaskKind::commit; });
    const TaskId id = plan.first_id + static_cast<TaskId>(commit - plan.tasks.begin());
    for (auto task = commit; task != plan.tasks.end(); ++task)
      if ((task->kind == TaskKind::write_hi || task->kind == TaskKind::write_state) &&
          std::erase(task->dependencies, id) != 0)
        return true;
    return false;
  };
  EXPECT_EQ(noticed(rush, 20), 20);
}

// Staged steps, speculative ones that stand and some that are undone, in any order.
TEST(PlanChecker, ProvesSpeculativeStepsAndTheirUndoing) {
  std::minstd_rand random(13);
  int undone = 0, brought_back = 0, after_deferred = 0;
  for (int round = 0; round < 400; ++round) {
    const Planned planned = random_arrangement(random);
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    bool pending = false;
    for (int step = 0; step < 6; ++step) {
      const bool speculates = random() % 3 != 0, commits = speculates || random() % 2 == 0;
      const Updates updates = speculates ? Updates::at_once : Updates::as_arranged;
      const Plan plan = planner.train_step(pending, commits, updates);
      ASSERT_EQ(checker.train_step(plan, pending, commits, updates).message(), "") << "round " << round;
      if (speculates) {
        EXPECT_EQ(std::ranges::count(plan.tasks, TaskKind::measure, &Task::kind), 0);
      }
      after_deferred += speculates && pending ? 1 : 0;
      pending = !speculates && defers(planned.arrangement);
      if (!speculates || random() % 2 == 0) continue;
      const Plan undo = planner.undo();
      ASSERT_EQ(checker.undo(undo).message(), "") << "round " << round;
      ++undone;
      brought_back += undo.tasks.empty() ? 0 : 1;
    }
    ASSERT_EQ(checker.evaluate(planner.evaluate(1)).message(), "");
  }
  EXPECT_GT(undone, 400);
  EXPECT_GT(brought_back, 200);
  EXPECT_GT(after_deferred, 100);
}

// In how many sequences it is noticed that a speculative step, or what undoes it, is damaged in one way.
int noticed_in_speculation(const std::function<bool(Plan& step, Plan& undo)>& damage, int rounds, bool pending) {
  std::minstd_rand random(17);
  int found = 0;
  for (int tried = 0; tried < rounds;) {
    const Planned planned = random_arrangement(random);
    if (pending && !defers(planned.arrangement)) continue;
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    const Plan first = planner.train_step(false);
    EXPECT_FALSE(checker.train_step(first, false));
    const bool waits = defers(planned.arrangement);
    Plan step = planner.train_step(waits, true, Updates::at_once), undo = planner.undo();
    if (!damage(step, undo)) continue;
    ++tried;
    const bool wrong = static_cast<bool>(checker.train_step(step, waits, true, Updates::at_once));
    found += wrong || checker.undo(undo) ? 1 : 0;
  }
  return found;
}

TEST(PlanCheckerControl, NoticesAnUndoingThatForgetsAnExtent) {
  const auto forget = [](Plan&, Plan& undo) {
    if (undo.tasks.empty()) return false;
    undo.tasks.pop_back();
    return true;
  };
  EXPECT_EQ(noticed_in_speculation(forget, 20, false), 20);
}
TEST(PlanCheckerControl, NoticesAnUndoingThatDoesNotWait) {
  const auto rush = [](Plan&, Plan& undo) {
    return !undo.tasks.empty() && !std::exchange(undo.tasks.back().dependencies, {}).empty();
  };
  EXPECT_EQ(noticed_in_speculation(rush, 20, false), 20);
}
// What a step begins with would be gone: nothing committed it, or a resident extent is updated before it is written.
TEST(PlanCheckerControl, NoticesASpeculativeStepThatCannotBeUndone) {
  const auto without_commit = [](Plan& step, Plan&) {
    for (Task& task : step.tasks)
      if (task.kind == TaskKind::commit) task = {.kind = TaskKind::compute, .lane = Lane::compute};
    return true;
  };
  EXPECT_EQ(noticed_in_speculation(without_commit, 20, false), 20);
  const auto rush = [](Plan& step, Plan&) {
    for (TaskId at = 0; at < step.tasks.size(); ++at) {
      const Task& write = step.tasks[at];
      if (write.kind != TaskKind::write_state || write.state.where != HostRef::Where::resident_state) continue;
      for (Task& task : step.tasks)
        if (task.kind == TaskKind::update && task.chunk == write.chunk && task.measures)
          return std::erase(task.dependencies, step.first_id + at) != 0;
    }
    return false;
  };
  EXPECT_GE(noticed_in_speculation(rush, 20, false), 16);  // a few follow it through others all the same
}
// Of the two updates of a chunk, the one takes the other's gradient.
TEST(PlanCheckerControl, NoticesAnUpdateThatTakesTheGradientOfTheOtherStep) {
  const auto exchange = [](Plan& step, Plan&) {
    for (Task& task : step.tasks)
      if (task.kind == TaskKind::update) {
        task.measures = !task.measures;
        return true;
      }
    return false;
  };
  EXPECT_EQ(noticed_in_speculation(exchange, 20, true), 20);
}

TEST(PlanCheckerControl, NoticesALaterDependency) {
  EXPECT_EQ(noticed(
                [](Plan& plan, std::minstd_rand&) {
                  plan.tasks.front().dependencies.push_back(plan.first_id + plan.tasks.size() - 1);
                  return true;
                },
                20),
            20);
}

// Plans of another arrangement: one chunk is updated in the other pass than the checker was told.
TEST(PlanCheckerControl, NoticesAnUpdateInTheWrongPass) {
  std::minstd_rand random(6);
  for (int tried = 0; tried < 40;) {
    const Planned planned = random_arrangement(random);
    Arrangement other = planned.arrangement;
    const std::size_t id = random() % other.deferred.size();
    if (!planned.layout->chunks()[id].trainable || other.word_buffers < 2 || other.gradient_resident[id]) continue;
    other.deferred[id] = !other.deferred[id];
    ++tried;
    Planner planner(*planned.layout, other);
    PlanChecker checker(*planned.layout, planned.arrangement);
    EXPECT_TRUE(checker.train_step(planner.train_step(false), false));
  }
}
TEST(PlanCheckerControl, NoticesDeferredUpdatesThatAreForgotten) {
  std::minstd_rand random(7);
  for (int tried = 0; tried < 20;) {
    const Planned planned = random_arrangement(random);
    if (!defers(planned.arrangement)) continue;
    ++tried;
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    EXPECT_FALSE(checker.train_step(planner.train_step(false), false));
    EXPECT_TRUE(checker.train_step(planner.train_step(false), true));
  }
}

TEST(Simulator, PlaysRandomPlansToTheirEnd) {
  std::minstd_rand random(3);
  for (int round = 0; round < 100; ++round) {
    const Planned planned = random_arrangement(random);
    Planner planner(*planned.layout, planned.arrangement);
    Simulator simulator(*planned.layout, rates_of(*planned.layout));
    bool pending = false;
    std::size_t tasks = 0;
    double before = 0;
    for (int step = 0; step < 3; ++step) {
      const Plan plan = planner.train_step(pending);
      tasks += plan.tasks.size();
      simulator.append(plan);
      simulator.finish_updates();
      EXPECT_GT(simulator.now(), before);
      before = simulator.now();
      pending = defers(planned.arrangement);
    }
    simulator.drain();
    const auto records = simulator.take_records();
    ASSERT_EQ(records.size(), tasks);
    std::map<TaskId, double> ended;
    for (const TaskRecord& record : records) ended[record.id] = record.end;
    const Summary summary = summarise(records);
    double compute = 0;
    for (const TaskRecord& record : records) {
      for (TaskId dependency : record.dependencies) ASSERT_LE(ended[dependency], record.begin + 1e-12);
      if (record.lane == Lane::compute) compute += record.end - record.begin;
    }
    // One compute task at a time, and what is not compute is explained.
    EXPECT_NEAR(summary.busy_seconds[static_cast<int>(Lane::compute)], compute, 1e-9);
  }
}

// One block of one chunk, everything resident: the step is uploads, then compute, then download and measurement.
TEST(Simulator, AddsUpWhatCannotOverlap) {
  const Layout layout({{.name = "a", .groups = {{.elements = kElementsPad, .state_bytes_element = 4}}},
                       {.name = "b", .groups = {{.elements = kElementsPad, .state_bytes_element = 4}}}},
                      {{.units = {0}, .backward_needs_weights = false}, {.units = {1}, .carry_bytes = kSector}},
                      kChunkQuantum);
  const auto arrangement = arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .storage = false});
  ASSERT_TRUE(arrangement.ok());
  Planner planner(layout, arrangement.value());
  Rates rates;
  // No cores are shared, so that every duration stands alone; 2 ms an upload of a 4 KiB chunk.
  rates.machine = {.upload = 2 * kElementsPad / 2e-3,
                   .cast = kElementsPad / 3e-3,
                   .measure = kElementsPad / 1e-3,
                   .cores = 1,
                   .compute_on_cores = false};
  rates.stages = {{.forward = 10e-3, .backward = 20e-3}, {.head = 40e-3}};
  Simulator simulator(layout, rates);
  simulator.append(planner.train_step(false));
  simulator.finish_updates();
  // Upload of a, forward of a (the upload of b beside it), head; the ring has room for one gradient, so b's leaves
  // before the backward of a, whose own is downloaded and measured at the end.
  EXPECT_NEAR(simulator.now(), 2e-3 + 10e-3 + 40e-3 + 3e-3 + 20e-3 + 3e-3 + 1e-3, 1e-9);
  const Summary summary = summarise(simulator.take_records());
  const auto causes = summary.stalled_by_cause();
  ASSERT_EQ(causes.size(), 2U);
  EXPECT_NEAR(causes.at("upload_hi"), 2e-3, 1e-9);
  EXPECT_NEAR(causes.at("download_gradient"), 3e-3, 1e-9);
}

// A unit of one chunk that streams, updated at once: what an update costs beside its arithmetic.
TEST(Simulator, CountsWhatAnUpdateDoesBesideTheUpdate) {
  const Layout layout(
      {{.name = "a", .groups = {{.elements = kElementsPad, .state_bytes_element = 4, .precision = "p"}}},
       {.name = "b", .groups = {{.elements = kElementsPad, .state_bytes_element = 4, .precision = "q"}}}},
      {{.units = {0}, .backward_needs_weights = false}, {.units = {1}, .carry_bytes = kSector}}, kChunkQuantum);
  // Room for buffers alone: every extent streams.
  auto arranged = arrange(layout, {.host_budget = 16 << 10, .device_budget = 64 << 20, .staged = false});
  ASSERT_TRUE(arranged.ok()) << arranged.error().message();
  const Arrangement arrangement = std::move(arranged).value();
  ASSERT_FALSE(arrangement.hi_resident[0] || arrangement.state_resident[0]);
  const auto seconds = [&](const MachineRates& machine, const std::map<std::string, double>& update = {}) {
    Planner planner(layout, arrangement);
    Simulator simulator(layout, {.machine = machine, .update = update, .stages = {{}, {}}});
    simulator.append(planner.train_step(false));
    simulator.finish_updates();
    return simulator.now();
  };
  EXPECT_EQ(seconds({}), 0);
  // Each chunk at the rate of its own precision, one after the other.
  EXPECT_NEAR(seconds({}, {{"p", kElementsPad / 2e-3}, {"q", kElementsPad / 3e-3}}), 5e-3, 1e-9);
  // Unstaged updates measure their own gradient.
  EXPECT_NEAR(seconds({.measure = kElementsPad / 1e-3}), 2e-3, 1e-9);
  // Both gradients are zeroed before they are added to.
  EXPECT_NEAR(seconds({.fill = 4 * kElementsPad / 4e-3}), 8e-3, 1e-9);
  // Words and state are stamped after an update, and verified when they are read.
  const double stamped = 2 * 6 * kElementsPad;
  EXPECT_GT(seconds({.checksum = stamped / 6e-3}), 6e-3 - 1e-9);
}

TEST(Simulator, ReadsAndWritesShareTheDrive) {
  std::minstd_rand random(21);
  Planned planned = random_arrangement(random);
  while (planned.arrangement.host_bytes(*planned.layout) == 0 || planned.arrangement.word_buffers == 0 ||
         planned.arrangement.state_buffers == 0)
    planned = random_arrangement(random);
  const auto run_seconds = [&](double mixed) {
    Planner planner(*planned.layout, planned.arrangement);
    Rates rates{.machine = {.disk_read = 1e8, .disk_write = 1e8, .disk_mixed = mixed},
                .stages = std::vector<StageSeconds>(planned.layout->stages().size())};
    Simulator simulator(*planned.layout, rates);
    for (int step = 0; step < 4; ++step) simulator.append(planner.train_step(step > 0 && defers(planned.arrangement)));
    simulator.drain();
    return simulator.now();
  };
  const double half_duplex = run_seconds(0);
  EXPECT_NEAR(run_seconds(1e8), half_duplex, 1e-9);  // as much in both directions together as in one
  EXPECT_LT(run_seconds(2e8), half_duplex);          // full duplex
  EXPECT_GT(run_seconds(0.5e8), half_duplex);        // the two disturb each other
}

TEST(Simulator, SharesTheCoresBetweenComputeAndUpdate) {
  std::minstd_rand random(8);
  const Planned planned = random_arrangement(random);
  const auto step_seconds = [&](bool shared) {
    Planner planner(*planned.layout, planned.arrangement);
    Rates rates = rates_of(*planned.layout);
    rates.machine.compute_on_cores = shared;
    Simulator simulator(*planned.layout, rates);
    simulator.append(planner.train_step(false));
    simulator.finish_updates();
    return simulator.now();
  };
  EXPECT_GT(step_seconds(true), step_seconds(false));
}

TEST(Timeline, WritesATraceThatNamesLanesAndStalls) {
  std::minstd_rand random(9);
  const Planned planned = random_arrangement(random);
  Planner planner(*planned.layout, planned.arrangement);
  Simulator simulator(*planned.layout, rates_of(*planned.layout));
  simulator.append(planner.train_step(false));
  simulator.drain();
  const auto records = simulator.take_records();
  const auto path = std::filesystem::path(testing::TempDir()) / ("trace-" + std::to_string(::getpid()) + ".json");
  const NamedTimeline timelines[] = {{"predicted", records}};
  ASSERT_FALSE(write_trace(path, timelines));
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  std::size_t slices = 0;
  bool compute = false, stalls = false;
  for (const auto& event : trace["traceEvents"]) {
    slices += event["ph"] == "X" && event.contains("args") ? 1 : 0;
    if (event["name"] != "thread_name") continue;
    compute = compute || event["args"]["name"] == "compute";
    stalls = stalls || event["args"]["name"] == "compute waits for";
  }
  EXPECT_EQ(slices, records.size());
  EXPECT_TRUE(compute && stalls);
  std::filesystem::remove(path);
  EXPECT_TRUE(write_trace("/nowhere/trace.json", timelines));
}

}  // namespace
}  // namespace tierflow::swap
