// What the ledger says of tasks one by one: who must wait for whom, and what must lie where.
#include "swap/ledger.h"

#include <gmock/gmock.h>

#include <functional>
#include <random>

#include "swap/arrange.h"

namespace tierflow::swap {
namespace {

using ::testing::HasSubstr;

constexpr Content kWords{What::words, 0}, kOther{What::words, 0, 1}, kState{What::state, 0};

struct Step {
  std::vector<TaskId> dependencies;
  std::function<void(Ledger&)> does;
  Lane lane = Lane::compute;
};

class LedgerTest : public ::testing::Test {
 protected:
  LedgerTest()
      : layout_({{.name = "unit", .groups = {{.elements = kChunkQuantum, .state_bytes_element = 4, .precision = "a"}}}},
                {{.units = {0}}}, kChunkQuantum),
        arrangement_(arrange(layout_, {.host_budget = 64 << 20, .device_budget = 64 << 20}).value()) {}

  // What is wrong with these tasks, the first of which is number 10; empty where nothing is.
  std::string wrong(const std::vector<Step>& steps) {
    Ledger ledger(layout_, arrangement_);
    Plan plan;
    plan.first_id = 10;
    for (const Step& step : steps) plan.tasks.push_back({.lane = step.lane, .dependencies = step.dependencies});
    std::size_t at = 0;
    ledger.play(plan, [&](const Task&) { steps[at++].does(ledger); });
    return ledger.error().detail;
  }
  static std::function<void(Ledger&)> write(std::uint64_t begin, std::uint64_t bytes, Content content = kWords) {
    return [=](Ledger& ledger) { ledger.write_device(begin, bytes, content); };
  }
  static std::function<void(Ledger&)> read(std::uint64_t begin, std::uint64_t bytes, Content content = kWords) {
    return [=](Ledger& ledger) { ledger.read_device(begin, bytes, content); };
  }

  Layout layout_;
  Arrangement arrangement_;
};

TEST_F(LedgerTest, AWriteWaitsForThoseWhoReadThoseBytes) {
  const auto with = [&](std::uint64_t begin, std::uint64_t bytes, std::vector<TaskId> dependencies) {
    return wrong({{{}, write(0, 100)}, {{10}, read(50, 30)}, {dependencies, write(begin, bytes, kOther)}});
  };
  EXPECT_EQ(with(79, 10, {10}), "task 12 (compute, stage -1, chunk -1): overwrites what task 11 may still be reading");
  EXPECT_THAT(with(40, 11, {10}), HasSubstr("overwrites what task 11"));
  EXPECT_EQ(with(80, 20, {10}), "");  // its bytes are the reader's neighbours
  EXPECT_EQ(with(0, 50, {10}), "");
  EXPECT_EQ(with(0, 100, {11}), "");  // the writer waits for the reader, who waited for the first writer
}

TEST_F(LedgerTest, AWriteWaitsForTheWriteBefore) {
  EXPECT_THAT(
      wrong({{{}, write(0, 100)}, {{}, write(99, 10)}}),
      HasSubstr("task 11 (compute, stage -1, chunk -1): does not wait for task 10, which writes the same bytes"));
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{}, write(100, 10)}}), "");
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{10}, write(50, 100)}}), "");
}

// Reading as a task before did is a reading of its own: who overwrites waits for the last of them.
TEST_F(LedgerTest, WhatIsReadAgainIsReadByTheLastReader) {
  const auto reads = [](Ledger& ledger) {
    ledger.read_device(0, 50, kWords);
    ledger.read_device(50, 50, kWords);
    ledger.has_read(0, 100);
  };
  const auto again = [](bool expected) {
    return [expected](Ledger& ledger) { EXPECT_EQ(ledger.reads_again(0, 100), expected); };
  };
  const auto with = [&](std::vector<TaskId> dependencies) {
    return wrong({{{}, write(0, 50)},
                  {{}, write(50, 50)},
                  {{10, 11}, reads},
                  {{12}, again(true)},
                  {{13}, again(true)},
                  {dependencies, write(60, 10, kOther)}});
  };
  EXPECT_EQ(with({14}), "");
  EXPECT_THAT(with({13}), HasSubstr("overwrites what task 14 may still be reading"));
  EXPECT_THAT(with({12}), HasSubstr("overwrites what task 14 may still be reading"));
  // Not where it does not wait for the first reader, where something was written since, or in another plan.
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{10}, reads}, {{10}, again(false)}}), "");
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{10}, reads}, {{11}, write(99, 1)}, {{11, 12}, again(false)}}), "");
  EXPECT_EQ(wrong({{{}, write(0, 100)},
                   {{10}, reads},
                   {{11}, [](Ledger& ledger) { ledger.begin_plan(); }},
                   {{11, 12}, again(false)}}),
            "");
  EXPECT_EQ(wrong({{{}, write(0, 100)},
                   {{10}, reads},
                   {{11}, [](Ledger& ledger) { EXPECT_FALSE(ledger.reads_again(0, 50)); }}}),
            "");
}

