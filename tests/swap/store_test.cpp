// The store alone: what a commit leaves after a power cut, what opens when one copy is damaged, what a failed commit
// does to those after it, and the bytes of every layout.
#include "swap/store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <utility>

#include "tests/support/faulty_backend.h"
#include "tests/support/power_cut.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

using testing::Fault;
using testing::FaultPlan;

// At every write of three commits the power goes: whatever part of the cache survives, the store opens at a generation
// no older than the last that commit() acknowledged, and holds that generation's bits.
TEST(StorePowerCut, KeepsEveryAcknowledgedGeneration) {
  testing::TempDir folder, cut;
  const auto cache = std::make_shared<testing::DriveCache>();
  const StoreOptions options = options_in(folder.path(), 2, testing::caching(cache));
  std::vector<std::size_t> acknowledged_at;  // writes so far, by generation
  std::vector<char> image;
  {
    const auto store = create(options);
    image = read_file(folder.path() / "state.tfv");
    cache->forget();
    for (int value = 1; value <= 3; ++value) {
      ASSERT_OK(write_and_commit(*store, value));
      EXPECT_EQ(cache->durable, cache->writes.size()) << "acknowledged before it was durable";
      acknowledged_at.push_back(cache->writes.size());
    }
    ASSERT_OK(write_all(*store, 4));
  }
  int opened = 0;
  testing::for_each_cut(*cache, image, cut.path(), [&](std::size_t cut_at, const std::string& where) {
    const auto acknowledged =
        std::count_if(acknowledged_at.begin(), acknowledged_at.end(), [&](std::size_t at) { return at < cut_at; });
    if (acknowledged == 0) return;  // nothing is promised yet
    auto store = Store::open(options_in(cut.path(), 2), layout());
    ASSERT_TRUE(store.ok()) << where << ": " << store.error().message();
    ASSERT_GE((*store)->generation(), static_cast<std::uint64_t>(acknowledged)) << where;
    expect_holds(**store, static_cast<int>((*store)->generation()));
    ++opened;
  });
  EXPECT_GT(opened, 60);
}

// The order that the test above takes for granted, as the drive sees it.
TEST(StoreCommit, FlushesBeforeTheSuperblockAndAfter) {
  testing::TempDir folder;
  struct Seen {
    std::mutex mutex;
    std::string order;
  };
  const auto seen = std::make_shared<Seen>();
  struct Watching final : public testing::ForwardingBackend {
    Watching(std::unique_ptr<io::Backend> inner, std::shared_ptr<Seen> seen_)
        : ForwardingBackend(std::move(inner)), seen(std::move(seen_)) {}
    bool push(const io::KernelOp& op) override {
      if (!ForwardingBackend::push(op)) return false;
      std::lock_guard lock(seen->mutex);
      const bool superblock = op.action == io::Action::write && std::memcmp(op.data, Superblock{}.magic.data(), 8) == 0;
      const bool manifest = op.action == io::Action::write && op.data[0] == std::byte{'{'};
      seen->order += op.action == io::Action::read    ? 'r'
                     : op.action == io::Action::flush ? 'f'
                     : superblock                     ? 'S'
                     : manifest                       ? 'M'
                                                      : 'd';
      return true;
    }
    std::shared_ptr<Seen> seen;
  };
  const auto store = create(options_in(folder.path(), 2, [seen](std::unique_ptr<io::Backend> inner) {
    return std::make_unique<Watching>(std::move(inner), seen);
  }));
  const std::string data(2 * static_cast<std::size_t>(chunks()), 'd');
  seen->order.clear();
  ASSERT_OK(write_and_commit(*store, 0x7f));
  EXPECT_EQ(seen->order, data + "MfSf");
}

