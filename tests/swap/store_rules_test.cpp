// What a store leaves in its folder, what it goes back to after it was resumed, and manifests that it refuses.
#include <gtest/gtest.h>

#include "swap/generations.h"
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
  const auto passed_over = [](int generations, const std::function<void(io::Volume&)>& damage) {
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
    return found->passed_over;
  };
  EXPECT_EQ(passed_over(1, [](io::Volume&) {}), "");
  EXPECT_NE(passed_over(1, [](io::Volume& volume) { flip(volume, kSuperblockA + 100); }), "");
  EXPECT_EQ(passed_over(2, [](io::Volume&) {}), "");
  EXPECT_NE(passed_over(2,
                        [](io::Volume& volume) {
                          Superblock block = *parse_superblock(bytes_at(volume, kSuperblockB, kSector), volume.size());
                          ++block.run_id;
                          block.checksum = block.own_checksum();
                          put(volume, kSuperblockB, std::as_bytes(std::span(&block, 1)));
                        }),
            "");
  EXPECT_NE(passed_over(2, [](io::Volume& volume) { flip(volume, kManifestA + 9); }), "");
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
