// Runs of the toy model give the bits of a plain loop, whatever the budgets.
#include "swap/executor.h"

#include <random>

#include "tests/support/power_cut.h"
#include "tests/swap/toy_run.h"

namespace tierflow::swap::toy {
namespace {

TEST(Executor, EverythingResident) {
  EXPECT_TRUE(equals_plain_loop({.host = 200 * kMiB, .device = 100 * kMiB}, 3, 3));
}
TEST(Executor, EverythingResidentImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = 200 * kMiB, .device = 100 * kMiB, .staged = false}, 3, 3));
}
TEST(Executor, SmallestBudgets) {
  EXPECT_TRUE(equals_plain_loop({.host = 800 * 1024, .device = 1300 * 1024}, 3, 3));
}
TEST(Executor, SmallestBudgetsImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = 800 * 1024, .device = 1300 * 1024, .staged = false}, 3, 3));
}
TEST(Executor, Tied) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 3 * kMiB, .tied = true}, 3, 3));
}
TEST(Executor, TiedImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 3 * kMiB, .staged = false, .tied = true}, 3, 3));
}
TEST(Executor, AShareOfTheUpdatesInTheNextForward) {
  for (const double share : {0.25, 0.5, 1.0})
    for (const bool tied : {false, true}) {
      EXPECT_TRUE(equals_plain_loop(
          {.host = 200 * kMiB, .device = 100 * kMiB, .staged = false, .tied = tied, .deferred = share}, 3, 3));
      EXPECT_TRUE(equals_plain_loop(
          {.host = kMiB, .device = 3 * kMiB, .staged = false, .tied = tied, .deferred = share}, 3, 3));
    }
}
TEST(Executor, UpdatesOnTheDevice) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 200 * kMiB}) {
      Case with{.host = host, .device = 8 * kMiB, .staged = staged, .on_device = 1};
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
      with.tied = true;
      with.on_device = 0.5;
      with.deferred = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
    }
}
// Each step is committed; before each commit a crash leaves the step before.
TEST(Executor, TwoGenerations) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB})
      EXPECT_TRUE(equals_plain_loop({.host = host, .device = 2 * kMiB, .staged = staged, .generations = 2}, 3, 3));
}
TEST(Executor, CommitsBesideTheNextStep) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB}) {
      Case with{.host = host, .device = 2 * kMiB, .staged = staged, .generations = 2, .commits_beside = true};
      EXPECT_TRUE(equals_plain_loop(with, 3, 4));
      with.chaos = 9;
      if (!staged) with.deferred = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 3, 4));
    }
}

// Whatever stands and whatever is undone: the bits of the plain loop; and what is undone leaves, to a crash as well,
// the state that it began with.
TEST(Executor, SpeculativeSteps) {
  for (const std::string& speculation : {std::string("skuuk"), std::string("uksku")})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB})
      for (const std::uint64_t chaos : {0, 9}) {
        const Case with{.host = host,
                        .device = 2 * kMiB,
                        .tied = chaos != 0 && host == kMiB,
                        .chaos = chaos,
                        .generations = 2,
                        .speculation = speculation};
        const Toy toy = make_toy(with.tied, 3);
        class Run run(toy, with);
        run.prepare();
        ASSERT_FALSE(::testing::Test::HasFatalFailure());
        const int steps = static_cast<int>(speculation.size());
        run.train(steps);
        ASSERT_FALSE(::testing::Test::HasFatalFailure());
        bool equal = false;
        run.compare(run_reference(toy, run.layout(), steps, with.micro_batches), equal);
        EXPECT_TRUE(equal) << speculation << " " << host << " " << chaos;
      }
}
TEST(Executor, SpeculativeStepsWithUpdatesOnTheDevice) {
  for (const double share : {0.5, 1.0}) {
    const Case with{.host = 3 * kMiB,
                    .device = 8 * kMiB,
                    .chaos = 5,
                    .generations = 2,
                    .speculation = "skusku",
                    .on_device = share};
    const Toy toy = make_toy(false, 3);
    class Run run(toy, with);
    run.prepare();
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    run.train(6);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 6, with.micro_batches), equal);
    EXPECT_TRUE(equal) << share;
  }
}

