// Plans of steps that use parts of a unit: the checker proves random ones, and refuses one in which a chunk is used or
// updated before what it missed.
#include <gtest/gtest.h>

#include <random>

#include "swap/arrange.h"
#include "swap/check.h"
#include "swap/planner.h"

namespace tierflow::swap {
namespace {

struct Planned {
  std::unique_ptr<Layout> layout;
  Arrangement arrangement;
};

// An embedding of sparse chunks with a group beside them, blocks and a head; from the smallest budget that works on.
Planned random_run(std::minstd_rand& random, bool staged) {
  const std::uint64_t part = (1 + random() % 8) * kSparseQuantum;
  std::vector<UnitShape> units{
      {.name = "embedding",
       .groups = {{.elements = kElementsPad, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"},
                  {.elements = (4 + random() % 12) * part - kElementsPad,
                   .state_bytes_element = 10,
                   .precision = "b",
                   .sparse_elements = part}}}};
  std::vector<StageShape> stages{{.units = {0}, .backward_needs_weights = false}};
  for (int unit = 1; unit < 4; ++unit) {
    units.push_back({.name = "unit", .groups = {{.elements = 3 * kChunkQuantum, .state_bytes_element = 4}}});
    stages.push_back({.units = {unit}, .carry_bytes = kSector});
  }
  Planned planned{.layout = std::make_unique<Layout>(units, stages, 2 * kChunkQuantum)};
  ArrangeRequest request{.micro_batches = 2,
                         .staged = staged,
                         .deferred_share = static_cast<double>(random() % 3) / 2,
                         .device_update_share = static_cast<double>(random() % 3) / 2};
  for (std::uint64_t mebibytes = 1 + random() % 24;; ++mebibytes) {
    request.host_budget = mebibytes << 20;
    request.device_budget = mebibytes << 20;
    auto arranged = arrange(*planned.layout, request);
    if (!arranged.ok()) continue;
    planned.arrangement = std::move(arranged).value();
    return planned;
  }
}

// What a client keeps of the sparse chunks.
class Client {
 public:
  explicit Client(const Planned& planned)
      : layout_(*planned.layout),
        arrangement_(planned.arrangement),
        had_(layout_.chunks().size(), 0),
        waiting_(layout_.chunks().size(), false) {}

  std::vector<bool> some(std::minstd_rand& random) const {
    std::vector<bool> used(layout_.chunks().size(), false);
    for (const int chunk : layout_.sparse_chunks()) used[chunk] = random() % 3 == 0;
    return used;
  }
  // used: empty for a flush, which brings all up to date.
  SparseChunks next(const std::vector<bool>& used) {
    const std::vector<bool> none(layout_.chunks().size(), false);
    SparseChunks sparse{.used = used.empty() ? none : used, .missed = none, .waiting = waiting_};
    for (const int chunk : layout_.sparse_chunks()) {
      sparse.missed[chunk] = !waiting_[chunk] && had_[chunk] < updates_ && (used.empty() || used[chunk]);
      if (waiting_[chunk] || sparse.missed[chunk]) had_[chunk] = updates_;
    }
    waiting_ = none;
    return sparse;
  }
  void stands(const std::vector<bool>& used, bool at_once) {
    ++updates_;
    for (const int chunk : layout_.sparse_chunks()) {
      if (!used[chunk]) continue;
      if (arrangement_.deferred[chunk] && !at_once)
        waiting_[chunk] = true;
      else
        had_[chunk] = updates_;
    }
  }
  bool behind() const {
    return std::ranges::any_of(layout_.sparse_chunks(), [&](int chunk) { return had_[chunk] < updates_; });
  }

 private:
  const Layout& layout_;
  const Arrangement& arrangement_;
  std::vector<int> had_;
  std::vector<bool> waiting_;
  int updates_ = 0;
};

bool defers(const Arrangement& arrangement) {
  return std::ranges::find(arrangement.deferred, true) != arrangement.deferred.end();
}

TEST(Sparse, PlansOfRandomPartsAreProved) {
  int undone = 0, caught_up = 0;
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    std::minstd_rand random(seed);
    const bool staged = random() % 2 == 0;
    const Planned planned = random_run(random, staged);
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    Client client(planned);
    bool pending = false;
    for (int step = 0; step < 14; ++step) {
      const std::vector<bool> used = client.some(random);
      const auto play = [&](bool commits, Updates updates) {
        const SparseChunks sparse = client.next(used);
        const Plan plan = planner.train_step(pending, commits, updates, sparse);
        ASSERT_EQ(checker.train_step(plan, pending, commits, updates, sparse).message(), "");
        for (const Task& task : plan.tasks) {
          caught_up += task.kind == TaskKind::catch_up ? 1 : 0;
          if (task.chunk < 0 || !planned.layout->chunks()[task.chunk].sparse) continue;
          const bool of_commit = task.stage == -1;
          EXPECT_TRUE(of_commit || sparse.used[task.chunk] || sparse.missed[task.chunk] || sparse.waiting[task.chunk]);
        }
        pending = false;
      };
      const bool at_once = staged && random() % 3 == 0;
      ASSERT_NO_FATAL_FAILURE(play(at_once || random() % 2 == 0, at_once ? Updates::at_once : Updates::as_arranged));
      bool stands_at_once = at_once;
      if (at_once && random() % 2 == 0) {
        ASSERT_EQ(checker.undo(planner.undo()).message(), "");
        ASSERT_NO_FATAL_FAILURE(play(false, Updates::as_arranged));
        stands_at_once = false;
        ++undone;
      }
      const bool skipped = staged && !stands_at_once && random() % 5 == 0;
      if (!skipped) client.stands(used, stands_at_once);
      pending = !skipped && !stands_at_once && defers(planned.arrangement);
      if (random() % 4 != 0 || (!pending && !client.behind())) continue;
      const SparseChunks sparse = client.next({});
      ASSERT_EQ(checker.flush(planner.flush(pending, sparse), pending, sparse).message(), "");
      pending = false;
      ASSERT_EQ(checker.evaluate(planner.evaluate(2, random() % 2 == 0)).message(), "");
    }
  }
  EXPECT_GT(undone, 20);
  EXPECT_GT(caught_up, 200);
}

// A step that was skipped leaves nothing to catch up with, and on the device the part that it used.
TEST(Sparse, AnEvaluationBehindAStepOfPartsHasTheWholeUnit) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::minstd_rand random(seed);
    const Planned planned = random_run(random, /*staged=*/true);
    Planner planner(*planned.layout, planned.arrangement);
    PlanChecker checker(*planned.layout, planned.arrangement);
    Client client(planned);
    const SparseChunks sparse = client.next(client.some(random));
    const Plan step = planner.train_step(false, false, Updates::as_arranged, sparse);
    ASSERT_EQ(checker.train_step(step, false, false, Updates::as_arranged, sparse).message(), "");
    ASSERT_EQ(checker.evaluate(planner.evaluate(2)).message(), "");
  }
}

