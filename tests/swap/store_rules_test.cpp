// What a store leaves in its folder, what it goes back to after it was resumed, and manifests that it refuses.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "swap/generations.h"
#include "tests/support/faulty_backend.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

TEST(StoreRules, ScratchHasNoName) {
  const testing::TempDir folder;
  StoreOptions options = options_in(folder.path(), 1);
  const auto store = create(options);
  EXPECT_EQ(files_in(folder.path()), std::vector<std::string>{"state.tfv"});
}

// As a run leaves it that is killed while it makes its scratch.
TEST(StoreRules, ScratchOfARunBeforeIsReplaced) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 1);
  io::VolumeOptions left = options.volume;
  left.name += "-scratch";
  left.bytes = 1 << 20;
  ASSERT_TRUE(io::Volume::create(left).ok());
  ASSERT_EQ(files_in(folder.path()).size(), 1U);
  ASSERT_OK(write_and_commit(*create(options), 1));
  EXPECT_EQ(files_in(folder.path()), std::vector<std::string>{"state.tfv"});
}

TEST(StoreRules, NothingIsLeftWhereScratchHasNoRoom) {
  const testing::TempDir folder;
  StoreOptions options = options_in(folder.path(), 1);
  options.scratch.activation_bytes = {std::uint64_t{1} << 60};
  EXPECT_FALSE(Store::create(options, layout()).ok());
  EXPECT_TRUE(files_in(folder.path()).empty());
}

TEST(StoreRules, AManifestThatIsTooLargeIsNotWritten) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  const auto store = create(options);
  ASSERT_OK(write_and_commit(*store, 1));
  EXPECT_EQ(store->commit(std::string(2 << 20, 'x')).detail, "the manifest outgrew its place");
  EXPECT_EQ(store->generation(), 1U);
  ASSERT_OK(write_and_commit(*store, 2));
}

// A model of one's own may have a long list of units.
TEST(StoreRules, ALongIdentityHasRoomInTheManifest) {
  const testing::TempDir folder;
  StoreOptions options = options_in(folder.path(), 2);
  options.identity = std::string(2 << 20, 'x');
  const auto store = create(options);
  ASSERT_OK(write_and_commit(*store, 1));
  ASSERT_OK(write_and_commit(*store, 2));
}

TEST(StoreRules, AStoreThatWasResumedGoesBackToWhereItBegan) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  auto resumed = Store::resume(options, layout());
  ASSERT_TRUE(resumed.ok()) << resumed.error().message();
  ASSERT_OK((*resumed)->restore({}, {}));
  ASSERT_OK(write_all(**resumed, 7));
  ASSERT_OK((*resumed)->go_back());
  expect_holds(**resumed, 1);
}

TEST(StoreRules, AManifestNamesNoNewerGeneration) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  for (const std::uint64_t generation : {1, 2}) {
    with_volume(options, [&](io::Volume& volume) {
      Generation found = readable_generations(volume).value().front();
      found.manifest.records.back().generation = generation;
      const std::string text = found.manifest.text(layout().units());
      found.block.set_manifest(found.block.manifest_offset, text);
      ASSERT_OK(publish_generation(volume, found.block, text));
    });
    const auto opened = Store::open(options, layout());
    ASSERT_EQ(opened.ok(), generation == 1);
    if (generation == 2) {
      EXPECT_NE(opened.error().message().find("names a generation that is newer than itself"), std::string::npos);
    }
  }
}

// Whether a newer generation may have been committed that cannot be read, as whoever looks is told.
TEST(StoreRules, TheNewestGenerationIsKnownByTheOtherSuperblock) {
  bool damaged = false;
  const auto passed_over = [&](int generations, const std::function<void(io::Volume&)>& damage) {
    const testing::TempDir folder;
    const StoreOptions options = options_in(folder.path(), 2);
    {
      const auto store = create(options);
      for (int value = 1; value <= generations; ++value) EXPECT_FALSE(write_and_commit(*store, value));
    }
    with_volume(options, damage);
    auto found = Store::inspect(options.volume);
    EXPECT_TRUE(found.ok());
    EXPECT_FALSE(found->unreadable) << "every byte was read";
    damaged = found->damaged;
    return found->passed_over;
  };
  EXPECT_EQ(passed_over(1, [](io::Volume&) {}), "");
  EXPECT_FALSE(damaged);
  EXPECT_NE(passed_over(1, [](io::Volume& volume) { flip(volume, kSuperblockA + 100); }), "");
  EXPECT_TRUE(damaged);
  EXPECT_EQ(passed_over(2, [](io::Volume&) {}), "");
  EXPECT_NE(passed_over(2,
                        [](io::Volume& volume) {
                          Superblock block = *parse_superblock(bytes_at(volume, kSuperblockB, kSector), volume.size());
                          ++block.run_id;
                          block.checksum = block.own_checksum();
                          put(volume, kSuperblockB, std::as_bytes(std::span(&block, 1)));
                        }),
            "");
  EXPECT_FALSE(damaged) << "a whole superblock, of another run";
  EXPECT_NE(passed_over(2, [](io::Volume& volume) { flip(volume, kManifestA + 9); }), "");
  EXPECT_TRUE(damaged);
}

