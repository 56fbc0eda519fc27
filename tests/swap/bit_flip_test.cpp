// Single bits that change on the drive, anywhere in what a store wrote: headers, superblocks, manifests, extents.
// Whoever opens the store afterwards gets bytes of one generation as they were committed, or an error; nobody gets
// others. TIERFLOW_BIT_FLIPS is how many (make test-faults: 10,000).
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>

#include "tests/support/environment.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

constexpr std::size_t kDataBegin = std::size_t{1} << 20;  // of the volume's bytes in its file

enum class Region { header, superblock, manifest, extent };
constexpr int kRegions = 4;

Region region_of(std::size_t sector) {
  const std::size_t at = sector * kSector;
  if (at < kDataBegin) return Region::header;
  if (at < kDataBegin + kManifestBase) return Region::superblock;
  // Manifests are JSON of some kilobytes at the begin of their areas; extents follow.
  return at < kDataBegin + kManifestBase + (std::size_t{1} << 20) ? Region::manifest : Region::extent;
}

void write_file(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::in).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct Outcome {
  std::optional<int> value;  // of the generation that came back, bit for bit
  std::string wrong;         // what nobody may see
  io::Error error;
};

bool is_value(ExtentKind kind, int index, std::span<const std::byte> bytes, int value) {
  for (std::uint64_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != byte_of(kind, index, value, i)) return false;
  return true;
}

Outcome outcome_of(Store& store, const std::map<std::pair<ExtentKind, int>, int>& held) {
  const int value = static_cast<int>(store.generation());
  if (store.progress() != step(value)) return {.wrong = "progress " + store.progress()};
  if (store.identity() != R"({"model":"toy"})") return {.wrong = "identity " + store.identity()};
  for (const auto& [extent, of] : held)
    if (of != value) return {.wrong = "extent " + std::to_string(extent.second) + " of no single generation"};
  return {.value = value};
}

// What `value` the bytes have of the candidates; -1: none.
int value_of(ExtentKind kind, int index, std::span<const std::byte> bytes) {
  for (int value = 1; value <= 4; ++value)
    if (is_value(kind, index, bytes, value)) return value;
  return -1;
}

// As an export reads a store.
Outcome read_through_open(const StoreOptions& options) {
  auto store = Store::open(options, layout());
  if (!store) return {.error = store.error()};
  std::map<std::pair<ExtentKind, int>, int> held;
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int index = 0; index < chunks(); ++index) {
      auto bytes = (*store)->fetch(kind, index);
      if (!bytes) return {.error = bytes.error()};
      held[{kind, index}] = value_of(kind, index, bytes->bytes());
    }
  return outcome_of(**store, held);
}

// As a run goes on.
Outcome read_through_resume(const StoreOptions& options) {
  auto store = Store::resume(options, layout());
  if (!store) return {.error = store.error()};
  std::map<std::pair<ExtentKind, int>, int> held;
  const io::Error error = (*store)->restore(
      [&](ExtentKind kind, int index, std::span<const std::byte> bytes) {
        held[{kind, index}] = value_of(kind, index, bytes);
      },
      {});
  if (error) return {.error = error};
  return outcome_of(**store, held);
}

struct BitFlips : ::testing::TestWithParam<bool> {};

TEST_P(BitFlips, NobodyGetsBytesThatNobodyCommitted) {
  const bool work_had_begun = GetParam();
  const int flips = static_cast<int>(testing::number_in("TIERFLOW_BIT_FLIPS", 80)) / 2;
  testing::TempDir folder;
  const StoreOptions options = options_in(folder.path(), 2);
  {
    const auto store = create(options);
    for (int value = 1; value <= 3; ++value) ASSERT_OK(write_and_commit(*store, value));
    if (work_had_begun)
      for (int index = 0; index < chunks(); index += 2) ASSERT_OK(write_extent(*store, ExtentKind::state, index, 4));
  }
  const std::filesystem::path path = folder.path() / "state.tfv";
  const std::vector<char> image = read_file(path);
  std::vector<std::size_t> used[kRegions];  // sectors that hold anything
  for (std::size_t sector = 0; sector < image.size() / kSector; ++sector)
    if (std::any_of(image.begin() + sector * kSector, image.begin() + (sector + 1) * kSector,
                    [](char each) { return each != 0; }))
      used[static_cast<int>(region_of(sector))].push_back(sector);
  for (const auto& region : used) ASSERT_FALSE(region.empty());

  std::mt19937_64 random(7);
  int seen = 0, refused = 0, earlier = 0;
  for (int i = 0; i < flips; ++i) {
    const auto& sectors = used[i % kRegions];
    const std::size_t at = sectors[random() % sectors.size()] * kSector + random() % kSector;
    const int bit = static_cast<int>(random() % 8);
    const std::string where = "bit " + std::to_string(bit) + " of byte " + std::to_string(at);
    for (const auto& read : {read_through_open, read_through_resume}) {
      std::vector<char> damaged = image;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      write_file(path, damaged);
      const Outcome outcome = read(options);
      ASSERT_EQ(outcome.wrong, "") << where;
      if (outcome.value) {
        ASSERT_TRUE(*outcome.value == 3 || (*outcome.value == 2 && !work_had_begun)) << where << ": " << *outcome.value;
        earlier += *outcome.value == 2 ? 1 : 0;
        ++seen;
      } else {
        ASSERT_FALSE(outcome.error.message().empty()) << where;
        // One of two whole generations is always found by a run that goes on.
        ASSERT_TRUE(work_had_begun || read == read_through_open) << where << ": " << outcome.error.message();
        ++refused;
      }
    }
  }
  // The flips hit what matters, and not everything matters.
  EXPECT_GT(seen, flips / 4);
  EXPECT_GT(refused, 0);
  if (!work_had_begun) {
    EXPECT_GT(earlier, 0);
  }
  RecordProperty("refused", refused);
  RecordProperty("earlier", earlier);
}
INSTANTIATE_TEST_SUITE_P(All, BitFlips, ::testing::Values(false, true));

}  // namespace
}  // namespace tierflow::swap
