// A store that a run goes on with: what is verified first, what is written before that, and what it falls back on.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>

#include "tests/support/faulty_backend.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

using Restored = std::map<std::pair<ExtentKind, int>, std::vector<std::byte>>;

std::unique_ptr<Store> resume(const StoreOptions& options) {
  auto store = Store::resume(options, layout());
  EXPECT_TRUE(store.ok()) << store.error().message();
  return store.ok() ? std::move(store).value() : nullptr;
}
io::Error restore(Store& store, Restored* all = nullptr) {
  return store.restore(
      [&](ExtentKind kind, int index, std::span<const std::byte> bytes) {
        if (all != nullptr) (*all)[{kind, index}] = {bytes.begin(), bytes.end()};
      },
      {});
}
void expect_all(const Restored& all, int value) {
  EXPECT_EQ(all.size(), 2U * static_cast<unsigned>(chunks()));
  for (const auto& [extent, bytes] : all)
    for (std::uint64_t i = 0; i < bytes.size(); ++i)
      ASSERT_EQ(bytes[i], byte_of(extent.first, extent.second, value, i));
}
std::filesystem::path file_in(const testing::TempDir& folder) {
  return folder.path() / "state.tfv";
}
// The places in the data file that hold these bytes: of one generation alone.
std::vector<std::uint64_t> places_of(const testing::TempDir& folder, ExtentKind kind, int index, int value) {
  const std::vector<char> file = read_file(file_in(folder));
  const Chunk& chunk = layout().chunks()[index];
  std::vector<std::byte> extent(kind == ExtentKind::hi ? chunk.word_bytes() : chunk.state_bytes);
  fill(extent, kind, index, value);
  std::vector<std::uint64_t> found;
  for (std::size_t at = std::size_t{3} << 20; at + extent.size() <= file.size(); at += kSector)
    if (std::memcmp(file.data() + at, extent.data(), extent.size()) == 0) found.push_back(at);
  return found;
}
// Flips a bit of each of them.
int damage(const testing::TempDir& folder, ExtentKind kind, int index, int value) {
  std::vector<char> file = read_file(file_in(folder));
  const std::vector<std::uint64_t> places = places_of(folder, kind, index, value);
  for (const std::uint64_t at : places) file[at + 40] ^= 2;
  std::ofstream(file_in(folder), std::ios::binary).write(file.data(), static_cast<std::streamsize>(file.size()));
  return static_cast<int>(places.size());
}

struct StoreResume : ::testing::Test {
  void commit_up_to(int last) {
    const auto store = create(options_);
    for (int value = 1; value <= last; ++value) ASSERT_OK(write_and_commit(*store, value));
  }
  testing::TempDir folder_;
  StoreOptions options_ = options_in(folder_.path(), 2);
};

TEST_F(StoreResume, GoesOnWhereTheLastCommitWas) {
  commit_up_to(2);
  StoreOptions other = options_;  // other scratch than the run had that made it
  other.scratch = {.gradients = false, .activation_bytes = {kSector, 3 * kSector}};
  {
    const auto store = resume(other);
    ASSERT_TRUE(store);
    Restored all;
    ASSERT_OK(restore(*store, &all));
    expect_all(all, 2);
    EXPECT_EQ(store->progress(), step(2));
    EXPECT_EQ(store->identity(), options_.identity);
    ASSERT_OK(write_extent(*store, ExtentKind::activations, 1, 5));
    ASSERT_OK(write_all(*store, 3));
  }
  expect_opens_at(options_, 2);  // nothing that generation 2 refers to was written
  {
    const auto store = resume(options_);
    ASSERT_TRUE(store);
    ASSERT_OK(restore(*store));
    ASSERT_OK(write_and_commit(*store, 3));
    ASSERT_OK(write_and_commit(*store, 4));
  }
  expect_opens_at(options_, 4);
}