// A drive that failed may still show what was committed last, or not: nothing is built on either.
TEST(StoreRules, WhatFailedIsNotGoneBackFrom) {
  const testing::TempDir folder;
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
  EXPECT_EQ(store->go_back().detail, "there is no generation to go back to");
  ASSERT_OK(write_and_commit(*store, 1));
  plan->set({.kind = testing::Fault::Kind::error, .action = io::Action::write});
  const io::Error failed = write_extent(*store, ExtentKind::hi, 0, 2);
  ASSERT_EQ(failed.kind, io::ErrorKind::io);
  EXPECT_EQ(store->go_back().message(), failed.message());
}

// Whoever lent a buffer has it again.
TEST(StoreRules, AWriteThatIsRefusedGivesItsBufferBack) {
  const testing::TempDir folder;
  const auto plan = std::make_shared<testing::FaultPlan>();
  const auto store = create(options_in(folder.path(), 2, testing::faults(plan)));
  plan->set({.kind = testing::Fault::Kind::error, .action = io::Action::write});
  ASSERT_TRUE(write_extent(*store, ExtentKind::hi, 0, 1));
  io::Buffer buffer = io::allocate_buffer(store->extent_bytes(ExtentKind::hi, 0));
  const std::byte* const lent = buffer.data();
  const io::Completion refused =
      io::wait_for([&](io::Callback done) { store->write(ExtentKind::hi, 0, std::move(buffer), std::move(done)); });
  EXPECT_TRUE(refused.error);
  EXPECT_EQ(refused.buffer.data(), lent);
}

TEST(StoreRules, AnExtentIsNamedByItsUnitAndItsPlaceThere) {
  const testing::TempDir folder;
  const auto store = create(options_in(folder.path(), 1));
  const int last = chunks() - 1;
  ASSERT_EQ(layout().chunks()[last].index, 0);
  const auto found = store->fetch(ExtentKind::state, last);
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().path, "head");
  EXPECT_NE(found.error().detail.find("the state of chunk 0 was never written"), std::string::npos)
      << found.error().detail;
}

TEST(StoreRules, AnErrorSaysWhereTheDamagedBytesLie) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  std::uint64_t place = 0;
  {
    const auto store = create(options);
    for (const int value : {1, 2}) ASSERT_OK(write_and_commit(*store, value));
    place = store->verify(ExtentKind::hi, 0, std::vector<std::byte>(100)).offset;
  }
  with_volume(options, [&](io::Volume& volume) { flip(volume, place + 9); });
  const auto opened = Store::open(options, layout()).value();
  const auto found = opened->fetch(ExtentKind::hi, 0);
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().offset, place);
}

// What is told of a store before anyone has its layout.
TEST(StoreRules, WhatIsThereIsToldWithoutALayout) {
  for (const int generations : {1, 2}) {
    const testing::TempDir folder;
    const StoreOptions options = options_in(folder.path(), generations);
    {
      const auto store = create(options);
      for (const int value : {1, 2}) ASSERT_OK(write_and_commit(*store, value));
    }
    auto found = Store::inspect(options.volume);
    ASSERT_TRUE(found.ok()) << found.error().message();
    EXPECT_EQ(found->generation, 2U);
    EXPECT_EQ(found->generations, generations);
    EXPECT_EQ(found->chunk_elements, layout().chunk_elements());
    EXPECT_EQ(found->identity, options.identity);
    EXPECT_EQ(found->progress, step(2));
    io::VolumeOptions bad = options.volume;
    bad.wrap_backend = with_bad_sectors(kSuperblockA, kSuperblockA + kSector);
    auto before = Store::inspect(bad);
    ASSERT_TRUE(before.ok()) << before.error().message();
    EXPECT_EQ(before->generation, 1U);
    EXPECT_NE(before->passed_over, "");
    EXPECT_EQ(before->unreadable.kind, io::ErrorKind::io);
  }
}

TEST(StoreRules, WithoutAGenerationBeforeNoneIsSpokenOf) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  std::uint64_t place = 0;
  {
    const auto store = create(options);
    ASSERT_OK(write_and_commit(*store, 1));
    place = store->verify(ExtentKind::hi, 0, std::vector<std::byte>(100)).offset;
  }
  with_volume(options, [&](io::Volume& volume) { flip(volume, place); });
  const auto opened = Store::open(options, layout()).value();
  const io::Error wrong = opened->verify_all({});
  EXPECT_EQ(wrong.detail.find("generation 1: the hi of chunk 0"), 0U) << wrong.detail;
  EXPECT_EQ(wrong.detail.find("the one before"), std::string::npos) << wrong.detail;
  EXPECT_EQ(wrong.detail.find("not whole either"), std::string::npos) << wrong.detail;
}

