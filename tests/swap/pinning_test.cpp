#include "swap/pinning.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <utility>

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
  EXPECT_EQ(pieces.pin(slab.memory, std::ref(system)), "");
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
  const std::string note = pieces.pin(slab.memory, std::ref(system));
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

TEST(Pinning, NothingWhereNothingIsAllowed) {
  const Slab slab(300 * kMiB);
  Limited system{10 * kMiB};
  PinnedPieces pieces;
  EXPECT_NE(pieces.pin(slab.memory, std::ref(system)).find("none could be pinned"), std::string::npos);
  EXPECT_EQ(system.pinned, 0U);
  EXPECT_FALSE(pieces.covers(slab.memory.data(), 1));
}

}  // namespace
}  // namespace tierflow::swap