TEST(StoreOpen, ADamagedCopyGivesWayToTheOneBefore) {
  for (const std::uint64_t damage : {kSuperblockA + 20, kManifestA + 50}) {
    testing::TempDir folder;
    const StoreOptions options = options_in(folder.path(), 2);
    {
      const auto store = create(options);
      ASSERT_OK(write_and_commit(*store, 1));
      ASSERT_OK(write_and_commit(*store, 2));  // in copy A
    }
    expect_opens_at(options, 2);
    with_volume(options, [&](io::Volume& volume) { flip(volume, damage); });
    std::vector<std::string> said;
    StoreOptions listening = options;
    listening.volume.on_notice = [&](const io::Notice& notice) { said.push_back(notice.text); };
    expect_opens_at(listening, 1);
    ASSERT_EQ(said.size(), 1U);
    EXPECT_NE(said.front().find("opened at generation 1"), std::string::npos) << said.front();
    EXPECT_NE(said.front().find(damage < kManifestA ? "superblock A is damaged" : "generation 2"), std::string::npos)
        << said.front();
    EXPECT_EQ(Store::inspect(options.volume).value().progress, step(1));
  }
}

// JSON all the same, and another number in it.
TEST(StoreOpen, AManifestIsWhatWasCommittedBitForBit) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    const auto store = create(options);
    ASSERT_OK(write_and_commit(*store, 1));
    ASSERT_OK(write_and_commit(*store, 2));
  }
  with_volume(options, [&](io::Volume& volume) {
    const std::vector<std::byte> bytes = bytes_at(volume, kManifestA, kSector);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::size_t number = text.find("step\\\":2");
    ASSERT_NE(number, std::string_view::npos);
    flip(volume, kManifestA + number + 7);  // 2 becomes 6
  });
  expect_opens_at(options, 1);
}

// Which may hide that a newer generation was there: the damaged copy is the older one.
TEST(StoreOpen, DamageOfTheOlderCopyChangesNothing) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    const auto store = create(options);
    for (int value = 1; value <= 3; ++value) ASSERT_OK(write_and_commit(*store, value));  // 3 in copy B
  }
  with_volume(options, [&](io::Volume& volume) { flip(volume, kSuperblockA + 20); });
  expect_opens_at(options, 3);
}

TEST(StoreOpen, AGenerationThatWasOverwrittenIsRefusedInWords) {
  for (const std::uint64_t damage : {kSuperblockA + 20, kManifestA + 50})
    for (const bool blank : {false, true})
      for (const int generations : {1, 2}) {
        testing::TempDir folder;
        const StoreOptions options = options_in(folder.path(), generations);
        {
          const auto store = create(options);
          ASSERT_OK(write_and_commit(*store, 1));
          ASSERT_OK(write_and_commit(*store, 2));
          // Of the two slots that generation 1 has: one extent of generation 3 is enough.
          ASSERT_OK(write_extent(*store, ExtentKind::state, 1, 3));
        }
        if (generations == 2) expect_opens_at(options, 2);
        with_volume(options, [&](io::Volume& volume) {
          const std::vector<std::byte> nothing(kSector);
          if (blank)
            put(volume, damage / kSector * kSector, nothing);
          else
            flip(volume, damage);
        });
        const auto store = Store::open(options, layout());
        ASSERT_FALSE(store.ok()) << damage << blank << generations;
        EXPECT_EQ(store.error().kind, io::ErrorKind::corruption);
        EXPECT_NE(store.error().detail.find("is not whole any more"), std::string::npos) << store.error().message();
      }
}

TEST(StoreOpen, AnUnreadableCopyGivesWayAsWell) {
  testing::TempDir folder;
  {
    const auto store = create(options_in(folder.path(), 2));
    ASSERT_OK(write_and_commit(*store, 1));
    ASSERT_OK(write_and_commit(*store, 2));  // in copy A
  }
  const auto with_bad = [&](std::uint64_t begin, std::uint64_t end) {
    return options_in(folder.path(), 2, with_bad_sectors(begin, end));
  };
  expect_opens_at(with_bad(kSuperblockA, kSuperblockA + kSector), 1);
  expect_opens_at(with_bad(kManifestA, kManifestA + kSector), 1);
  expect_opens_at(with_bad(kSuperblockB, kSuperblockB + kSector), 2);
  EXPECT_EQ(Store::inspect(with_bad(kSuperblockA, kSuperblockA + kSector).volume).value().progress, step(1));
  const auto none = Store::open(with_bad(kSuperblockA, kManifestA), layout());
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().kind, io::ErrorKind::io);
  EXPECT_EQ(none.error().error_number, EIO);
  EXPECT_NE(none.error().detail.find("superblock A cannot be read"), std::string::npos) << none.error().message();
}