// While steps and commits overlap, the power goes at every fifth write: what opens is a step's end, bit for bit, and no
// older than the last that was acknowledged.
TEST(Executor, APowerCutLeavesAWholeStep) {
  for (const bool staged : {true, false}) {
    const auto cache = std::make_shared<testing::DriveCache>();
    Case with{.host = kMiB, .device = 2 * kMiB, .staged = staged, .generations = 2, .commits_beside = true};
    with.wrap = testing::caching(cache);
    with.engine = io::EngineKind::threads;
    const Toy toy = make_toy(false, 1);
    class Run run(toy, with);
    run.prepare();
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    const std::vector<char> image = testing::read_file(run.file());
    cache->forget();
    std::vector<std::size_t> acknowledged_at;  // writes so far, by commit
    run.work().before_commit = [&] {
      std::lock_guard lock(cache->mutex);
      acknowledged_at.push_back(cache->writes.size());  // of the commit before
    };
    run.train(4);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    ASSERT_EQ(acknowledged_at.size(), 3U);
    acknowledged_at.erase(acknowledged_at.begin());
    testing::TempDir cut;
    std::map<int, int> opened;
    testing::for_each_cut(
        *cache, image, cut.path(),
        [&](std::size_t cut_at, const std::string& where) {
          SCOPED_TRACE(where);
          const auto acknowledged = std::count_if(acknowledged_at.begin(), acknowledged_at.end(),
                                                  [&](std::size_t at) { return at < cut_at; });
          if (acknowledged == 0) return;
          int steps = 0;
          run.expect_opens(cut.path(), steps);
          EXPECT_GE(steps, acknowledged);
          ++opened[steps];
        },
        5);
    EXPECT_GT(opened[1], 3);
    EXPECT_GT(opened[2], 3);
    EXPECT_GT(opened[3], 0);
  }
}
TEST(Executor, ThreadsEngine) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 2 * kMiB, .engine = io::EngineKind::threads}, 3, 3));
}

