// What every engine promises, tried on each of them: the same bytes, one outcome for each transfer, whatever the depth.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "io/engine.h"
#include "io/file.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kBlock = 4096;

class EngineContract : public ::testing::TestWithParam<EngineKind> {
 protected:
  std::unique_ptr<Engine> make(unsigned depth, std::uint64_t file_bytes, unsigned files = 1) {
    std::vector<EngineFile> opened;
    for (unsigned i = 0; i < files; ++i) {
      Result<File> file = File::create(folder_.path() / ("file" + std::to_string(files_.size())),
                                       {.allow_buffered = true, .allow_any_filesystem = true});
      EXPECT_TRUE(file.ok()) << file.error().message();
      EXPECT_TRUE(file->preallocate(file_bytes).ok());
      files_.push_back(std::move(file).value());
      opened.push_back({files_.back().descriptor(), files_.back().path()});
    }
    Result<std::unique_ptr<Backend>> backend = GetParam() == EngineKind::io_uring ? make_uring_backend(depth)
                                               : GetParam() == EngineKind::libaio ? make_libaio_backend(depth)
                                                                                  : make_threads_backend(depth);
    if (!backend) {
      ADD_FAILURE() << backend.error().message();
      return nullptr;
    }
    auto engine = std::make_unique<Engine>(std::move(backend).value(), opened, depth, kBlock);
    EXPECT_FALSE(engine->start());
    return engine;
  }

  // Drives all transfers to their end and returns the outcomes in the order of their tags.
  static std::vector<Outcome> run(Engine& engine, std::vector<Transfer> transfers) {
    std::vector<Outcome> outcomes;
    std::size_t next = 0;
    while (outcomes.size() < transfers.size()) {
      while (next < transfers.size()) {
        transfers[next].tag = next;
        if (!engine.submit(transfers[next])) break;
        ++next;
      }
      engine.wait(outcomes, std::chrono::seconds{10});
    }
    EXPECT_EQ(engine.in_flight(), 0U);
    std::sort(outcomes.begin(), outcomes.end(), [](auto& a, auto& b) { return a.transfer.tag < b.transfer.tag; });
    return outcomes;
  }

  static Transfer of(Action action, std::uint64_t offset, std::span<std::byte> bytes, std::shared_ptr<void> owner,
                     std::uint32_t file = 0) {
    return Transfer{.action = action, .file = file, .offset = offset, .bytes = bytes, .owner = std::move(owner)};
  }

  testing::TempDir folder_;
  std::vector<File> files_;
};

TEST_P(EngineContract, MovesEveryByteAtAnyDepth) {
  for (unsigned depth : {1U, 3U, 32U}) {
    constexpr std::size_t kPieces = 100;
    auto engine = make(depth, kPieces * kBlock);
    auto memory = std::make_shared<Buffer>(allocate_buffer(kPieces * kBlock));
    fill(memory->bytes(), 0, depth);
    std::vector<std::size_t> order(kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(depth));
    std::vector<Transfer> transfers;
    for (std::size_t i : order)
      transfers.push_back(of(Action::write, i * kBlock, memory->bytes().subspan(i * kBlock, kBlock), memory));
    for (const Outcome& outcome : run(*engine, std::move(transfers)))
      EXPECT_FALSE(outcome.error) << outcome.error.message();
    std::fill(memory->bytes().begin(), memory->bytes().end(), std::byte{0});
    transfers.clear();
    for (std::size_t i : order)
      transfers.push_back(of(Action::read, i * kBlock, memory->bytes().subspan(i * kBlock, kBlock), memory));
    for (const Outcome& outcome : run(*engine, std::move(transfers)))
      EXPECT_FALSE(outcome.error) << outcome.error.message();
    EXPECT_TRUE(holds(memory->bytes(), 0, depth));
  }
}