TEST(StoreOpen, NoGenerationIsSaidAsItIs) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    const auto store = create(options);
    ASSERT_OK(write_all(*store, 1));
  }
  const auto refused = [&] {
    const auto store = Store::open(options, layout());
    EXPECT_FALSE(store.ok());
    EXPECT_EQ(store.error().kind, io::ErrorKind::corruption);
    return store.error().detail;
  };
  EXPECT_NE(refused().find("ended before its first commit"), std::string::npos);
  with_volume(options, [&](io::Volume& volume) {
    std::vector<std::byte> sector(kSector);
    Superblock block;
    block.version = 9;
    block.checksum = block.own_checksum();
    std::memcpy(sector.data(), &block, sizeof block);
    put(volume, kSuperblockB, sector);
  });
  EXPECT_NE(refused().find("superblock B is of format version 9"), std::string::npos);
}

TEST(StoreCommit, AFailedOneIsTheLast) {
  // By what fails: the manifest's write, the first flush, the superblock's write, the second flush.
  for (const auto& [action, nth] : {std::pair{io::Action::write, 1}, std::pair{io::Action::flush, 1},
                                    std::pair{io::Action::write, 2}, std::pair{io::Action::flush, 2}}) {
    testing::TempDir folder;
    const auto plan = std::make_shared<FaultPlan>();
    {
      const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
      ASSERT_OK(write_and_commit(*store, 1));
      ASSERT_OK(write_all(*store, 2));
      plan->set({.kind = Fault::Kind::error,
                 .action = action,
                 .nth = static_cast<std::uint64_t>(nth),
                 .sticky = action == io::Action::write});
      const io::Error error = store->commit(step(2));
      EXPECT_EQ(error.kind, io::ErrorKind::io) << error.message();
      EXPECT_EQ(store->generation(), 1U);
      EXPECT_EQ(store->progress(), step(1));
      plan->clear();
      // Its superblock may be on the drive: neither its slots nor those of generation 1 may change any more.
      EXPECT_EQ(write_extent(*store, ExtentKind::hi, 0, 3).message(), error.message());
      EXPECT_EQ(store->commit(step(3)).message(), error.message());
    }
    auto store = Store::open(options_in(folder.path(), 2), layout());
    ASSERT_TRUE(store.ok()) << store.error().message();
    expect_holds(**store, static_cast<int>((*store)->generation()));
  }
}

TEST(StoreCommit, IsRefusedAfterAnExtentCouldNotBeWritten) {
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
    testing::TempDir folder;
    const auto plan = std::make_shared<FaultPlan>();
    const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
    ASSERT_OK(write_and_commit(*store, 1));
    plan->set({.kind = Fault::Kind::error, .action = io::Action::write, .sticky = true});
    EXPECT_EQ(write_extent(*store, kind, 0, 2).kind, io::ErrorKind::io);
    plan->clear();
    EXPECT_EQ(store->commit(step(2)).kind, io::ErrorKind::io);
    EXPECT_EQ(store->generation(), 1U);
  }
}