TEST_F(StoreResume, WritesNothingBeforeAllIsVerified) {
  commit_up_to(2);
  const std::vector<char> before = read_file(file_in(folder_));
  const auto plan = std::make_shared<testing::FaultPlan>();
  StoreOptions watched = options_in(folder_.path(), 2, testing::faults(plan));
  watched.scratch.gradients = false;  // which has files of its own
  {
    const auto store = resume(watched);
    ASSERT_TRUE(store);
    const io::Error refused = write_extent(*store, ExtentKind::hi, 0, 3);
    EXPECT_NE(refused.detail.find("not verified yet"), std::string::npos) << refused.message();
    EXPECT_TRUE(store->commit(step(3)));
  }
  EXPECT_TRUE(before == read_file(file_in(folder_)));
  for (const io::Action action : {io::Action::write, io::Action::flush}) EXPECT_EQ(plan->seen(action), 0U);
  EXPECT_GT(plan->seen(io::Action::read), 0U);
}

TEST_F(StoreResume, FallsBackOnTheGenerationBeforeWhereItIsWhole) {
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
    testing::TempDir folder;
    StoreOptions options = options_in(folder.path(), 2);
    {
      const auto store = create(options);
      for (int value = 1; value <= 3; ++value) ASSERT_OK(write_and_commit(*store, value));
    }
    ASSERT_EQ(damage(folder, kind, 1, 3), 1);
    std::vector<std::string> said;
    options.volume.on_notice = [&](const io::Notice& notice) { said.push_back(notice.text); };
    {
      const auto store = resume(options);
      ASSERT_TRUE(store);
      Restored all;
      ASSERT_OK(restore(*store, &all));
      expect_all(all, 2);
      EXPECT_EQ(store->progress(), step(2));
      EXPECT_EQ(store->generation(), 2U);
      ASSERT_FALSE(said.empty());
      EXPECT_NE(said.back().find("goes on from generation 2"), std::string::npos) << said.back();
      // The process dies once more, with new bytes over those of the damaged generation.
      ASSERT_OK(write_extent(*store, ExtentKind::state, 0, 7));
    }
    {
      const auto store = resume(options);
      ASSERT_TRUE(store);
      ASSERT_OK(restore(*store));
      EXPECT_EQ(store->generation(), 2U);
      ASSERT_OK(write_and_commit(*store, 3));
    }
    expect_opens_at(options, 3);
  }
}

// What a client keeps beside a generation counts as its extents do.
TEST_F(StoreResume, FallsBackWhereWhatLiesBesideIsDamaged) {
  commit_up_to(3);
  std::uint64_t damaged_from = 3;
  options_.check_beside = [&](std::uint64_t generation, const std::string& progress) -> io::Error {
    EXPECT_EQ(progress, step(static_cast<int>(generation)));
    if (generation < damaged_from) return {};
    return {.kind = io::ErrorKind::corruption, .detail = "what lies beside is gone"};
  };
  const auto verified = [&] {
    auto store = Store::open(options_, layout());
    EXPECT_TRUE(store.ok()) << store.error().message();
    const std::string said = (*store)->verify_all({}).message();
    EXPECT_EQ((*store)->generation(), 3U);
    return said;
  };
  EXPECT_EQ(verified(),
            "generation 3: what lies beside is gone; generation 2, the one before it, is whole: a run goes "
            "on from there");
  {
    const auto store = resume(options_);
    ASSERT_TRUE(store);
    Restored all;
    ASSERT_OK(restore(*store, &all));
    expect_all(all, 2);
    EXPECT_EQ(store->progress(), step(2));
  }
  damaged_from = 2;
  EXPECT_EQ(verified(), "generation 3: what lies beside is gone; generation 2 is not whole either");
  EXPECT_NE(restore(*resume(options_)).detail.find("generation 2, which can, is not whole any more"),
            std::string::npos);
  damaged_from = 3;
  {  // a run that was killed in its next step
    options_.check_beside = {};
    const auto store = resume(options_);
    ASSERT_OK(restore(*store));
    ASSERT_OK(write_extent(*store, ExtentKind::state, 2, 4));
  }
  options_.check_beside = [](std::uint64_t generation, const std::string&) -> io::Error {
    if (generation < 3) return {};
    return {.kind = io::ErrorKind::corruption, .detail = "what lies beside is gone"};
  };
  const io::Error refused = restore(*resume(options_));
  EXPECT_EQ(refused.kind, io::ErrorKind::corruption);
  EXPECT_NE(refused.detail.find("begun to overwrite"), std::string::npos) << refused.detail;
}

