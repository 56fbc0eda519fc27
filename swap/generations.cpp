#include "swap/generations.h"

#include <cstring>
#include <optional>
#include <utility>

#include "io/wait.h"

namespace tierflow::swap {
namespace {

// A place where a superblock stands, and what is there.
struct Copy {
  std::optional<Superblock> block;
  bool blank = false;
  std::string trouble;  // why there is no block
  io::Error error;      // of reading it
};

Copy read_copy(io::Volume& volume, int copy) {
  const std::string name = copy == 0 ? "superblock A " : "superblock B ";
  auto sector = read_at(volume, copy * kSuperblockSpacing, kSector);
  if (!sector.ok()) return {.trouble = name + "cannot be read: " + sector.error().message(), .error = sector.error()};
  Copy found{.block = parse_superblock(sector->bytes(), volume.size()), .blank = is_blank(sector->bytes())};
  if (!found.block) found.trouble = name + why_no_superblock(sector->bytes());
  return found;
}

io::Result<std::string> read_manifest(io::Volume& volume, const Superblock& block) {
  auto buffer = read_at(volume, block.manifest_offset, block.manifest_length);
  if (!buffer.ok()) return buffer.error();
  std::string text(reinterpret_cast<const char*>(buffer->data()), block.manifest_length);
  if (!matches(block, text)) return store_damaged("its manifest is not what was written");
  return text;
}

io::Result<Generation> read_generation(io::Volume& volume, const Superblock& block) {
  auto text = read_manifest(volume, block);
  if (!text.ok()) return text.error();
  auto manifest = parse_manifest(*text);
  if (!manifest.ok()) return manifest.error();
  return Generation{.block = block,
                    .manifest = std::move(manifest).value(),
                    .text = std::move(text).value(),
                    .passed_over = {},
                    .unreadable = {},
                    .damaged = false};
}

// Whether nothing newer than `block` was ever committed: the other copy is its predecessor, or never was written.
bool is_newest(io::Volume& volume, const Superblock& block, const Copy& other) {
  if (other.block) return other.block->run_id == block.run_id && other.block->generation + 1 == block.generation;
  if (block.generation != 1 || !other.blank) return false;
  // A second generation's manifest would lie before this one.
  auto before = read_at(volume, kManifestBase, kSector);
  return before.ok() && is_blank(before->bytes());
}

}  // namespace

io::Error transfer(io::Volume& volume, io::Op op, std::uint64_t offset, io::Buffer& buffer, std::size_t length) {
  io::Completion completion = io::wait_for([&](io::Callback done) {
    volume.submit({.op = op, .offset = offset, .length = length, .buffer = std::move(buffer)}, std::move(done));
  });
  buffer = std::move(completion.buffer);
  return std::move(completion.error);
}

io::Result<io::Buffer> read_at(io::Volume& volume, std::uint64_t offset, std::uint64_t bytes) {
  io::Buffer buffer = io::allocate_buffer(round_up(bytes, kSector));
  if (!buffer) return io::Error{.kind = io::ErrorKind::memory, .operation = "open the store", .length = bytes};
  if (io::Error error = transfer(volume, io::Op::read, offset, buffer, buffer.size())) return error;
  return buffer;
}

io::Result<std::vector<Generation>> readable_generations(io::Volume& volume) {
  if (volume.size() < kManifestBase) return store_damaged("it is too small to be a store");
  Copy copies[] = {read_copy(volume, 0), read_copy(volume, 1)};
  std::vector<Generation> found;
  if (copies[0].blank && copies[1].blank) return found;
  const int first =
      copies[0].block && (!copies[1].block || copies[0].block->generation > copies[1].block->generation) ? 0 : 1;
  std::string troubles;
  io::Error unreadable;
  const auto note = [&](const std::string& trouble, const io::Error& error) {
    if (!trouble.empty()) troubles += (troubles.empty() ? "" : "; ") + trouble;
    if (!unreadable && error.kind != io::ErrorKind::corruption) unreadable = error;
  };
  for (const Copy& copy : copies)
    if (!copy.blank) note(copy.trouble, copy.error);
  for (const int at : {first, 1 - first}) {
    if (!copies[at].block) continue;
    const Superblock& block = *copies[at].block;
    auto generation = read_generation(volume, block);
    if (!generation.ok()) {
      note("generation " + std::to_string(block.generation) + ": " + generation.error().message(), generation.error());
      continue;
    }
    if (found.empty() && !is_newest(volume, block, copies[1 - at])) {
      generation->passed_over = troubles.empty() ? "the other superblock is not the one before it" : troubles;
      generation->unreadable = unreadable;
      generation->damaged = !troubles.empty();
    }
    found.push_back(std::move(generation).value());
  }
  if (!found.empty()) return found;
  if (!unreadable) return store_damaged("it holds no generation that can be read: " + troubles);
  unreadable.detail = "the store holds no generation that can be read: " + troubles;
  return unreadable;
}

io::Error publish_generation(io::Volume& volume, const Superblock& block, const std::string& manifest) {
  io::Buffer buffer = io::allocate_buffer(round_up(manifest.size(), kSector));
  io::Buffer sector = io::allocate_buffer(kSector);
  if (!buffer || !sector) return {.kind = io::ErrorKind::memory, .operation = "commit", .length = manifest.size()};
  std::memcpy(buffer.data(), manifest.data(), manifest.size());
  std::memcpy(sector.data(), &block, sizeof block);
  if (io::Error error = transfer(volume, io::Op::write, block.manifest_offset, buffer, buffer.size())) return error;
  if (io::Error error = volume.flush()) return error;
  const std::uint64_t place = copy_of(block.generation) * kSuperblockSpacing;
  if (io::Error error = transfer(volume, io::Op::write, place, sector, kSector)) return error;
  return volume.flush();
}

}  // namespace tierflow::swap