TEST(StoreCommitted, WordsStayWhileTheyAreRead) {
  testing::TempDir folder;
  const auto store = create(options_in(folder.path(), 2));
  ASSERT_OK(write_and_commit(*store, 1));
  const auto expect = [&](CommittedWords& words, int value) {
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      const auto found = words.fetch(chunk);
      ASSERT_TRUE(found.ok()) << found.error().message();
      for (std::uint64_t i = 0; i < words.bytes(chunk); ++i)
        ASSERT_EQ(found.value().bytes()[i], byte_of(ExtentKind::hi, chunk, value, i));
    }
  };
  {
    CommittedWords words(*store);
    for (const int value : {2, 3, 4}) {
      ASSERT_OK(write_all(*store, value));
      const io::Error refused = store->commit(step(value));
      EXPECT_EQ(refused.kind, io::ErrorKind::usage) << refused.message();
      expect(words, 1);
      auto first = words.fetch(0);
      EXPECT_FALSE(words.verify(0, first->bytes().first(words.bytes(0))));
    }
    const CommittedWords more(*store);
  }
  ASSERT_OK(store->commit(step(4)));
  CommittedWords words(*store);
  expect(words, 4);
}

TEST(StoreCommitted, WordsAreThoseOfTheGenerationThatIsOpened) {
  testing::TempDir folder;
  ASSERT_OK(write_and_commit(*create(options_in(folder.path(), 2)), 3));
  auto store = Store::open(options_in(folder.path(), 2), layout());
  ASSERT_TRUE(store.ok()) << store.error().message();
  CommittedWords words(**store);
  io::Buffer buffer = io::allocate_buffer(words.bytes(0));
  ASSERT_OK(wait_for([&](io::Callback done) {
    words.read(0, std::move(buffer), [&, done](io::Completion&& read) {
      EXPECT_FALSE(words.verify(0, read.buffer.bytes().first(words.bytes(0))));
      read.buffer.bytes()[1] ^= std::byte{1};
      EXPECT_EQ(words.verify(0, read.buffer.bytes().first(words.bytes(0))).kind, io::ErrorKind::corruption);
      done(std::move(read));
    });
  }));
}

// Slots that the durable generation refers to stay as they are, however often what was written beside it is forgotten.
TEST(StoreCommitted, IsWhatAStoreGoesBackTo) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  auto store = create(options);
  ASSERT_OK(write_all(*store, 1));
  EXPECT_EQ(store->go_back().kind, io::ErrorKind::usage) << "nothing is durable yet";
  ASSERT_OK(store->commit(step(1)));
  for (const int value : {7, 8}) {
    ASSERT_OK(write_all(*store, value));
    ASSERT_OK(store->go_back());
    expect_holds(*store, 1);
  }
  ASSERT_OK(write_extent(*store, ExtentKind::state, 0, 9));
  ASSERT_OK(store->go_back());
  expect_holds(*store, 1);
  ASSERT_OK(write_and_commit(*store, 2));
  ASSERT_OK(write_all(*store, 9));
  ASSERT_OK(store->go_back());
  expect_holds(*store, 2);
  store.reset();
  expect_opens_at(options, 2);
}

TEST(StoreCommitted, IsNotGoneBackToWhileAWriteIsInFlight) {
  testing::TempDir folder;
  const auto plan = std::make_shared<FaultPlan>();
  const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
  ASSERT_OK(write_and_commit(*store, 1));
  plan->set({.kind = Fault::Kind::hold, .action = io::Action::write});
  io::Buffer buffer = io::allocate_buffer(store->extent_bytes(ExtentKind::hi, 0));
  fill(buffer.bytes(), ExtentKind::hi, 0, 2);
  store->stamp(ExtentKind::hi, 0, buffer.bytes());
  ASSERT_OK(wait_for([&](io::Callback done) {
    store->write(ExtentKind::hi, 0, std::move(buffer), std::move(done));
    EXPECT_EQ(store->go_back().kind, io::ErrorKind::usage);
    plan->release();
  }));
  ASSERT_OK(store->go_back());
  expect_holds(*store, 1);
  testing::TempDir other;
  const auto one = create(options_in(other.path(), 1));
  ASSERT_OK(write_and_commit(*one, 1));
  EXPECT_EQ(one->go_back().kind, io::ErrorKind::usage) << "one generation is overwritten in place";
}