// Going back a generation takes the newest away: damage alone is worth that.
TEST_F(StoreResume, WhatCannotBeReadForWantOfAPermissionIsNotDamage) {
  commit_up_to(3);
  options_.check_beside = [](std::uint64_t generation, const std::string&) -> io::Error {
    if (generation < 3) return {};
    return {.kind = io::ErrorKind::environment, .error_number = EACCES};
  };
  EXPECT_EQ(restore(*resume(options_)).kind, io::ErrorKind::environment);
  options_.check_beside = {};
  const auto store = resume(options_);
  ASSERT_OK(restore(*store));
  EXPECT_EQ(store->generation(), 3U);
}

// A drive that fails may be back tomorrow: nothing is written, and nobody hears that the state is damaged.
TEST_F(StoreResume, ADriveThatCannotReadIsNoDamage) {
  commit_up_to(3);
  const std::vector<std::uint64_t> places = places_of(folder_, ExtentKind::state, 1, 3);
  ASSERT_EQ(places.size(), 1U);
  const std::uint64_t newest = places.front() - BadSectors::kDataArea;
  const std::uint64_t before = places_of(folder_, ExtentKind::state, 1, 2).front() - BadSectors::kDataArea;
  const std::vector<char> file = read_file(file_in(folder_));
  const auto options = [&](std::uint64_t begin, std::uint64_t end, const BadSectors::Healed& healed = {}) {
    StoreOptions with = options_in(folder_.path(), 2, with_bad_sectors(begin, end, healed));
    with.read_retry_delay = std::chrono::milliseconds(5);
    return with;
  };
  const io::Error refused = restore(*resume(options(newest, newest + kSector)));
  EXPECT_EQ(refused.kind, io::ErrorKind::io) << refused.message();
  EXPECT_EQ(refused.error_number, EIO);
  for (const char* part : {"generation 3 cannot be read", "the state stays"})
    EXPECT_NE(refused.detail.find(part), std::string::npos) << refused.detail;
  EXPECT_TRUE(file == read_file(file_in(folder_)));
  {  // as when a bus was reset: the drive is back a little later
    const auto healed = std::make_shared<std::atomic<bool>>(false);
    StoreOptions back = options(newest, newest + kSector, healed);
    back.volume.on_notice = [&](const io::Notice& notice) {
      if (notice.text.find("read once more in") != std::string::npos) *healed = true;
    };
    const auto store = resume(back);
    Restored all;
    ASSERT_OK(restore(*store, &all));
    expect_all(all, 3);
    EXPECT_TRUE(*healed);
  }
  {  // the damage of one generation does not make of the other's trouble with the drive more damage
    testing::TempDir copy;
    std::filesystem::copy(file_in(folder_), file_in(copy));
    ASSERT_EQ(damage(copy, ExtentKind::hi, 0, 3), 1);
    for (const bool go_back : {false, true}) {
      StoreOptions both = options_in(copy.path(), 2, with_bad_sectors(before, before + kSector));
      both.read_retry_delay = std::chrono::milliseconds(5);
      both.go_back = go_back;
      const io::Error wrong = restore(*resume(both));
      EXPECT_EQ(wrong.kind, io::ErrorKind::io) << wrong.message();
      EXPECT_NE(wrong.detail.find("generation 2 cannot be read"), std::string::npos) << wrong.detail;
    }
  }
  // Superblock A is that of generation 2: whether B's is the newest, nobody knows without it.
  const auto unknown = Store::resume(options(kSuperblockA, kSuperblockA + kSector), layout());
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().kind, io::ErrorKind::io) << unknown.error().message();
  EXPECT_NE(unknown.error().detail.find("the newest generation cannot be read"), std::string::npos);
  EXPECT_TRUE(file == read_file(file_in(folder_)));
  const auto healed = std::make_shared<std::atomic<bool>>(false);
  StoreOptions back = options(kSuperblockA, kSuperblockA + kSector, healed);
  back.volume.on_notice = [&](const io::Notice& notice) {
    if (notice.text.find("read once more in") != std::string::npos) *healed = true;
  };
  {
    const auto store = resume(back);
    ASSERT_TRUE(store);
    EXPECT_TRUE(*healed);
  }
  back = options(kSuperblockA, kSuperblockA + kSector);
  back.go_back = true;
  {
    const auto store = resume(back);
    ASSERT_TRUE(store);
  }
  back = options(newest, newest + kSector);
  back.go_back = true;
  const auto store = resume(back);
  Restored all;
  ASSERT_OK(restore(*store, &all));
  expect_all(all, 2);
  EXPECT_EQ(store->generation(), 2U);
}