TEST_F(LedgerTest, AReadWaitsForItsWriterDirectlyOrThroughOthers) {
  const auto nothing = [](Ledger&) {};
  EXPECT_THAT(wrong({{{}, write(0, 100)}, {{}, read(0, 100)}}),
              HasSubstr("does not wait for task 10, which writes what it reads"));
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{10}, nothing}, {{11}, nothing}, {{12, 11}, read(0, 100)}}), "");
  EXPECT_THAT(wrong({{{}, nothing}, {{}, write(0, 100)}, {{10}, nothing}, {{10, 12}, read(0, 100)}}),
              HasSubstr("does not wait for task 11"));
}

TEST_F(LedgerTest, ATaskWaitsForThoseItIsTiedToByAnyPath) {
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  int waits = 0;
  constexpr int kGraphs = 4000;
  for (int graph = 0; graph < kGraphs; ++graph) {
    const std::size_t tasks = 3 + below(40), read_by_last = below(tasks - 1);
    std::vector<Step> steps(tasks);
    std::vector<bool> reached(tasks, false);  // from the task whose bytes the last one reads
    reached[read_by_last] = true;
    for (std::size_t task = 0; task < tasks; ++task) {
      steps[task].lane = below(2) == 0 ? Lane::compute : Lane::upload;
      for (std::size_t edges = below(3); task != 0 && edges != 0; --edges) {
        const std::size_t earlier = below(task);
        steps[task].dependencies.push_back(10 + earlier);
        if (reached[earlier]) reached[task] = true;
      }
      steps[task].does = task + 1 < tasks ? write(task, 1) : read(read_by_last, 1);
    }
    waits += reached.back() ? 1 : 0;
    ASSERT_EQ(wrong(steps).empty(), reached.back()) << "graph " << graph;
  }
  EXPECT_GT(waits, kGraphs / 10);
  EXPECT_LT(waits, kGraphs - kGraphs / 10);
}

TEST_F(LedgerTest, WhatIsReadWasWrittenAndHoldsWhatIsNeeded) {
  EXPECT_THAT(wrong({{{}, read(0, 10)}}), HasSubstr("reads device memory that nothing has written"));
  EXPECT_THAT(wrong({{{}, write(20, 80)}, {{10}, read(0, 30)}}), HasSubstr("nothing has written"));
  EXPECT_THAT(wrong({{{}, write(0, 100)}, {{10}, read(0, 101)}}), HasSubstr("nothing has written"));
  EXPECT_THAT(wrong({{{}, write(0, 100)}, {{}, write(101, 9)}, {{10, 11}, read(0, 110)}}),  // a byte between two
              HasSubstr("nothing has written"));
  EXPECT_THAT(wrong({{{}, write(0, 100)}, {{}, write(101, 9)}, {{10, 11}, read(100, 10)}}),
              HasSubstr("nothing has written"));
  EXPECT_THAT(wrong({{{}, write(0, 100)}, {{10}, read(0, 100, kOther)}}),
              HasSubstr("the device does not hold what it needs"));
  EXPECT_EQ(wrong({{{}, write(0, 100)}, {{10}, write(100, 50)}, {{11}, read(20, 130)}}), "");  // two that touch
  // Part of what was overwritten is nothing to rely on.
  const std::vector<Step> parts = {{{}, write(0, 100)}, {{10}, write(20, 20, kOther)}};
  for (const auto& [begin, expected] : {std::pair{0U, false}, {40U, false}}) {
    std::vector<Step> steps = parts;
    steps.push_back({{10, 11}, read(begin, 10)});
    EXPECT_EQ(wrong(steps).empty(), expected) << begin;
  }
  std::vector<Step> steps = parts;
  steps.push_back({{11}, read(20, 20, kOther)});
  EXPECT_EQ(wrong(steps), "");
}