TEST(StoreCommit, IsRefusedWhileAWriteIsInFlight) {
  testing::TempDir folder;
  const auto plan = std::make_shared<FaultPlan>();
  const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
  ASSERT_OK(write_all(*store, 1));
  plan->set({.kind = Fault::Kind::hold, .action = io::Action::write});
  io::Buffer buffer = io::allocate_buffer(store->extent_bytes(ExtentKind::hi, 0));
  fill(buffer.bytes(), ExtentKind::hi, 0, 1);
  store->stamp(ExtentKind::hi, 0, buffer.bytes());
  const io::Error late = wait_for([&](io::Callback done) {
    store->write(ExtentKind::hi, 0, std::move(buffer), std::move(done));
    EXPECT_EQ(store->commit(step(1)).kind, io::ErrorKind::usage);
    plan->release();
  });
  EXPECT_FALSE(late) << late.message();
  ASSERT_OK(store->commit(step(1)));
}

TEST(StoreExtents, OneGenerationHasOneSlotAndTwoHaveTwo) {
  for (const int generations : {1, 2}) {
    testing::TempDir folder;
    const StoreOptions options = options_in(folder.path(), generations);
    auto store = create(options);
    EXPECT_EQ(Store::bytes_needed(options, layout()), store->storage_bytes());
    ASSERT_OK(write_and_commit(*store, 1));
    ASSERT_OK(write_and_commit(*store, 2));
    // Twice in one generation: the second time over the first, and not over what is committed.
    ASSERT_OK(write_extent(*store, ExtentKind::hi, 0, 3));
    ASSERT_OK(write_extent(*store, ExtentKind::hi, 0, 4));
    {
      const auto bytes = store->fetch(ExtentKind::hi, 0);
      ASSERT_TRUE(bytes.ok());
      EXPECT_EQ(bytes.value().data()[5], byte_of(ExtentKind::hi, 0, 4, 5));
    }
    store.reset();
    if (generations == 2) expect_opens_at(options, 2);
  }
}

// As the state does; stripes of 1 MiB.
TEST(StoreScratch, LiesOnTheDrivesInTheirProportion) {
  testing::TempDir slow, fast;
  StoreOptions options = options_in(slow.path(), 1);
  options.volume.folders.push_back(fast.path());
  options.volume.speeds = {1, 3};
  options.scratch.activation_bytes = {16 << 20};
  const auto store = create(options);
  const std::vector<io::DriveStats> before = store->drives();
  ASSERT_OK(write_extent(*store, ExtentKind::activations, 0, 1));
  const std::vector<io::DriveStats> after = store->drives();
  EXPECT_EQ(after[0].bytes_written - before[0].bytes_written, 4U << 20);
  EXPECT_EQ(after[1].bytes_written - before[1].bytes_written, 12U << 20);
}

// Another place, another generation, another run: what lies there does not pass.
TEST(StoreExtents, KnowWhereTheyBelong) {
  testing::TempDir folder, other_folder;
  const auto store = create(options_in(folder.path(), 2));
  ASSERT_OK(write_and_commit(*store, 1));
  auto bytes = store->fetch(ExtentKind::hi, 0);
  ASSERT_TRUE(bytes.ok());
  const auto same_length = static_cast<int>(std::find_if(layout().chunks().begin() + 1, layout().chunks().end(),
                                                         [](const Chunk& chunk) { return chunk.elements == 2048; }) -
                                            layout().chunks().begin());
  ASSERT_LT(same_length + 1, chunks());
  std::vector<std::byte> content(store->extent_bytes(ExtentKind::hi, same_length), std::byte{9});
  for (const int index : {same_length, same_length + 1}) {
    store->stamp(ExtentKind::hi, index, content);
    io::Buffer buffer = io::allocate_buffer(content.size());
    std::copy(content.begin(), content.end(), buffer.data());
    ASSERT_OK(
        wait_for([&](io::Callback done) { store->write(ExtentKind::hi, index, std::move(buffer), std::move(done)); }));
    EXPECT_FALSE(store->verify(ExtentKind::hi, index, content));
  }
  content[100] ^= std::byte{1};
  const io::Error wrong = store->verify(ExtentKind::hi, same_length, content);
  EXPECT_EQ(wrong.kind, io::ErrorKind::corruption);
  EXPECT_NE(wrong.detail.find("the hi of chunk"), std::string::npos) << wrong.message();
  EXPECT_EQ(wrong.path, "embedding");
  const io::Error never = store->verify(ExtentKind::gradient, 0, content);
  EXPECT_NE(never.detail.find("was never written"), std::string::npos) << never.message();
}

