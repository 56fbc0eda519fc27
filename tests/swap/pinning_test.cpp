#include "swap/pinning.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tierflow::swap {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Addresses without memory behind them.
struct Slab {
  explicit Slab(std::size_t bytes)
      : memory(static_cast<std::byte*>(
                   ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
               bytes) {}
  ~Slab() { ::munmap(memory.data(), memory.size()); }
  std::span<std::byte> memory;
};

TEST(Pinning, PopulatedMemoryIsThere) {
  Slab slab(40 * kMiB + 12 * 1024);
  ASSERT_EQ(::mprotect(slab.memory.data(), slab.memory.size(), PROT_READ | PROT_WRITE), 0);
  populate(slab.memory);
  std::vector<unsigned char> resident(slab.memory.size() / 4096);
  ASSERT_EQ(::mincore(slab.memory.data(), slab.memory.size(), resident.data()), 0);
  EXPECT_EQ(std::ranges::count_if(resident, [](unsigned char page) { return (page & 1) == 0; }), 0);
}

// A system that pins `limit` bytes.
struct Limited {
  std::string operator()(std::span<std::byte> piece) {
    EXPECT_LE(piece.size(), kRegistration);
    if (pinned + piece.size() > limit) return "limit reached";
    pinned += piece.size();
    return {};
  }
  std::size_t limit, pinned = 0;
};

// The slab as it is registered where no buffer is in the way.
std::vector<std::span<std::byte>> by_the_gibibyte(std::span<std::byte> slab) {
  std::vector<std::span<std::byte>> pieces;
  for (std::size_t at = 0; at < slab.size(); at += kRegistration)
    pieces.push_back(slab.subspan(at, std::min(kRegistration, slab.size() - at)));
  return pieces;
}

using Parts = std::vector<std::pair<std::size_t, std::size_t>>;
Parts parts(const PinnedPieces& pieces, const std::byte* at, std::size_t bytes) {
  Parts all;
  pieces.split(at, bytes, [&](std::size_t offset, std::size_t part) { all.emplace_back(offset, part); });
  return all;
}

TEST(Pinning, AllOfItInPiecesOfAGibibyte) {
  const Slab slab(2500 * kMiB);
  Limited system{1 << 30};
  system.limit = ~std::size_t{0} / 2;
  PinnedPieces pieces;
  EXPECT_EQ(pieces.pin(by_the_gibibyte(slab.memory), std::ref(system)), "");
  EXPECT_EQ(system.pinned, slab.memory.size());
  const std::byte* at = slab.memory.data();
  EXPECT_TRUE(pieces.covers(at, 1024 * kMiB));
  EXPECT_FALSE(pieces.covers(at + 1, 1024 * kMiB));
  EXPECT_TRUE(pieces.covers(at + 2400 * kMiB, 100 * kMiB));
  EXPECT_EQ(parts(pieces, at + 1000 * kMiB, 1100 * kMiB),
            (Parts{{0, 24 * kMiB}, {24 * kMiB, 1024 * kMiB}, {1048 * kMiB, 52 * kMiB}}));
  std::size_t given_back = 0;
  pieces.unpin([&](std::span<std::byte> piece) { given_back += piece.size(); });
  EXPECT_EQ(given_back, slab.memory.size());
  EXPECT_FALSE(pieces.covers(at, 1));
  EXPECT_EQ(parts(pieces, at, 2500 * kMiB), (Parts{{0, 2500 * kMiB}}));
}

TEST(Pinning, AsMuchAsTheSystemAllows) {
  const Slab slab(3000 * kMiB);
  Limited system{1600 * kMiB};
  PinnedPieces pieces;
  const std::string note = pieces.pin(by_the_gibibyte(slab.memory), std::ref(system));
  EXPECT_EQ(system.pinned, 1536 * kMiB);  // one piece, and half of the next
  EXPECT_NE(note.find("of 3000 MiB of host memory 1536 MiB could be pinned (limit reached)"), std::string::npos)
      << note;
  const std::byte* at = slab.memory.data();
  EXPECT_TRUE(pieces.covers(at + 1024 * kMiB, 512 * kMiB));
  EXPECT_FALSE(pieces.covers(at + 1536 * kMiB, 1));
  EXPECT_EQ(parts(pieces, at + 1500 * kMiB, 100 * kMiB), (Parts{{0, 36 * kMiB}, {36 * kMiB, 64 * kMiB}}));
  EXPECT_EQ(parts(pieces, at + 2000 * kMiB, 100 * kMiB), (Parts{{0, 100 * kMiB}}));
  EXPECT_TRUE(parts(pieces, at, 0).empty());
}

// Halves are tried down to the least registration, which is one of them; the reason told is the first one.
TEST(Pinning, TheLeastRegistrationIsTried) {
  const Slab slab(4 * kLeastRegistration);
  std::vector<std::size_t> tried;
  PinnedPieces pieces;
  const std::string note = pieces.pin(by_the_gibibyte(slab.memory), [&](std::span<std::byte> piece) {
    tried.push_back(piece.size());
    return piece.size() > kLeastRegistration ? "refusal " + std::to_string(tried.size()) : std::string();
  });
  EXPECT_EQ(tried, (std::vector<std::size_t>{4 * kLeastRegistration, 2 * kLeastRegistration, kLeastRegistration}));
  EXPECT_TRUE(pieces.covers(slab.memory.data(), kLeastRegistration));
  EXPECT_NE(note.find("64 MiB could be pinned (refusal 1)"), std::string::npos) << note;
}

TEST(Pinning, NothingWhereNothingIsAllowed) {
  const Slab slab(300 * kMiB);
  Limited system{10 * kMiB};
  PinnedPieces pieces;
  EXPECT_NE(pieces.pin(by_the_gibibyte(slab.memory), std::ref(system)).find("none could be pinned"), std::string::npos);
  EXPECT_EQ(system.pinned, 0U);
  EXPECT_FALSE(pieces.covers(slab.memory.data(), 1));
}

TEST(Pinning, RegistrationsEndWhereBuffersEnd) {
  const auto sizes = [](std::vector<std::size_t> mebibytes) {
    for (std::size_t& size : mebibytes) size *= kMiB;
    std::vector<std::size_t> found = registrations_for(mebibytes);
    for (std::size_t& size : found) size /= kMiB;
    return found;
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sizes({}), Sizes{});
  EXPECT_EQ(sizes({1024}), Sizes{1024});
  EXPECT_EQ(sizes({512, 512, 512}), (Sizes{1024, 512}));
  EXPECT_EQ(sizes({600, 600, 400, 100}), (Sizes{600, 1000, 100}));
  EXPECT_EQ(sizes({100, 1536, 500, 100}), (Sizes{100, 1024, 1012, 100}));  // a large one begins a registration
  EXPECT_EQ(sizes({2048, 1}), (Sizes{1024, 1024, 1}));
}

}  // namespace
}  // namespace tierflow::swap
