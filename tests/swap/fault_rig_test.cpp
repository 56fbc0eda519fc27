// The commit protocol under simulated drives: runs that write, commit, are cut off or fail, and are gone on with, each
// decided by one number. However a run ends: nothing is silently wrong, and no generation that commit() acknowledged is
// lost. TIERFLOW_FAULT_RUNS is how many (make test-faults: 100,000), TIERFLOW_FAULT_SEED the first, to replay one.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/environment.h"
#include "tests/support/simulated_drives.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

using testing::SimulatedDrives;
using Goes = SimulatedDrives::Goes;
using Survive = SimulatedDrives::Survive;

const Layout& tiny() {
  static const Layout layout(
      {{.name = "a",
        .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "p"},
                   {.elements = 2048, .state_bytes_element = 8, .precision = "q"}}},
       {.name = "b", .groups = {{.elements = 2048, .state_bytes_element = 4, .precision = "p"}}}},
      {{.units = {0}}, {.units = {1}}}, kChunkQuantum);
  return layout;
}

struct Verdict {
  std::string wrong;  // empty: all is as promised
  int resumed = 0, fell_back = 0;
};

class FaultRun {
 public:
  FaultRun(std::uint64_t seed, bool lying)
      : random_(static_cast<unsigned>(seed * 2654435761U + 17)),
        drives_(std::make_shared<SimulatedDrives>(seed + 1, lying)) {
    const int count = 1 + static_cast<int>(random_() % 3);
    options_.volume.engine = io::EngineKind::threads;
    options_.volume.allow_buffered = options_.volume.allow_any_filesystem = true;
    options_.volume.block = 4096;
    options_.volume.wrap_backend = testing::simulated(drives_);
    options_.volume.on_notice = [this](const io::Notice& notice) {
      if (notice.text.find("goes on from") != std::string::npos) ++verdict_.fell_back;
    };
    for (int drive = 0; drive < count; ++drive)
      options_.volume.folders.push_back(folder_.path() / std::to_string(drive));
    options_.generations = 2;
    options_.scratch.gradients = false;
    options_.identity = "{}";
    options_.run_id = seed + 1;
  }

  Verdict run() {
    auto made = Store::create(options_, tiny());
    if (!made.ok()) return {.wrong = "create: " + made.error().message()};
    std::unique_ptr<Store> store = std::move(made).value();
    for (int round = 0; round < 3 && verdict_.wrong.empty(); ++round) {
      fail_somewhere(round);
      train(*store);
      store.reset();
      if (random_() % 4 == 0 && !drives_->dark())
        drives_->restart();
      else
        drives_->power_cycle(static_cast<Survive>(random_() % 5));
      if (random_() % 3 == 0) interrupt_recovery();
      store = go_on();
      if (store == nullptr) break;
    }
    return verdict_;
  }

 private:
  using Values = std::vector<int>;  // of each extent: what it holds

  void fail_somewhere(int round) {
    const auto what = static_cast<Goes>(1 + random_() % 4);
    drives_->plan(round == 2 ? Goes::dark : what, 1 + random_() % 70);
  }

  // Steps that change some extents and commit, until something fails or enough is done.
  void train(Store& store) {
    for (int step = 0; step < 4; ++step) {
      Values values = history_.empty() ? Values(2 * tiny().chunks().size(), -1) : history_.at(now_);
      for (std::size_t at = 0; at < values.size(); ++at) {
        if (values[at] != -1 && random_() % 3 == 0) continue;
        values[at] = ++written_;
        if (write(store, at, values[at])) return;
      }
      history_[++steps_] = values;  // it may be durable even where commit() fails
      if (store.commit(std::to_string(steps_))) return;
      acknowledged_ = now_ = steps_;
    }
  }

  // The power goes while the store is being verified or made durable once more.
  void interrupt_recovery() {
    drives_->plan(Goes::dark, 1 + random_() % 8);
    if (auto opened = Store::resume(options_, tiny()); opened.ok()) (void)(*opened)->restore({}, {});
    drives_->power_cycle(static_cast<Survive>(random_() % 5));
  }