TEST(StoreOpen, AnotherModelIsRefused) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 1);
  ASSERT_OK(write_and_commit(*create(options), 1));
  const Layout finer({layout().units()[0], layout().units()[1]}, {{.units = {0}}, {.units = {1}}}, 2 * kChunkQuantum);
  EXPECT_EQ(Store::open(options, finer).error().kind, io::ErrorKind::corruption);
  StoreOptions two = options;
  two.generations = 2;
  EXPECT_EQ(Store::open(two, layout()).error().kind, io::ErrorKind::corruption);
  // With as many chunks: smaller ones, and ones that would be cut at another length.
  const auto head = [](std::uint64_t elements) {
    return std::vector<UnitShape>{
        {.name = "head",
         .groups = {{.elements = elements, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"}}}};
  };
  testing::TempDir small;
  const StoreOptions of_small = options_in(small.path(), 1);
  const Layout made(head(4096), {{.units = {0}}}, kChunkQuantum);
  {
    const auto store = Store::create(of_small, made).value();
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) ASSERT_OK(write_extent(*store, kind, 0, 1));
    ASSERT_OK(store->commit(step(1)));
  }
  EXPECT_TRUE(Store::open(of_small, made).ok());
  for (const auto& [elements, cut] : {std::pair{2048, kChunkQuantum}, {4096, 2 * kChunkQuantum}})
    EXPECT_EQ(Store::open(of_small, Layout(head(elements), {{.units = {0}}}, cut)).error().kind,
              io::ErrorKind::corruption)
        << elements;
}

TEST(StoreOpen, TheNextCommitKeepsTheIdentity) {
  testing::TempDir folder;
  StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  const std::string identity = std::exchange(options.identity, "of nobody");
  for (int generation = 2; generation < 4; ++generation) {
    auto store = Store::resume(options, layout());
    ASSERT_TRUE(store.ok()) << store.error().message();
    ASSERT_OK((*store)->restore({}, {}));
    EXPECT_EQ((*store)->identity(), identity);
    ASSERT_OK(write_and_commit(**store, generation));
  }
}

TEST(StoreManifest, RefusesWhatIsNone) {
  const std::string good = Manifest{.chunk_elements = 65536,
                                    .generations = 2,
                                    .identity = "i",
                                    .progress = "p",
                                    .records = {{.checksum = ~0ULL, .generation = 4, .slot = 1, .written = true}}}
                               .text(layout().units());
  const auto parsed = parse_manifest(good);
  ASSERT_TRUE(parsed.ok()) << parsed.error().message();
  EXPECT_EQ(parsed.value().records.front(), (ExtentRecord{~0ULL, 4, 1, true}));
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"[true,1,", "[true,2,"},
                                                        {"[true,1,", "[true,257,"},
                                                        {"[true,1,", "[7,1,"},
                                                        {"[[true,1,4,", "[[true,1,"},
                                                        {"\"records\":[[", "\"records\":[{"},
                                                        {"\"identity\":\"i\"", "\"identity\":5"},
                                                        {"\"generations\":2", "\"generations\":1"},
                                                        {"\"generations\":2", "\"generations\":3"},
                                                        {"18446744073709551615", "52345678901234567890"},
                                                        {"[true,1,4,", "[true,1,-4,"},
                                                        {"[true,1,4,", "[true,1.5,4,"},
                                                        {"\"progress\"", "\"regress\""},
                                                        {"\"chunk_elements\":65536", "\"chunk_elements\":\"x\""}}) {
    std::string bad = good;
    ASSERT_NE(bad.find(from), std::string::npos) << from;
    bad.replace(bad.find(from), from.size(), to);
    EXPECT_FALSE(parse_manifest(bad).ok()) << bad;
  }
  EXPECT_FALSE(parse_manifest("").ok());
  EXPECT_FALSE(parse_manifest("[]").ok());
  for (const int generations : {0, 1, 2, 3})
    EXPECT_EQ(parse_manifest(Manifest{.generations = generations}.text({})).ok(), generations == 1 || generations == 2);
}