TEST_P(EngineContract, MovesOneHugeTransfer) {
  constexpr std::size_t kBytes = 96 << 20;
  auto engine = make(2, kBytes);
  auto memory = std::make_shared<Buffer>(allocate_buffer(kBytes));
  fill(memory->bytes(), 0, 5);
  std::vector<Transfer> one;
  one.push_back(of(Action::write, 0, memory->bytes(), memory));
  EXPECT_FALSE(run(*engine, std::move(one)).front().error);
  std::fill(memory->bytes().begin(), memory->bytes().end(), std::byte{0});
  one.clear();
  one.push_back(of(Action::read, 0, memory->bytes(), memory));
  EXPECT_FALSE(run(*engine, std::move(one)).front().error);
  EXPECT_TRUE(holds(memory->bytes(), 0, 5));
}

TEST_P(EngineContract, RegisteredAndOtherMemoryGiveTheSameBytes) {
  auto engine = make(8, 64 * kBlock);
  auto inside = std::make_shared<Buffer>(allocate_buffer(32 * kBlock));
  auto outside = std::make_shared<Buffer>(allocate_buffer(32 * kBlock));
  // Two regions side by side: a transfer across their border must work too.
  const std::span<std::byte> regions[] = {inside->bytes().first(16 * kBlock), inside->bytes().last(16 * kBlock)};
  const Error refused = engine->register_memory(regions);
  EXPECT_EQ(static_cast<bool>(refused), GetParam() != EngineKind::io_uring) << refused.message();
  fill(inside->bytes(), 0, 1);
  std::vector<Transfer> writes;
  writes.push_back(of(Action::write, 0, inside->bytes().first(8 * kBlock), inside));
  writes.push_back(of(Action::write, 8 * kBlock, inside->bytes().subspan(8 * kBlock, 16 * kBlock), inside));
  writes.push_back(of(Action::write, 24 * kBlock, inside->bytes().last(8 * kBlock), inside));
  for (const Outcome& outcome : run(*engine, std::move(writes))) EXPECT_FALSE(outcome.error) << outcome.error.message();
  std::vector<Transfer> reads;
  reads.push_back(of(Action::read, 0, outside->bytes(), outside));
  EXPECT_FALSE(run(*engine, std::move(reads)).front().error);
  EXPECT_TRUE(holds(outside->bytes(), 0, 1));
  EXPECT_FALSE(engine->kind() == EngineKind::io_uring && engine->register_memory({}));
}

TEST_P(EngineContract, FlushesAndServesSeveralFiles) {
  auto engine = make(4, 16 * kBlock, 3);
  auto memory = std::make_shared<Buffer>(allocate_buffer(3 * kBlock));
  std::vector<Transfer> transfers;
  for (std::uint32_t file = 0; file < 3; ++file) {
    fill(memory->bytes().subspan(file * kBlock, kBlock), 0, file);
    transfers.push_back(of(Action::write, 0, memory->bytes().subspan(file * kBlock, kBlock), memory, file));
    transfers.push_back(of(Action::flush, 0, {}, nullptr, file));
  }
  for (const Outcome& outcome : run(*engine, std::move(transfers)))
    EXPECT_FALSE(outcome.error) << outcome.error.message();
  for (std::uint32_t file = 0; file < 3; ++file) {
    auto back = std::make_shared<Buffer>(allocate_buffer(kBlock));
    ASSERT_FALSE(files_[file].read(0, back->data(), kBlock));
    EXPECT_TRUE(holds(back->bytes(), 0, file));
  }
}

TEST_P(EngineContract, RefusesMoreThanItsDepthAndLeavesTheTransferAlone) {
  auto engine = make(2, 16 * kBlock);
  auto memory = std::make_shared<Buffer>(allocate_buffer(3 * kBlock));
  for (std::size_t i = 0; i < 2; ++i) {
    Transfer transfer = of(Action::read, i * kBlock, memory->bytes().subspan(i * kBlock, kBlock), memory);
    EXPECT_TRUE(engine->submit(transfer));
  }
  Transfer third = of(Action::read, 2 * kBlock, memory->bytes().last(kBlock), memory);
  EXPECT_FALSE(engine->submit(third));
  EXPECT_EQ(third.owner, memory);
  std::vector<Outcome> outcomes;
  while (outcomes.size() < 2) engine->wait(outcomes, std::chrono::seconds{10});
  EXPECT_TRUE(engine->submit(third));
}