TEST_F(LedgerTest, TheArenaHasAnEnd) {
  const std::uint64_t end = arrangement_.device_bytes();
  EXPECT_EQ(wrong({{{}, write(end - 10, 10)}, {{10}, read(end - 10, 10)}}), "");
  EXPECT_THAT(wrong({{{}, write(end - 10, 11)}}), HasSubstr("reaches beyond the device arena"));
  EXPECT_THAT(wrong({{{}, read(end + 1, 0)}}), HasSubstr("reaches beyond the device arena"));
}

TEST_F(LedgerTest, ATaskThatDependsOnALaterOneOrItselfWouldDeadlock) {
  const auto nothing = [](Ledger&) {};
  EXPECT_THAT(wrong({{{10}, nothing}}), HasSubstr("depends on a later task"));
  EXPECT_THAT(wrong({{{}, nothing}, {{12}, nothing}, {{}, nothing}}), HasSubstr("task 11"));
  EXPECT_EQ(wrong({{{}, nothing}, {{10}, nothing}}), "");
}

TEST_F(LedgerTest, EverythingIsAtHomeAtTheBeginning) {
  EXPECT_EQ(wrong({{{},
                    [](Ledger& ledger) {
                      ledger.read(ledger.home(ExtentKind::hi, 0), kWords, "the host");
                      ledger.read(ledger.home(ExtentKind::state, 0), kState, "the host");
                    }}}),
            "");
  EXPECT_THAT(wrong({{{}, [](Ledger& ledger) { ledger.read(ledger.home(ExtentKind::hi, 0), kOther, "the host"); }}}),
              HasSubstr("the host does not hold what it needs"));
  for (const HostRef ref : {HostRef{HostRef::Where::resident_hi, 1}, {HostRef::Where::word_buffer, 0}, {}})
    EXPECT_THAT(wrong({{{}, [ref](Ledger& ledger) { ledger.host(ref); }}}),
                HasSubstr("names host memory that does not exist"));
}

TEST_F(LedgerTest, HostMemoryIsWaitedForAsTheDeviceIs) {
  const auto write = [](Ledger& ledger) { ledger.write(ledger.home(ExtentKind::hi, 0), kOther); };
  const auto read = [](Ledger& ledger) { ledger.read(ledger.home(ExtentKind::hi, 0), kOther, "the host"); };
  EXPECT_THAT(wrong({{{}, write}, {{}, read}}), HasSubstr("does not wait for task 10, which writes what it reads"));
  EXPECT_THAT(wrong({{{}, write}, {{}, write}}), HasSubstr("does not wait for task 10, which writes the same bytes"));
  EXPECT_THAT(wrong({{{}, write}, {{10}, read}, {{10}, write}}), HasSubstr("overwrites what task 11"));
  EXPECT_EQ(wrong({{{}, write}, {{10}, read}, {{11}, write}, {{12}, read}}), "");
}

TEST_F(LedgerTest, HostMemoryIsWhatTheArrangementHas) {
  const Layout two({{.name = "unit", .groups = {{.elements = 2 * kChunkQuantum, .state_bytes_element = 4}}}},
                   {{.units = {0}}}, kChunkQuantum);
  Arrangement made = arrange(two, {.host_budget = 64 << 20, .device_budget = 64 << 20}).value();
  made.hi_resident = {false, true};
  for (const int chunk : {-1, 0, 1, 2}) {
    Ledger ledger(two, made);
    ledger.host({HostRef::Where::resident_hi, chunk});
    EXPECT_EQ(static_cast<bool>(ledger.error()), chunk != 1) << chunk;
  }
}

TEST_F(LedgerTest, TheFirstThatIsWrongIsKept) {
  EXPECT_THAT(wrong({{{}, read(0, 10)}, {{}, write(0, ~std::uint64_t{0})}}), HasSubstr("task 10"));
  Ledger ledger(layout_, arrangement_);
  ledger.wrong("something is left");
  EXPECT_EQ(ledger.error().detail, "at the end of the plan: something is left");
  EXPECT_EQ(ledger.error().kind, io::ErrorKind::corruption);
}

}  // namespace
}  // namespace tierflow::swap
