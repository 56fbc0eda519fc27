// The commit protocol under simulated drives: runs that write, commit, are cut off or fail, and are gone on with, each
// decided by one number. Its first fault is one of all there are: each write or flush of a run x how it goes wrong x
// what survives x how many drives; as many runs as that, in any order, have them all. What comes after it is drawn.
// However a run ends: nothing is silently wrong, and no generation that commit() acknowledged is lost.
// TIERFLOW_FAULT_RUNS is how many (make test-faults: 100,000), TIERFLOW_FAULT_SEED the first, to replay one.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <numeric>

#include "tests/support/broken_protocol.h"
#include "tests/support/environment.h"
#include "tests/support/simulated_drives.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

using testing::SimulatedDrives;
using Goes = SimulatedDrives::Goes;
using Survive = SimulatedDrives::Survive;
using testing::Broken;

const Layout& tiny() {
  static const Layout layout(
      {{.name = "a",
        .groups = {{.elements = 4096, .state_bytes_element = 4, .precision = "p"},
                   {.elements = 2048, .state_bytes_element = 8, .precision = "q"}}},
       {.name = "b", .groups = {{.elements = 2048, .state_bytes_element = 4, .precision = "p"}}},
       {.name = "base", .groups = {{.trainable = false, .elements = 2048}}}},  // as of adapters: written once
      {{.units = {0}}, {.units = {1}}, {.units = {2}}}, kChunkQuantum);
  return layout;
}

constexpr int kMostDrives = 3;
constexpr std::array kGoes{Goes::wrong_once, Goes::wrong_for_ever, Goes::torn, Goes::dark};
// Of reads at one place: three attempts are made of each, and it is read once more later.
constexpr std::array<std::uint64_t, 5> kFails{1, 2, 3, 7, 1 << 30};
constexpr std::array kSurvive{Survive::none, Survive::all, Survive::last, Survive::all_but_one, Survive::any};

// What the first power cut or error of a run is.
struct FirstFault {
  int drives = 1;
  Goes goes = Goes::well;
  std::uint64_t nth = 0;  // write or flush, counted from 1
  Survive survive = Survive::none;
};

struct Verdict {
  std::string wrong;    // empty: all is as promised
  bool silent = false;  // bytes were handed out as a step's that are not that step's
  int resumed = 0, fell_back = 0, failed_reads = 0, unreadable = 0;
};

class FaultRun {
 public:
  FaultRun(std::uint64_t seed, const FirstFault& first, bool lying, Broken broken = Broken::nothing)
      : first_(first),
        random_(static_cast<unsigned>(seed * 2654435761U + 17)),
        drives_(std::make_shared<SimulatedDrives>(seed + 1, lying)) {
    options_.volume.engine = io::EngineKind::threads;
    options_.volume.allow_buffered = options_.volume.allow_any_filesystem = true;
    options_.volume.block = 4096;
    options_.volume.wrap_backend = [drives = drives_, broken, places = places()](std::unique_ptr<io::Backend> kernel) {
      std::unique_ptr<io::Backend> backend = testing::simulated(drives)(kernel);
      if (broken != Broken::nothing)
        backend = std::make_unique<testing::BrokenProtocol>(std::move(backend), broken, places);
      return backend;
    };
    options_.volume.on_notice = [this](const io::Notice& notice) {
      if (notice.text.find("goes on from") != std::string::npos) ++verdict_.fell_back;
    };
    for (int drive = 0; drive < first.drives; ++drive)
      options_.volume.folders.push_back(folder_.path() / std::to_string(drive));
    options_.generations = 2;
    options_.scratch.gradients = false;
    options_.identity = "{}";
    options_.run_id = seed + 1;
    options_.read_retry_delay = std::chrono::milliseconds(0);
  }

  Verdict run() {
    auto made = Store::create(options_, tiny());
    if (!made.ok()) return {.wrong = "create: " + made.error().message()};
    std::unique_ptr<Store> store = std::move(made).value();
    for (int round = 0; round < 3 && verdict_.wrong.empty(); ++round) {
      if (round == 0)
        drives_->plan(first_.goes, first_.nth);
      else
        fail_somewhere(round);
      train(*store);
      if (round == 0 && drives_->operations() < first_.nth) wrong("the fault never came");
      store.reset();
      if (round == 0)
        drives_->power_cycle(first_.survive);
      else if (random_() % 4 == 0 && !drives_->dark())
        drives_->restart();
      else
        drives_->power_cycle(kSurvive[random_() % kSurvive.size()]);
      if (random_() % 3 == 0) interrupt_recovery();
      if (random_() % 3 == 0) drives_->fail_reads(1 + random_() % 12, kFails[random_() % kFails.size()]);
      store = go_on();
      if (store == nullptr) break;
    }
    verdict_.failed_reads = static_cast<int>(drives_->failed_reads());
    return verdict_;
  }

