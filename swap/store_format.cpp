#include "swap/store_format.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>

namespace tierflow::swap {

using nlohmann::json;

io::Error store_damaged(std::string detail) {
  return {.kind = io::ErrorKind::corruption, .operation = "open the store", .detail = std::move(detail)};
}

std::uint64_t Superblock::own_checksum() const {
  return XXH3_64bits(this, offsetof(Superblock, checksum));
}

void Superblock::set_manifest(std::uint64_t offset, std::string_view text) {
  manifest_offset = offset;
  manifest_length = text.size();
  manifest_checksum = XXH3_64bits(text.data(), text.size());
  checksum = own_checksum();
}

bool is_blank(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

namespace {

Superblock copy_from(std::span<const std::byte> sector) {
  Superblock block;
  std::memcpy(static_cast<void*>(&block), sector.data(), sizeof block);
  return block;
}

bool is_readable(std::uint64_t version) {
  return version >= 1 && version <= kStoreVersion;
}

bool undamaged(const Superblock& block) {
  return block.magic == Superblock{}.magic && block.checksum == block.own_checksum();
}

}  // namespace

std::optional<Superblock> parse_superblock(std::span<const std::byte> sector, std::uint64_t volume_size) {
  const Superblock block = copy_from(sector);
  if (!undamaged(block) || !is_readable(block.version) || block.manifest_length > volume_size ||
      block.manifest_offset % kSector != 0 ||
      block.manifest_offset > volume_size - std::min(volume_size, round_up(block.manifest_length, kSector)))
    return std::nullopt;
  return block;
}

std::string why_no_superblock(std::span<const std::byte> sector) {
  const Superblock block = copy_from(sector);
  if (is_blank(sector)) return "is empty";
  if (!undamaged(block)) return "is damaged";
  if (!is_readable(block.version)) return "is of format version " + std::to_string(block.version);
  return "points beyond the store";
}

bool matches(const Superblock& block, std::string_view manifest) {
  return block.manifest_length == manifest.size() &&
         block.manifest_checksum == XXH3_64bits(manifest.data(), manifest.size());
}

std::string Manifest::text(const std::vector<UnitShape>& shapes) const {
  json entries = json::array();
  for (const ExtentRecord& at : records) entries.push_back({at.written, at.slot, at.generation, at.checksum});
  json units = json::array();
  for (const UnitShape& unit : shapes) {
    json groups = json::array();
    for (const GroupShape& group : unit.groups)
      groups.push_back({{"elements", group.elements}, {"precision", group.precision}});
    units.push_back({{"name", unit.name}, {"groups", groups}});
  }
  return json{{"version", version},         {"chunk_elements", chunk_elements},
              {"generations", generations}, {"units", units},
              {"identity", identity},       {"progress", progress},
              {"records", entries}}
      .dump();
}

io::Result<Manifest> parse_manifest(std::string_view text) {
  const json found = json::parse(text, nullptr, false);
  if (!found.is_object()) return store_damaged("its manifest is not readable as JSON");
  Manifest manifest;
  // Of a number that is negative, has a fraction or does not fit, get() would make something.
  const auto whole = [](const json& number) { return number.get_ref<const json::number_unsigned_t&>(); };
  try {  // whatever has another type or is not there
    manifest.version = whole(found.at("version"));
    manifest.chunk_elements = whole(found.at("chunk_elements"));
    const std::uint64_t generations = whole(found.at("generations"));
    if (generations < 1 || generations > 2) return store_damaged("its manifest is of more generations than there are");
    manifest.generations = static_cast<int>(generations);
    manifest.identity = found.at("identity").get<std::string>();
    manifest.progress = found.at("progress").get<std::string>();
    for (const json& entry : found.at("records")) {
      const std::uint64_t slot = whole(entry.at(1));
      if (slot >= generations) return store_damaged("its manifest names a slot that does not exist");
      manifest.records.push_back({.checksum = whole(entry.at(3)),
                                  .generation = whole(entry.at(2)),
                                  .slot = static_cast<std::uint8_t>(slot),
                                  .written = entry.at(0).get<bool>()});
    }
  } catch (const json::exception& wrong) {
    return store_damaged(std::string("its manifest is not one: ") + wrong.what());
  }
  return manifest;
}

}  // namespace tierflow::swap