// The volume has waited for it to its limit.
TEST_F(StoreResume, ADriveThatDoesNotAnswerIsNotWaitedForAgain) {
  commit_up_to(3);
  const std::uint64_t newest = places_of(folder_, ExtentKind::state, 1, 3).front() - BadSectors::kDataArea;
  StoreOptions silent = options_in(folder_.path(), 2, with_bad_sectors(newest, newest + kSector, {}, ETIMEDOUT));
  silent.read_retry_delay = std::chrono::milliseconds(5);
  std::vector<std::string> said;
  silent.volume.on_notice = [&](const io::Notice& notice) { said.push_back(notice.text); };
  EXPECT_EQ(restore(*resume(silent)).error_number, ETIMEDOUT);
  EXPECT_TRUE(said.empty()) << said.front();
}

// Where the newest superblock is damaged.
TEST_F(StoreResume, AGenerationThatIsPassedOverIsSpokenOf) {
  commit_up_to(3);
  const std::uint64_t before = places_of(folder_, ExtentKind::state, 1, 2).front() - BadSectors::kDataArea;
  {
    std::fstream file(file_in(folder_), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(BadSectors::kDataArea + kSuperblockB));
    file << "damaged";
  }
  // A drive that fails is no damage of the other one.
  StoreOptions failing = options_in(folder_.path(), 2, with_bad_sectors(before, before + kSector));
  failing.read_retry_delay = std::chrono::milliseconds(5);
  const auto unread = Store::open(failing, layout());
  ASSERT_FALSE(unread.ok());
  EXPECT_EQ(unread.error().kind, io::ErrorKind::io);
  EXPECT_NE(unread.error().detail.find("generation 2 cannot be read, and may be whole"), std::string::npos)
      << unread.error().detail;
  std::vector<std::string> said;
  options_.volume.on_notice = [&](const io::Notice& notice) { said.push_back(notice.text); };
  const auto store = resume(options_);
  ASSERT_OK(restore(*store));
  EXPECT_EQ(store->generation(), 2U);
  ASSERT_FALSE(said.empty());
  for (const char* part : {"goes on from generation 2", "superblock B is damaged"})
    EXPECT_NE(said.back().find(part), std::string::npos) << said.back();
}

TEST_F(StoreResume, AGenerationWithoutExtentsIsNotWhole) {
  { ASSERT_OK(create(options_)->commit("{}")); }
  const io::Error refused = restore(*resume(options_));
  EXPECT_EQ(refused.kind, io::ErrorKind::corruption);
  EXPECT_NE(refused.detail.find("no extents"), std::string::npos) << refused.detail;
}

// What is damaged is named with its generation, and so is what a run would do about it.
TEST_F(StoreResume, VerifySaysWhichGenerationIsDamaged) {
  commit_up_to(3);
  ASSERT_EQ(damage(folder_, ExtentKind::state, 1, 3), 1);
  auto store = Store::open(options_, layout());
  ASSERT_TRUE(store.ok());
  const io::Error wrong = (*store)->verify_all({});
  EXPECT_EQ(wrong.kind, io::ErrorKind::corruption);
  for (const char* part : {"generation 3: the state of chunk 1", "generation 2, the one before it, is whole"})
    EXPECT_NE(wrong.detail.find(part), std::string::npos) << wrong.detail;
}