  std::unique_ptr<Store> go_on() {
    auto opened = Store::resume(options_, tiny());
    if (!opened.ok()) {
      if (acknowledged_ != 0) wrong("cannot be opened: " + opened.error().message());
      return nullptr;
    }
    std::unique_ptr<Store> store = std::move(opened).value();
    Values found(2 * tiny().chunks().size(), -1);
    std::vector<std::vector<std::byte>> bytes(found.size());
    const io::Error error = store->restore(
        [&](ExtentKind kind, int chunk, std::span<const std::byte> content) {
          bytes[index_of(kind, chunk)] = {content.begin(), content.end()};
        },
        {});
    if (error) {
      if (acknowledged_ != 0) wrong("lost: " + error.message());
      return nullptr;
    }
    ++verdict_.resumed;
    const int step = std::atoi(store->progress().c_str());
    if (step < acknowledged_) wrong("step " + std::to_string(step) + " is older than what was acknowledged");
    if (!history_.contains(step)) wrong("step " + store->progress() + " was never committed");
    if (!verdict_.wrong.empty()) return nullptr;
    for (std::size_t at = 0; at < bytes.size(); ++at)
      if (bytes[at] != content_of(at, history_[step][at])) wrong("extent " + std::to_string(at) + " is another");
    acknowledged_ = now_ = step;
    steps_ = std::max(steps_, step);
    return store;
  }

  static std::size_t index_of(ExtentKind kind, int chunk) {
    return static_cast<std::size_t>(kind) * tiny().chunks().size() + static_cast<std::size_t>(chunk);
  }
  static std::vector<std::byte> content_of(std::size_t at, int value) {
    const auto chunks = tiny().chunks().size();
    const Chunk& chunk = tiny().chunks()[at % chunks];
    std::vector<std::byte> bytes(at < chunks ? chunk.word_bytes() : chunk.state_bytes);
    for (std::size_t i = 0; i < bytes.size(); i += 8) std::memcpy(&bytes[i], &value, 4);
    return bytes;
  }
  io::Error write(Store& store, std::size_t at, int value) {
    const auto chunks = tiny().chunks().size();
    const ExtentKind kind = at < chunks ? ExtentKind::hi : ExtentKind::state;
    const int chunk = static_cast<int>(at % chunks);
    const std::vector<std::byte> bytes = content_of(at, value);
    io::Buffer buffer = io::allocate_buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), buffer.data());
    store.stamp(kind, chunk, buffer.bytes());
    return io::wait_for([&](io::Callback done) { store.write(kind, chunk, std::move(buffer), std::move(done)); }).error;
  }
  void wrong(const std::string& what) {
    if (verdict_.wrong.empty()) verdict_.wrong = what;
  }

  testing::TempDir folder_;
  std::minstd_rand random_;
  std::shared_ptr<SimulatedDrives> drives_;
  StoreOptions options_;
  Verdict verdict_;
  std::map<int, Values> history_;  // by step, what was given to commit()
  int steps_ = 0, now_ = 0, acknowledged_ = 0, written_ = 0;
};

TEST(FaultRig, NothingAcknowledgedIsLostAndNothingIsSilentlyWrong) {
  const std::uint64_t runs = testing::number_in("TIERFLOW_FAULT_RUNS", 2000),
                      first = testing::number_in("TIERFLOW_FAULT_SEED", 1);
  int resumed = 0, fell_back = 0;
  for (std::uint64_t seed = first; seed < first + runs; ++seed) {
    const Verdict verdict = FaultRun(seed, false).run();
    ASSERT_EQ(verdict.wrong, "") << "replay it with TIERFLOW_FAULT_SEED=" << seed << " TIERFLOW_FAULT_RUNS=1";
    resumed += verdict.resumed;
    fell_back += verdict.fell_back;
  }
  EXPECT_GT(resumed, static_cast<int>(runs) / 2);
  std::printf("%llu runs: %d resumed, %d of them after looking at two generations\n",
              static_cast<unsigned long long>(runs), resumed, fell_back);
}

// A drive that says it has flushed and has not breaks the promise: the rig notices.
TEST(FaultRig, NoticesADriveThatLiesAboutFlushing) {
  int noticed = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) noticed += FaultRun(seed, true).run().wrong.empty() ? 0 : 1;
  EXPECT_GT(noticed, 20);
}

}  // namespace
}  // namespace tierflow::swap