TEST(StoreSuperblock, RefusesWhatIsNone) {
  Superblock block;
  block.generation = 3;
  block.set_manifest(2 << 20, "{}");
  std::vector<std::byte> sector(kSector);
  const auto parsed = [&](std::uint64_t volume) {
    std::memcpy(sector.data(), &block, sizeof block);
    return parse_superblock(sector, volume);
  };
  ASSERT_TRUE(parsed((2 << 20) + kSector));
  EXPECT_FALSE(parsed((2 << 20) + kSector - 1));
  EXPECT_FALSE(parsed(100));
  for (std::size_t byte = 0; byte < sizeof block; ++byte)
    for (const unsigned bit : {0U, 7U}) {
      std::vector<std::byte> damaged = sector;
      damaged[byte] ^= static_cast<std::byte>(1U << bit);
      EXPECT_FALSE(parse_superblock(damaged, 1 << 30)) << byte;
    }
  for (const std::uint64_t length : {std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 4096}) {
    block.manifest_length = length;
    block.checksum = block.own_checksum();
    EXPECT_FALSE(parsed(1 << 30)) << length;
  }
  block.set_manifest((2 << 20) + 8, "{}");
  EXPECT_FALSE(parsed(1 << 30));
  for (std::uint64_t version = 0; version <= kStoreVersion + 1; ++version) {
    block.version = version;
    block.set_manifest(2 << 20, "{}");
    EXPECT_EQ(parsed(1 << 30).has_value(), version == 1 || version == kStoreVersion) << version;
  }
}

// The layouts on the drive, pinned: what this version writes is what tests/swap/golden holds, and that opens.
// TIERFLOW_WRITE_GOLDEN=1 writes it anew.
class StoreGolden : public ::testing::Test {
 protected:
  static std::filesystem::path file(int version) {
    return std::filesystem::path(TIERFLOW_GOLDEN) / ("store-v" + std::to_string(version) + ".txt");
  }
  static std::map<std::string, std::string> read(int version) {
    std::map<std::string, std::string> golden;
    std::ifstream in(file(version));
    for (std::string name, text; in >> name && std::getline(in >> std::ws, text);) golden[name] = text;
    return golden;
  }
  struct Region {
    const char* name;
    std::uint64_t offset, length;
  };
  // Offsets as numbers: they are what is pinned. m, of a manifest: 2^20 + 15 + 160 * 4, rounded up.
  static constexpr std::uint64_t kArea = (1 << 20) + 4096, kExtents = (2 << 20) + 2 * kArea;
  static std::string hex(std::span<const std::byte> bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::byte byte : bytes) {
      text += kDigits[static_cast<unsigned>(byte) >> 4];
      text += kDigits[static_cast<unsigned>(byte) & 15];
    }
    return text;
  }
};