TEST_F(StoreResume, SaysWhereNothingIsWhole) {
  {
    const auto store = create(options_);
    for (int value = 1; value <= 3; ++value) ASSERT_OK(write_and_commit(*store, value));
    ASSERT_OK(write_extent(*store, ExtentKind::state, 2, 4));  // over generation 2
  }
  ASSERT_EQ(damage(folder_, ExtentKind::hi, 0, 3), 1);
  const std::vector<char> before = read_file(file_in(folder_));
  {
    const auto store = resume(options_);
    ASSERT_TRUE(store);
    const io::Error error = restore(*store);
    EXPECT_EQ(error.kind, io::ErrorKind::corruption);
    for (const char* part : {"generation 3", "generation 2", "begun to overwrite", "exported before"})
      EXPECT_NE(error.detail.find(part), std::string::npos) << error.detail;
    EXPECT_TRUE(write_extent(*store, ExtentKind::hi, 0, 5));
  }
  EXPECT_TRUE(before == read_file(file_in(folder_)));
}

// A generation that a drive may hold in its cache alone is made durable before anything of the one before it goes.
TEST_F(StoreResume, MakesWhatItFindsDurable) {
  commit_up_to(2);
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = resume(options_in(folder_.path(), 2, testing::faults(plan)));
  ASSERT_TRUE(store);
  plan->set({.kind = testing::Fault::Kind::error, .action = io::Action::flush, .nth = 2});
  EXPECT_EQ(restore(*store).kind, io::ErrorKind::io);
  plan->clear();
  EXPECT_TRUE(write_extent(*store, ExtentKind::hi, 0, 3));
}

TEST_F(StoreResume, AsksForTwoGenerationsAndACommit) {
  EXPECT_NE(Store::resume(options_, layout()).error().error_number, 0);  // no file
  { ASSERT_OK(write_all(*create(options_), 1)); }
  EXPECT_EQ(Store::inspect(options_.volume)->generation, 0U);
  EXPECT_NE(Store::resume(options_, layout()).error().detail.find("before its first commit"), std::string::npos);
  testing::TempDir folder;
  const StoreOptions one = options_in(folder.path(), 1);
  { ASSERT_OK(write_and_commit(*create(one), 1)); }
  EXPECT_NE(Store::resume(one, layout()).error().detail.find("can be exported"), std::string::npos);
}

// Ctrl-C in a long verification: nothing is under way any more when the caller hears of it.
TEST_F(StoreResume, WhatIsThrownWhileItVerifiesWaitsForTheReadings) {
  commit_up_to(2);
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = resume(options_in(folder_.path(), 2, testing::faults(plan)));
  ASSERT_TRUE(store);
  plan->set({.kind = testing::Fault::Kind::delay, .nth = 2, .sticky = true, .delay = std::chrono::milliseconds(300)});
  EXPECT_THROW((void)store->restore({}, [](std::uint64_t, std::uint64_t) { throw std::runtime_error("stopped"); }),
               std::runtime_error);
  EXPECT_EQ(store->drives().front().in_flight, 0U);
}

// Chunks larger than what is read ahead, and many small ones: each comes once, in order, and damage stops it.
TEST(StoreScrub, ReadsEachExtentOnce) {
  const Layout large({{.name = "a", .groups = {{.elements = 40 << 20, .state_bytes_element = 1, .precision = "p"}}},
                      {.name = "b", .groups = {{.elements = 300 << 10, .state_bytes_element = 1, .precision = "p"}}}},
                     {{.units = {0}}, {.units = {1}}}, 20 << 20);
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    auto store = Store::create(options, large);
    ASSERT_TRUE(store.ok()) << store.error().message();
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
      for (int index = 0; index < static_cast<int>(large.chunks().size()); ++index)
        ASSERT_OK(write_extent(**store, kind, index, 1));
    ASSERT_OK((*store)->commit("{}"));
  }
  auto store = Store::resume(options, large);
  ASSERT_TRUE(store.ok()) << store.error().message();
  std::vector<std::pair<ExtentKind, int>> seen;
  std::uint64_t last = 0, all = 0;
  ASSERT_OK((*store)->restore([&](ExtentKind kind, int index, auto) { seen.emplace_back(kind, index); },
                              [&](std::uint64_t done, std::uint64_t total) {
                                EXPECT_GT(done, last);
                                last = done;
                                all = total;
                              }));
  EXPECT_EQ(last, all);
  EXPECT_EQ(seen.size(), 2 * large.chunks().size());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