TEST_P(EngineContract, KeepsTheMemoryUntilTheOutcomeAndDrainsWhenDestroyed) {
  auto engine = make(8, 64 * kBlock);
  auto memory = std::make_shared<Buffer>(allocate_buffer(8 * kBlock));
  std::weak_ptr<Buffer> watched = memory;
  for (std::size_t i = 0; i < 8; ++i) {
    Transfer transfer = of(Action::read, i * kBlock, memory->bytes().subspan(i * kBlock, kBlock), memory);
    ASSERT_TRUE(engine->submit(transfer));
  }
  memory.reset();
  EXPECT_FALSE(watched.expired());
  engine.reset();
  EXPECT_TRUE(watched.expired());
}

TEST_P(EngineContract, NamesWhatFailed) {
  auto engine = make(4, 4 * kBlock);
  auto memory = std::make_shared<Buffer>(allocate_buffer(4 * kBlock));
  std::vector<Transfer> transfers;
  transfers.push_back(of(Action::read, 2 * kBlock, memory->bytes(), memory));  // half of it lies beyond the end
  const std::vector<Outcome> outcomes = run(*engine, std::move(transfers));
  const Error& error = outcomes.front().error;
  EXPECT_EQ(error.kind, ErrorKind::corruption);
  EXPECT_EQ(error.operation, "read");
  EXPECT_EQ(error.path, files_.front().path());
  EXPECT_EQ(error.offset, 2 * kBlock);
  EXPECT_EQ(error.length, 4 * kBlock);
}

TEST_P(EngineContract, ReportsAFileThatCannotBeWritten) {
  auto engine = make(4, 4 * kBlock);
  engine.reset();
  const int read_only = ::open(files_.front().path().c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(read_only, 0);
  Result<std::unique_ptr<Backend>> backend = GetParam() == EngineKind::io_uring ? make_uring_backend(2)
                                             : GetParam() == EngineKind::libaio ? make_libaio_backend(2)
                                                                                : make_threads_backend(2);
  ASSERT_TRUE(backend.ok());
  {
    Engine broken(std::move(backend).value(), {{read_only, "readonly"}}, 2, kBlock);
    ASSERT_FALSE(broken.start());
    auto memory = std::make_shared<Buffer>(allocate_buffer(kBlock));
    std::vector<Transfer> transfers;
    for (int i = 0; i < 5; ++i) transfers.push_back(of(Action::write, 0, memory->bytes(), memory));
    for (const Outcome& outcome : run(broken, std::move(transfers))) {
      EXPECT_EQ(outcome.error.kind, ErrorKind::io);
      EXPECT_EQ(outcome.error.error_number, EBADF);
    }
  }
  ::close(read_only);
}

TEST_P(EngineContract, WaitsUntilAnotherThreadWakesIt) {
  auto engine = make(2, 4 * kBlock);
  for (const std::chrono::seconds limit : {std::chrono::seconds{-1}, std::chrono::seconds{60}}) {
    for (int round = 0; round < 5; ++round) {
      std::atomic<bool> woken{false};
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds{10 * round});
        woken = true;
        engine->wake();
      });
      std::vector<Outcome> outcomes;
      const auto started = Engine::Clock::now();
      engine->wait(outcomes, limit);
      EXPECT_TRUE(woken);  // it waited
      EXPECT_LT(Engine::Clock::now() - started, std::chrono::seconds{30});
      EXPECT_TRUE(outcomes.empty());
      other.join();
    }
  }
}