TEST_F(StoreGolden, WhatIsWrittenIsPinned) {
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    const auto store = create(options);
    ASSERT_OK(write_and_commit(*store, 1));
    ASSERT_OK(write_and_commit(*store, 2));
  }
  std::map<std::string, std::string> written;
  with_volume(options, [&](io::Volume& volume) {
    written["superblock_a"] = hex(bytes_at(volume, 0, 64));
    written["superblock_b"] = hex(bytes_at(volume, 1 << 20, 64));
    for (const auto& [name, offset] :
         {std::pair{"manifest_a", std::uint64_t{2 << 20}}, std::pair{"manifest_b", (2 << 20) + kArea}}) {
      const std::vector<std::byte> bytes = bytes_at(volume, offset, kArea);
      const auto end = std::find(bytes.begin(), bytes.end(), std::byte{0});
      written[name] = std::string(reinterpret_cast<const char*>(bytes.data()), end - bytes.begin());
      EXPECT_TRUE(std::all_of(end, bytes.end(), [](std::byte byte) { return byte == std::byte{0}; }));
    }
    // The extents: the first bytes of each, at the offset that the golden file names.
    for (const int generation : {1, 2})
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        for (int index = 0; index < chunks(); ++index) {
          const std::uint64_t bytes =
              kind == ExtentKind::hi ? layout().chunks()[index].word_bytes() : layout().chunks()[index].state_bytes;
          std::vector<std::byte> expected(bytes);
          fill(expected, kind, index, generation);
          for (std::uint64_t at = kExtents; at + bytes <= volume.size(); at += kSector)
            if (bytes_at(volume, at, 16) == std::vector(expected.begin(), expected.begin() + 16) &&
                bytes_at(volume, at, bytes) == expected) {
              written["extent_" + std::to_string(generation) + (kind == ExtentKind::hi ? "_hi_" : "_state_") +
                      std::to_string(index)] = std::to_string(at);
              break;
            }
        }
    written["size"] = std::to_string(volume.size());
  });
  if (std::getenv("TIERFLOW_WRITE_GOLDEN") != nullptr) {
    std::ofstream out(file(static_cast<int>(kStoreVersion)));
    for (const auto& [name, text] : written) out << name << ' ' << text << '\n';
  }
  const std::map<std::string, std::string> golden = read(static_cast<int>(kStoreVersion));
  EXPECT_EQ(golden.size(), 21U);
  for (const auto& [name, text] : golden) EXPECT_EQ(written[name], text) << name;
  EXPECT_EQ(written.size(), golden.size());
}

// Put together from the golden file alone: of this version, and of those before it.
TEST_F(StoreGolden, EveryVersionOpens) {
  for (int version = 1; version <= static_cast<int>(kStoreVersion); ++version) {
    SCOPED_TRACE(version);
    testing::TempDir made;
    std::map<std::string, std::string> golden = read(version);
    const StoreOptions from_golden = options_in(made.path(), 2);
    {
      io::VolumeOptions volume_options = from_golden.volume;
      volume_options.bytes = std::stoull(golden["size"]);
      auto volume = io::Volume::create(volume_options);
      ASSERT_TRUE(volume.ok()) << volume.error().message();
      for (const auto& [name, offset] :
           {std::pair{"superblock_a", std::uint64_t{0}}, std::pair{"superblock_b", std::uint64_t{1} << 20}}) {
        std::vector<std::byte> sector(kSector);
        for (std::size_t i = 0; i < golden[name].size() / 2; ++i)
          sector[i] = static_cast<std::byte>(std::stoi(golden[name].substr(2 * i, 2), nullptr, 16));
        put(**volume, offset, sector);
      }
      for (const auto& [name, offset] :
           {std::pair{"manifest_a", std::uint64_t{2 << 20}}, std::pair{"manifest_b", (2 << 20) + kArea}})
        put(**volume, offset, std::as_bytes(std::span(golden[name])));
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
        for (int index = 0; index < chunks(); ++index) {
          std::vector<std::byte> bytes(kind == ExtentKind::hi ? layout().chunks()[index].word_bytes()
                                                              : layout().chunks()[index].state_bytes);
          fill(bytes, kind, index, 2);
          put(**volume,
              std::stoull(golden[std::string("extent_2") + (kind == ExtentKind::hi ? "_hi_" : "_state_") +
                                 std::to_string(index)]),
              bytes);
        }
    }
    expect_opens_at(from_golden, 2);
  }
}

}  // namespace
}  // namespace tierflow::swap
