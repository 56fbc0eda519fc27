#pragma once
// Superblocks and manifests, which a store writes beside the extents (docs/store.md). The functions turn them into
// bytes or text and back; nothing here reads or writes a drive. Only for use inside of swap.
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/error.h"
#include "swap/layout.h"

namespace tierflow::swap {

inline constexpr std::uint64_t kSuperblockSpacing = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kManifestBase = 2 * kSuperblockSpacing;
inline constexpr std::uint64_t kStoreVersion = 2;  // 1 can be read
// Generation n is in superblock n % 2 and manifest n % 2, so that writing it leaves the generation before it intact.
constexpr int copy_of(std::uint64_t generation) {
  return static_cast<int>(generation % 2);
}

struct Superblock {
  std::array<char, 8> magic{'T', 'F', 'S', 'T', 'O', 'R', 'E', '1'};
  std::uint64_t version = kStoreVersion;
  std::uint64_t run_id = 0;
  std::uint64_t generation = 0;
  std::uint64_t manifest_offset = 0, manifest_length = 0, manifest_checksum = 0;
  std::uint64_t checksum = 0;  // of the fields before it

  std::uint64_t own_checksum() const;
  void set_manifest(std::uint64_t offset, std::string_view text);
};
static_assert(sizeof(Superblock) == 64);

// The superblock in a sector that was read; nothing if it is damaged, of another version, or not a superblock.
// volume_size: the superblock's manifest must lie within it.
std::optional<Superblock> parse_superblock(std::span<const std::byte> sector, std::uint64_t volume_size);
// Why parse_superblock() found none.
std::string why_no_superblock(std::span<const std::byte> sector);
bool is_blank(std::span<const std::byte> bytes);
bool matches(const Superblock& block, std::string_view manifest);

// The record of the newest bytes of an extent.
struct ExtentRecord {
  std::uint64_t checksum = 0, generation = 0;
  std::uint8_t slot = 0;
  bool written = false;
  bool operator==(const ExtentRecord&) const = default;
};

struct Manifest {
  std::uint64_t version = kStoreVersion;
  std::uint64_t chunk_elements = 0;
  int generations = 1;
  std::string identity, progress;
  std::vector<ExtentRecord> records;  // hi of every chunk, then state of every chunk

  std::string text(const std::vector<UnitShape>& units) const;
};
// An error of kind corruption if the text is not a manifest. Any text is safe to pass.
io::Result<Manifest> parse_manifest(std::string_view text);

io::Error store_damaged(std::string detail);

}  // namespace tierflow::swap