TEST_P(EngineContract, AWakeBeforeTheWaitIsNotLost) {
  auto engine = make(2, 4 * kBlock);
  std::vector<Outcome> outcomes;
  engine->wait(outcomes, std::chrono::milliseconds{1});
  for (int round = 0; round < 3; ++round) {
    engine->wake();
    engine->wait(outcomes, std::chrono::nanoseconds{-1});
  }
  EXPECT_TRUE(outcomes.empty());
}

TEST_P(EngineContract, WaitsAsLongAsItIsToldTo) {
  auto engine = make(2, 4 * kBlock);
  std::vector<Outcome> outcomes;
  for (const std::chrono::milliseconds limit : {std::chrono::milliseconds{5}, std::chrono::milliseconds{60}}) {
    const auto started = Engine::Clock::now();
    engine->wait(outcomes, limit);
    EXPECT_GE(Engine::Clock::now() - started, limit - std::chrono::milliseconds{1});
    EXPECT_LT(Engine::Clock::now() - started, limit + std::chrono::seconds{20});
  }
  const auto started = Engine::Clock::now();
  engine->wait(outcomes, std::chrono::milliseconds{1100});
  EXPECT_GE(Engine::Clock::now() - started, std::chrono::milliseconds{1099});
}

TEST_P(EngineContract, PollNeverWaits) {
  auto engine = make(2, 4 * kBlock);
  std::vector<Outcome> outcomes;
  const auto started = Engine::Clock::now();
  auto fastest = Engine::Clock::duration::max();
  for (int i = 0; i < 100; ++i) {  // with nothing to wait for, waiting would not end
    const auto before = Engine::Clock::now();
    engine->poll(outcomes);
    fastest = std::min(fastest, Engine::Clock::now() - before);
  }
  EXPECT_TRUE(outcomes.empty());
  EXPECT_LT(fastest, std::chrono::milliseconds{1});
  auto memory = std::make_shared<Buffer>(allocate_buffer(kBlock));
  Transfer transfer = of(Action::read, 0, memory->bytes(), memory);
  ASSERT_TRUE(engine->submit(transfer));
  while (outcomes.empty()) engine->poll(outcomes);  // it brings what is there
  EXPECT_FALSE(outcomes.front().error);
  EXPECT_LT(Engine::Clock::now() - started, std::chrono::seconds{50});
}

TEST_P(EngineContract, KnowsWhatHasWaitedLongest) {
  auto engine = make(4, 16 * kBlock);
  Engine::Clock::time_point since;
  EXPECT_EQ(engine->oldest(since), nullptr);
  auto memory = std::make_shared<Buffer>(allocate_buffer(3 * kBlock));
  const auto before = Engine::Clock::now();
  for (std::size_t i = 0; i < 3; ++i) {
    Transfer transfer = of(Action::read, (3 - i) * kBlock, memory->bytes().subspan(i * kBlock, kBlock), memory);
    ASSERT_TRUE(engine->submit(transfer));
    std::this_thread::sleep_for(std::chrono::milliseconds{2});
  }
  const Transfer* oldest = engine->oldest(since);
  ASSERT_NE(oldest, nullptr);
  EXPECT_EQ(oldest->offset, 3 * kBlock);
  EXPECT_GE(since, before);
  EXPECT_LT(since, before + std::chrono::seconds{20});
  int visited = 0;
  engine->for_each_in_flight([&](const Transfer&) { ++visited; });
  EXPECT_EQ(visited, 3);
  EXPECT_EQ(engine->in_flight(), 3U);
  std::vector<Outcome> outcomes;
  while (outcomes.size() < 3) engine->wait(outcomes, std::chrono::seconds{10});
  for (const Outcome& outcome : outcomes) EXPECT_GT(outcome.elapsed.count(), 0);
  EXPECT_EQ(engine->oldest(since), nullptr);
}

INSTANTIATE_TEST_SUITE_P(AllEngines, EngineContract,
                         ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads),
                         [](const auto& info) { return engine_name(info.param); });

}  // namespace
}  // namespace tierflow::io