TEST(Sparse, StateOfASparseUnitStaysWithTheHost) {
  const GroupShape dense{.elements = kElementsPad, .state_bytes_element = 4};
  GroupShape sparse = dense;
  sparse.elements = sparse.sparse_elements = kSparseQuantum;
  const Layout layout({{.name = "sparse", .groups = {dense, sparse}}, {.name = "dense", .groups = {dense}}},
                      {{.units = {0}}, {.units = {1}, .carry_bytes = kSector}}, kChunkQuantum);
  const Arrangement made =
      arrange(layout, {.host_budget = 64 << 20, .device_budget = 64 << 20, .state_on_device = true}).value();
  for (const Chunk& chunk : layout.chunks())
    EXPECT_EQ(made.device_place(ExtentKind::state, chunk.id) != kNowhere, chunk.unit == 1) << chunk.id;
}

// The planner is told less than there is, or more; the checker knows.
TEST(Sparse, WhatIsNotUpToDateIsRefused) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::minstd_rand random(seed);
    const Planned planned = random_run(random, seed % 2 == 0);
    Client client(planned);
    const int chunk = planned.layout->sparse_chunks()[1];
    std::vector<bool> all(planned.layout->chunks().size(), true), but_one = all;
    but_one[chunk] = false;
    for (const char* wrong : {"not caught up", "caught up twice", "evaluated behind", "nothing"}) {
      SCOPED_TRACE(wrong);
      Planner planner(*planned.layout, planned.arrangement);
      PlanChecker checker(*planned.layout, planned.arrangement);
      Client known(planned);
      SparseChunks sparse = known.next(but_one);
      ASSERT_EQ(checker
                    .train_step(planner.train_step(false, false, Updates::as_arranged, sparse), false, false,
                                Updates::as_arranged, sparse)
                    .message(),
                "");
      known.stands(but_one, false);
      const bool pending = defers(planned.arrangement);
      if (wrong == std::string("evaluated behind")) {
        sparse = known.next(but_one);
        EXPECT_EQ(checker.flush(planner.flush(pending, sparse), pending, sparse).message(), "");
        EXPECT_NE(checker.evaluate(planner.evaluate(2)).message(), "");
        continue;
      }
      sparse = known.next(all);
      ASSERT_TRUE(sparse.missed[chunk]);
      SparseChunks told = sparse;
      if (wrong == std::string("not caught up")) told.missed[chunk] = false;
      if (wrong == std::string("caught up twice")) told.missed[planned.layout->sparse_chunks()[0]] = true;
      const Plan plan = planner.train_step(pending, false, Updates::as_arranged, told);
      EXPECT_EQ(checker.train_step(plan, pending, false, Updates::as_arranged, sparse).message().empty(),
                wrong == std::string("nothing"));
    }
  }
}

}  // namespace
}  // namespace tierflow::swap