// What is never trained has one place, which every generation refers to, and which no commit is followed by a write of.
TEST(StoreFrozen, HasOneSlotAndIsNeverWrittenAgain) {
  constexpr std::uint64_t kTrained = 2 * kElementsPad, kFrozen = 24 * kElementsPad;
  const Layout partly({{.name = "a",
                        .groups = {{.elements = kTrained, .state_bytes_element = 4, .precision = "a"},
                                   {.trainable = false, .elements = kFrozen, .precision = "a"}}}},
                      {{.units = {0}}}, kChunkQuantum);
  ASSERT_EQ(partly.chunks().size(), 2U);
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  StoreOptions one = options;
  one.generations = 1;
  EXPECT_EQ(Store::bytes_needed(options, partly) - Store::bytes_needed(one, partly), kTrained * (2 + 4));
  const auto put = [](Store& store, ExtentKind kind, int index, int value) {
    return write_extent(store, kind, index, value);
  };
  {
    auto made = Store::create(options, partly);
    ASSERT_TRUE(made.ok()) << made.error().message();
    Store& store = **made;
    ASSERT_OK(put(store, ExtentKind::hi, 1, 8));
    ASSERT_OK(put(store, ExtentKind::hi, 1, 9));  // nothing is committed yet
    for (int value = 1; value <= 3; ++value) {
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) ASSERT_OK(put(store, kind, 0, value));
      ASSERT_OK(store.commit(step(value)));
      const io::Error refused = put(store, ExtentKind::hi, 1, 7);
      EXPECT_EQ(refused.kind, io::ErrorKind::usage);
      EXPECT_NE(refused.detail.find("frozen"), std::string::npos) << refused.message();
    }
    // Beyond the last commit: none of this may touch what it refers to.
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) ASSERT_OK(put(store, kind, 0, 4));
  }
  auto store = Store::resume(options, partly);
  ASSERT_TRUE(store.ok()) << store.error().message();
  Restored all;
  ASSERT_OK(restore(**store, &all));
  EXPECT_EQ(all.size(), 3U);
  for (const auto& [extent, bytes] : all)
    for (std::uint64_t i = 0; i < bytes.size(); ++i)
      ASSERT_EQ(bytes[i], byte_of(extent.first, extent.second, extent.second == 1 ? 9 : 3, i));
  EXPECT_TRUE(put(**store, ExtentKind::hi, 1, 7));
}

// What is written between steps is not trainable, but has two places for words and state as what is: a commit keeps
// what it refers to.
TEST(StoreRewritten, HasTwoSlotsForWordsAndState) {
  constexpr std::uint64_t kTrained = 2 * kElementsPad, kRewritten = 24 * kElementsPad;
  const Layout partly(
      {{.name = "a",
        .groups = {{.elements = kTrained, .state_bytes_element = 4, .precision = "a"},
                   {.trainable = false, .rewritten = true, .elements = kRewritten, .state_bytes_element = 2}}}},
      {{.units = {0}}}, kChunkQuantum);
  EXPECT_EQ(partly.gradient_bytes(0), 4 * kTrained);
  EXPECT_EQ(partly.chunks()[1].state_bytes, 2 * kRewritten);
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  StoreOptions one = options;
  one.generations = 1;
  EXPECT_EQ(Store::bytes_needed(options, partly) - Store::bytes_needed(one, partly),
            kTrained * (2 + 4) + kRewritten * (2 + 2));
  {
    auto made = Store::create(options, partly);
    ASSERT_TRUE(made.ok()) << made.error().message();
    const auto put_all = [&](int value) {
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        for (int chunk = 0; chunk < 2; ++chunk) ASSERT_OK(write_extent(**made, kind, chunk, value));
    };
    for (int value = 1; value <= 3; ++value) {
      put_all(value);
      ASSERT_OK((*made)->commit(step(value)));
    }
    put_all(4);  // beyond the last commit
  }
  auto store = Store::resume(options, partly);
  ASSERT_TRUE(store.ok()) << store.error().message();
  Restored all;
  ASSERT_OK(restore(**store, &all));
  EXPECT_EQ(all.size(), 4U);
  for (const auto& [extent, bytes] : all)
    for (std::uint64_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], byte_of(extent.first, extent.second, 3, i));
}

}  // namespace
}  // namespace tierflow::swap