// Room for the gradients that wait, and for no others.
TEST(StoreRules, ScratchIsAsLargeAsWhatIsKeptThere) {
  StoreOptions options = options_in("", 1);
  const auto bytes = [&](ScratchOptions scratch) {
    options.scratch = std::move(scratch);
    return Store::bytes_needed(options, layout());
  };
  const std::uint64_t none = bytes({.gradients = false});
  std::uint64_t all = 0;
  for (const Chunk& chunk : layout().chunks()) all += chunk.word_bytes();
  EXPECT_EQ(bytes({}), none + all);
  EXPECT_EQ(bytes({.gradient_sums = true}), none + 2 * all);
  std::vector<bool> first(chunks(), false);
  first[0] = true;
  EXPECT_EQ(bytes({.gradient_chunks = first}), none + layout().chunks()[0].word_bytes());
  EXPECT_EQ(bytes({.gradient_chunks = first, .gradient_sums = true}), none + 2 * layout().chunks()[0].word_bytes());
  EXPECT_EQ(bytes({.gradients = false, .activation_bytes = {8192, 0, 4096}}), none + 8192 + 4096);
}

// It can be exported, and that is all.
TEST(StoreRules, AStoreOfTheFirstVersionIsNotGoneOnWith) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  with_volume(options, [&](io::Volume& volume) {
    Generation found = readable_generations(volume).value().front();
    found.manifest.version = 1;
    const std::string text = found.manifest.text(layout().units());
    found.block.set_manifest(found.block.manifest_offset, text);
    ASSERT_OK(publish_generation(volume, found.block, text));
  });
  EXPECT_TRUE(Store::open(options, layout()).ok());
  const auto resumed = Store::resume(options, layout());
  ASSERT_FALSE(resumed.ok());
  EXPECT_EQ(resumed.error().kind, io::ErrorKind::usage) << resumed.error().message();
}

// The drive may have been reset: it has the time that the user is told, in whole seconds.
TEST(StoreRules, ADriveHasItsTimeBeforeItIsReadAgain) {
  const testing::TempDir folder;
  StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  const auto healed = std::make_shared<std::atomic<bool>>(false);
  const std::uint64_t words =
      2 * kSuperblockB + 2 * round_up((1 << 20) + options.identity.size() + 160 * chunks(), kSector);
  std::string said;
  options.volume.wrap_backend = with_bad_sectors(words, words + kSector, healed);
  options.volume.on_notice = [&](const io::Notice& notice) {
    said += notice.text;
    *healed = true;
  };
  options.read_retry_delay = std::chrono::milliseconds{20};
  auto resumed = Store::resume(options, layout());
  ASSERT_TRUE(resumed.ok()) << resumed.error().message();
  const auto began = std::chrono::steady_clock::now();
  ASSERT_OK((*resumed)->restore({}, {}));
  EXPECT_GE(std::chrono::steady_clock::now() - began, options.read_retry_delay);
  EXPECT_NE(said.find("it is read once more in 1 s"), std::string::npos) << said;
}

// Both volumes of a run know the memory that they read into and write from.
TEST(StoreRules, MemoryIsRegisteredWithTheScratchToo) {
  static const std::byte* memory = nullptr;
  static std::atomic<int> registered = 0;
  struct Looking final : testing::ForwardingBackend {
    using ForwardingBackend::ForwardingBackend;
    io::Error register_memory(std::span<const std::span<std::byte>> regions) override {
      for (const auto region : regions) registered += region.data() == memory ? 1 : 0;
      return ForwardingBackend::register_memory(regions);
    }
  };
  const testing::TempDir folder;
  const auto slab = std::make_shared<const io::Buffer>(io::allocate_buffer(64 << 10));
  memory = slab->data();
  registered = 0;
  const auto store = create(options_in(folder.path(), 1, [](std::unique_ptr<io::Backend> inner) {
    return std::make_unique<Looking>(std::move(inner));
  }));
  const std::span<std::byte> pieces[] = {slab->bytes()};
  store->register_memory(slab, pieces);
  ASSERT_OK(write_and_commit(*store, 1));
  ASSERT_OK(write_extent(*store, ExtentKind::gradient, 0, 1));
  EXPECT_EQ(registered, 2);
}

// Where a second generation's manifest would lie cannot be read: nobody knows whether there was one.
TEST(StoreRules, WhatCannotBeReadIsNotTakenForBlank) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  ASSERT_OK(write_and_commit(*create(options), 1));
  EXPECT_EQ(Store::inspect(options.volume)->passed_over, "");
  io::VolumeOptions bad = options.volume;
  bad.wrap_backend = with_bad_sectors(kManifestA, kManifestA + kSector);
  auto found = Store::inspect(bad);
  ASSERT_TRUE(found.ok()) << found.error().message();
  EXPECT_EQ(found->generation, 1U);
  EXPECT_NE(found->passed_over, "");
  EXPECT_FALSE(found->damaged) << "a crash in its second commit explains it too";
}

TEST(StoreRules, ASmallVolumeIsNoStore) {
  const testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  io::VolumeOptions small = options.volume;
  small.bytes = kManifestA - kSector;
  ASSERT_TRUE(io::Volume::create(small).ok());
  const auto found = Store::inspect(options.volume);
  ASSERT_FALSE(found.ok());
  EXPECT_NE(found.error().message().find("too small to be a store"), std::string::npos) << found.error().message();
}

}  // namespace
}  // namespace tierflow::swap