  // Writes and flushes of a first round in which all goes well.
  std::uint64_t operations() {
    const std::unique_ptr<Store> store = std::move(Store::create(options_, tiny())).value();
    drives_->plan(Goes::well, 0);
    train(*store);
    return drives_->operations();
  }

 private:
  using Values = std::vector<int>;  // of each extent: what it holds

  void fail_somewhere(int round) {
    const Goes what = kGoes[random_() % kGoes.size()];
    drives_->plan(round == 2 ? Goes::dark : what, 1 + random_() % 70);
  }

  // Steps that change some extents and commit, until something fails or enough is done.
  void train(Store& store) {
    for (int step = 0; step < 4; ++step) {
      Values values = history_.empty() ? Values(2 * tiny().chunks().size(), -1) : history_.at(now_);
      for (std::size_t at = 0; at < values.size(); ++at) {
        if (content_of(at, 0).empty()) continue;
        if (values[at] != -1 && (is_frozen(at) || (at + static_cast<std::size_t>(step)) % 3 == 0)) continue;
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
    drives_->power_cycle(kSurvive[random_() % kSurvive.size()]);
  }

  // What a drive cannot read is no damage: nothing is written, and when it can the run goes on with all of it.
  std::unique_ptr<Store> go_on() {
    const std::uint64_t writes = drives_->operations(), failed = drives_->failed_reads();
    bool unreadable = false;
    std::unique_ptr<Store> store = go_on(unreadable);
    if (!unreadable) return store;
    ++verdict_.unreadable;
    if (drives_->operations() != writes) wrong("it was written to what cannot be read");
    if (drives_->failed_reads() < failed + 3) wrong("a drive that can read was said to be one that cannot");
    drives_->heal();
    unreadable = false;
    store = go_on(unreadable);
    if (unreadable) wrong("it cannot be read though the drive can");
    return store;
  }

  std::unique_ptr<Store> go_on(bool& unreadable) {
    auto opened = Store::resume(options_, tiny());
    if (!opened.ok()) {
      unreadable = opened.error().kind == io::ErrorKind::io;
      if (unreadable) return nullptr;
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
      unreadable = error.kind == io::ErrorKind::io;
      if (unreadable) return nullptr;
      if (acknowledged_ != 0) wrong("lost: " + error.message());
      return nullptr;
    }
    ++verdict_.resumed;
    const int step = std::atoi(store->progress().c_str());
    if (step < acknowledged_) wrong("step " + std::to_string(step) + " is older than what was acknowledged");
    if (!history_.contains(step)) return silent("step " + store->progress() + " was never committed");
    for (std::size_t at = 0; at < bytes.size(); ++at)
      if (bytes[at] != content_of(at, history_[step][at]))
        return silent("extent " + std::to_string(at) + " is another");
    if (!verdict_.wrong.empty()) return nullptr;
    acknowledged_ = now_ = step;
    steps_ = std::max(steps_, step);
    return store;
  }

  static testing::StorePlaces places() {
    std::uint64_t words = 0, second = 0, state = 0;
    for (const Chunk& chunk : tiny().chunks()) {
      words += chunk.word_bytes();
      second += chunk.changes() ? chunk.word_bytes() : 0;
      state += chunk.state_bytes;
    }
    const std::uint64_t all =
        Store::bytes_needed({.generations = 2, .scratch = {.gradients = false}, .identity = "{}"}, tiny());
    return {.superblock_b = kSuperblockB,
            .words = all - 2 * state - second - words,
            .word_bytes = words,
            .second_bytes = second,
            .state = all - 2 * state,
            .other_state = all - 2 * state + tiny().chunks().front().state_bytes};
  }

  static bool is_frozen(std::size_t at) { return !tiny().chunks()[at % tiny().chunks().size()].changes(); }
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

  std::unique_ptr<Store> silent(const std::string& what) {
    wrong(what);
    verdict_.silent = true;
    return nullptr;
  }

  testing::TempDir folder_;
  const FirstFault first_;
  std::minstd_rand random_;
  std::shared_ptr<SimulatedDrives> drives_;
  StoreOptions options_;
  Verdict verdict_;
  std::map<int, Values> history_;  // by step, what was given to commit()
  int steps_ = 0, now_ = 0, acknowledged_ = 0, written_ = 0;
};

// All first faults, by number: neighbours are far apart, and as many numbers as there are have each of them once.
class FirstFaults {
 public:
  FirstFaults() {
    for (int drives = 1; drives <= kMostDrives; ++drives)
      operations_[drives] = FaultRun(0, {.drives = drives}, false).operations();
    while (std::gcd(stride_, size()) != 1) stride_ += 2;
  }
  std::uint64_t size() const {
    return kGoes.size() * kSurvive.size() * std::accumulate(operations_.begin(), operations_.end(), std::uint64_t{0});
  }
  std::uint64_t place(std::uint64_t number) const { return number * stride_ % size(); }
  FirstFault at(std::uint64_t place) const {
    FirstFault fault{.goes = kGoes[place % kGoes.size()]};
    place /= kGoes.size();
    fault.survive = kSurvive[place % kSurvive.size()];
    place /= kSurvive.size();
    while (place >= operations_[fault.drives]) place -= operations_[fault.drives++];
    fault.nth = 1 + place;
    return fault;
  }

 private:
  std::array<std::uint64_t, kMostDrives + 1> operations_{};  // by number of drives
  std::uint64_t stride_ = 7919;
};

TEST(FaultRig, NothingAcknowledgedIsLostAndNothingIsSilentlyWrong) {
  const std::uint64_t runs = testing::number_in("TIERFLOW_FAULT_RUNS", 2000),
                      first = testing::number_in("TIERFLOW_FAULT_SEED", 1);
  const FirstFaults faults;
  std::vector<bool> covered(faults.size());
  int resumed = 0, fell_back = 0, failed_reads = 0, unreadable = 0;
  for (std::uint64_t seed = first; seed < first + runs; ++seed) {
    const std::uint64_t place = faults.place(seed);
    const Verdict verdict = FaultRun(seed, faults.at(place), false).run();
    ASSERT_EQ(verdict.wrong, "") << "replay it with TIERFLOW_FAULT_SEED=" << seed << " TIERFLOW_FAULT_RUNS=1";
    covered[place] = true;
    resumed += verdict.resumed;
    fell_back += verdict.fell_back;
    failed_reads += verdict.failed_reads;
    unreadable += verdict.unreadable;
  }
  const auto distinct = static_cast<std::uint64_t>(std::ranges::count(covered, true));
  EXPECT_EQ(distinct, std::min(runs, faults.size()));
  EXPECT_GT(resumed, static_cast<int>(runs) / 2);
  EXPECT_GE(failed_reads, static_cast<int>(runs) / 4);
  EXPECT_GE(unreadable, static_cast<int>(runs) / 20);
  std::printf(
      "%llu runs: %llu of %llu first faults; %d resumed, %d of them after looking at two generations; %d reads failed, "
      "%d times too often to go on\n",
      static_cast<unsigned long long>(runs), static_cast<unsigned long long>(distinct),
      static_cast<unsigned long long>(faults.size()), resumed, fell_back, failed_reads, unreadable);
}

// A drive that says it has flushed and has not breaks the promise. The rig notices; and what is damaged then is found:
// nobody gets bytes as a step's that are not that step's.
TEST(FaultRig, NoticesADriveThatLiesAboutFlushing) {
  const FirstFaults faults;
  int noticed = 0, found = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Verdict verdict = FaultRun(seed, faults.at(faults.place(seed)), true).run();
    EXPECT_FALSE(verdict.silent) << seed << ": " << verdict.wrong;
    noticed += verdict.wrong.empty() ? 0 : 1;
    found += verdict.wrong.starts_with("lost: ") || verdict.wrong.starts_with("cannot be opened: ") ? 1 : 0;
  }
  EXPECT_GT(noticed, 20);
  EXPECT_GT(found, 20);
}

// Each promise that the protocol rests on, broken. The rig notices: what was acknowledged is lost, and that is found,
// so that nobody gets bytes as a step's that are not that step's.
TEST(FaultRig, NoticesWhatBreaksTheProtocol) {
  const std::uint64_t runs = testing::number_in("TIERFLOW_CONTROL_RUNS", 60);
  const std::uint64_t last = FaultRun(0, {}, false).operations();
  const auto play = [&](Broken broken, auto goes) {
    int noticed = 0;
    for (std::uint64_t seed = 1; seed <= runs; ++seed) {
      const FirstFault fault{.goes = goes[seed % goes.size()],
                             .nth = 1 + seed * 7 % last,
                             .survive = kSurvive[seed / 4 % kSurvive.size()]};
      const Verdict verdict = FaultRun(seed, fault, false, broken).run();
      EXPECT_FALSE(verdict.silent) << static_cast<int>(broken) << " " << seed << ": " << verdict.wrong;
      noticed += verdict.wrong.empty() ? 0 : 1;
    }
    return noticed;
  };
  constexpr std::array kSpoiled{Goes::spoiled};
  EXPECT_EQ(play(Broken::nothing, kGoes), 0);
  EXPECT_EQ(play(Broken::nothing, kSpoiled), 0);
  EXPECT_GT(play(Broken::superblock_in_copy_a, kSpoiled), 0);
  for (const Broken broken : {Broken::no_first_flush, Broken::words_in_place, Broken::errors_hidden,
                              Broken::read_errors_hidden, Broken::sectors_exchanged})
    EXPECT_GT(play(broken, kGoes), 0) << static_cast<int>(broken);
}

}  // namespace
}  // namespace tierflow::swap