TEST(Executor, ActivationsGoToTheHostAndToStorage) {
  for (const bool staged : {true, false}) {
    Case with{.host = 2 * kMiB, .device = 4 * kMiB, .staged = staged, .swap_to_host = 3, .swap_to_storage = 3};
    with.fewest_swapped = 6 * 2 * 3;  // items, there and back, in each step
    EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    with.swap_to_host = 0;
    with.swap_to_storage = 8;
    with.chaos = 3;
    with.fewest_swapped = 8 * 2 * 3;
    EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    with = {.host = 200 * kMiB, .device = 100 * kMiB, .staged = staged, .swap_to_host = 6, .fewest_swapped = 6 * 2 * 3};
    EXPECT_TRUE(equals_plain_loop(with, 3, 3));
  }
}
TEST(Executor, GradientsAreRoundedInSlotsOfTheDevice) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false}) {
      Case with{.host = 1200 * 1024, .device = 4 * kMiB, .staged = staged, .chaos = chaos, .rounds_first = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.async = true;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.device = 1300 * 1024;  // no room for slots
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
      with = {.host = 200 * kMiB, .device = 100 * kMiB, .staged = staged, .chaos = chaos, .rounds_first = true};
      with.on_device = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    }
}
// The copy is left out, and so is the storing of a chunk that has nothing else; the update finds zeros.
TEST(Executor, GradientsThatAreZerosDoNotMove) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false})
      for (const bool rounds_first : {true, false}) {
        Case with{.host = 1200 * 1024, .device = 4 * kMiB, .staged = staged, .chaos = chaos};
        with.rounds_first = rounds_first;
        with.zeros = true;
        EXPECT_TRUE(equals_plain_loop(with, 4, 3));
        with.async = true;
        EXPECT_TRUE(equals_plain_loop(with, 4, 3));
        with.host = 200 * kMiB;
        EXPECT_TRUE(equals_plain_loop(with, 3, 3));
      }
}
// As on a GPU: the client leaves each computation long before it is done.
TEST(Executor, TheHostRunsAhead) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false}) {
      Case with{.host = 1200 * 1024, .device = 3 * kMiB, .staged = staged, .chaos = chaos, .async = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.tied = true;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with = {.host = kMiB, .device = 8 * kMiB, .staged = staged, .chaos = chaos, .on_device = 1, .async = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with = {.host = 2 * kMiB, .device = 4 * kMiB, .staged = staged, .chaos = chaos, .swap_to_host = 3, .async = true};
      with.swap_to_storage = 3;
      with.fewest_swapped = 6 * 2 * 3;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    }
}
// A device's queue that is full makes whoever enqueues wait in its driver.
TEST(Executor, TheHostDoesNotRunAheadWithoutEnd) {
  const Case with{.host = 200 * kMiB,
                  .device = 100 * kMiB,
                  .micro_batches = 30,
                  .pause = std::chrono::milliseconds(1),
                  .async = true};
  class Run run(make_toy(with.tied, 3), with);
  run.prepare();
  run.train(1);
  EXPECT_GE(run.most_ahead, 8);
  EXPECT_LE(run.most_ahead, 16);
}
TEST(Executor, GradientsAreMeasuredOnTheirWay) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false})
      for (const std::uint64_t host : {1200 * 1024, 200 << 20}) {
        Case with{.host = host, .device = 4 * kMiB, .staged = staged, .chaos = chaos};
        with.rounds_first = with.measures_there = true;
        EXPECT_TRUE(equals_plain_loop(with, 4, 3));
        with.async = true;
        with.on_device = 0.5;
        EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      }
}
// Of some units, where the budget ends; of all but the embedding, where it does not.
TEST(Executor, StateStaysOnTheDevice) {
  for (const std::uint64_t chaos : {0, 6})
    for (const bool staged : {true, false})
      for (const std::uint64_t host : {kMiB, 200 * kMiB})
        for (const std::uint64_t device : {7 * kMiB, 16 * kMiB}) {
          Case with{.host = host, .device = device, .staged = staged, .chaos = chaos, .keeps_state = true};
          EXPECT_TRUE(equals_plain_loop(with, 3, 3));
          with.tied = with.async = with.rounds_first = with.measures_there = true;
          if (!staged) with.deferred = 0.5;
          with.generations = 2;
          with.commits_beside = chaos != 0;
          with.on_device = chaos != 0 ? 0 : 0.5;
          EXPECT_TRUE(equals_plain_loop(with, 3, 3));
        }
}
TEST(Executor, SpeculativeStepsWithStateOnTheDevice) {
  for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB})
    for (const std::uint64_t device : {7 * kMiB, 16 * kMiB}) {
      const Case with{
          .host = host, .device = device, .chaos = 5, .generations = 2, .speculation = "skusku", .keeps_state = true};
      const Toy toy = make_toy(false, 3);
      class Run run(toy, with);
      run.prepare();
      ASSERT_FALSE(::testing::Test::HasFatalFailure());
      ASSERT_GT(run.arrangement().device_resident, 0U);
      run.train(6);
      ASSERT_FALSE(::testing::Test::HasFatalFailure());
      bool equal = false;
      run.compare(run_reference(toy, run.layout(), 6, with.micro_batches), equal);
      EXPECT_TRUE(equal) << host << " " << device;
    }
}
TEST(Executor, RandomBudgetsUnderChaos) {
  std::minstd_rand random(20);
  for (int round = 0; round < 40; ++round) {
    const bool tied = random() % 2 == 0;
    const Case with{.host = 900 * 1024 + random() % (4 * kMiB),
                    .device = (tied ? 2500 : 1400) * 1024 + random() % (3 * kMiB),
                    .staged = random() % 2 == 0,
                    .tied = tied,
                    .micro_batches = 1 + static_cast<int>(random() % 3),
                    .chaos = 1 + random() % 1000,
                    .generations = 1 + static_cast<int>(random() % 2),
                    .deferred = static_cast<double>(random() % 5) / 4,
                    .on_device = static_cast<double>(random() % 3) / 2,
                    .swap_to_host = static_cast<int>(random() % 4),
                    .swap_to_storage = static_cast<int>(random() % 4),
                    .async = round % 2 == 1,
                    .rounds_first = round % 4 / 2 == 1,
                    .measures_there = round % 8 / 4 == 1,
                    .keeps_state = round % 3 == 0};
    ASSERT_TRUE(equals_plain_loop(with, 1 + static_cast<int>(random() % 4), 2))
        << "host " << with.host << " device " << with.device << " staged " << with.staged << " tied " << with.tied
        << " micro-batches " << with.micro_batches << " chaos " << with.chaos << " generations " << with.generations
        << " deferred " << with.deferred << " on the device " << with.on_device << " async " << with.async;
  }
}

}  // namespace
}  // namespace tierflow::swap::toy
