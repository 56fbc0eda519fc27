#include "runtime/data/teacher_file.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/signals.h"

namespace tierflow {
namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kMost = std::uint64_t{1} << 40;  // sequences, and positions
constexpr std::uint32_t kMostTokens = 65536;             // of a position
constexpr std::array<char, 8> kMagic = {'T', 'F', 'T', 'E', 'A', 'C', 'H', '\n'};
constexpr std::uint16_t kInfinity = 0x7C00;  // of fp16, without the sign

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version, top, id_bytes, largest_id;
  std::uint64_t vocabulary, sequence_length, sequences, positions, data, index_hash, check;
};
static_assert(sizeof(Header) == 80);

struct Entry {
  std::uint64_t before, hash;
};
static_assert(sizeof(Entry) == 16);
constexpr std::uint64_t kEntriesAtOnce = 64 << 10;

std::uint64_t check_of(const Header& header) {
  return XXH3_64bits(&header, offsetof(Header, check));
}

std::uint64_t place_of_blocks(const TeacherShape& shape) {
  return sizeof(Header) + sizeof(Entry) * shape.sequences;
}

// Calls use(entries) for the index in pieces; returns its hash.
template <class Use>
std::uint64_t read_index(const File& file, const std::filesystem::path& path, std::uint64_t sequences, Use use) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  std::vector<Entry> entries;
  for (std::uint64_t first = 0; first < sequences; first += entries.size()) {
    throw_if_stopped();
    entries.resize(std::min(kEntriesAtOnce, sequences - first));
    read_exactly(file, path, sizeof(Header) + sizeof(Entry) * first, std::as_writable_bytes(std::span(entries)));
    XXH3_64bits_update(&state, entries.data(), sizeof(Entry) * entries.size());
    use(entries);
  }
  return XXH3_64bits_digest(&state);
}

// As memcpy, and nothing where there is nothing.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

std::vector<std::byte> block_of(const TeacherTokens& tokens, std::uint32_t id_bytes) {
  const std::size_t ids = tokens.ids.size() * id_bytes;
  std::vector<std::byte> block(ids + 2 * tokens.log_probabilities.size());
  if (id_bytes == 4) {
    copy(block.data(), tokens.ids.data(), ids);
  } else {
    const std::vector<std::uint16_t> narrow(tokens.ids.begin(), tokens.ids.end());
    copy(block.data(), narrow.data(), ids);
  }
  copy(block.data() + ids, tokens.log_probabilities.data(), block.size() - ids);
  return block;
}

TeacherTokens tokens_of(const std::vector<std::byte>& block, std::uint32_t id_bytes) {
  const std::size_t count = block.size() / (id_bytes + 2), ids = count * id_bytes;
  TeacherTokens tokens{.ids = std::vector<std::uint32_t>(count),
                       .log_probabilities = std::vector<std::uint16_t>(count)};
  if (id_bytes == 4) {
    copy(tokens.ids.data(), block.data(), ids);
  } else {
    std::vector<std::uint16_t> narrow(count);
    copy(narrow.data(), block.data(), ids);
    std::copy(narrow.begin(), narrow.end(), tokens.ids.begin());
  }
  copy(tokens.log_probabilities.data(), block.data() + ids, 2 * count);
  return tokens;
}

}  // namespace

std::uint64_t TeacherShape::file_bytes() const {
  return place_of_blocks(*this) + positions * position_bytes();
}

TeacherFileWriter::TeacherFileWriter(std::filesystem::path path, const TeacherShape& shape)
    : path_(std::filesystem::absolute(std::move(path))), shape_(shape), file_(create_nameless(path_.parent_path())) {
  std::error_code ignored;
  if (std::filesystem::exists(path_, ignored) && !std::filesystem::is_regular_file(path_, ignored))
    fail(io::ErrorKind::usage, path_.string(), "is no regular file: --teacher-out takes the name of one");
  const std::uint64_t free = free_space(path_.parent_path());
  if (free < shape_.file_bytes())
    fail(io::ErrorKind::environment, path_.parent_path().string(),
         fmt::format("has {} free, but the teacher's tokens take {}: free some space, or give a smaller --teacher-top",
                     human_bytes(free), human_bytes(shape_.file_bytes())));
}

void TeacherFileWriter::add(const TeacherTokens& tokens) {
  const std::vector<std::byte> block = block_of(tokens, shape_.id_bytes());
  const Entry entry{.before = positions_, .hash = XXH3_64bits(block.data(), block.size())};
  write_exactly(file_, path_, block, place_of_blocks(shape_) + positions_ * shape_.position_bytes());
  write_exactly(file_, path_, std::as_bytes(std::span(&entry, 1)), sizeof(Header) + sizeof(Entry) * sequences_);
  for (const std::uint32_t id : tokens.ids) largest_ = std::max(largest_, id);
  positions_ += tokens.ids.size() / shape_.top;
  ++sequences_;
}

void TeacherFileWriter::finish(const Progress& progress) {
  if (sequences_ != shape_.sequences || positions_ != shape_.positions)
    fail(io::ErrorKind::internal, path_.string(), "lacks sequences");
  Header header{.magic = kMagic,
                .version = kVersion,
                .top = shape_.top,
                .id_bytes = shape_.id_bytes(),
                .largest_id = largest_,
                .vocabulary = shape_.vocabulary,
                .sequence_length = shape_.sequence_length,
                .sequences = shape_.sequences,
                .positions = shape_.positions,
                .data = shape_.data,
                .index_hash = read_index(file_, path_, sequences_, [](const std::vector<Entry>&) {}),
                .check = 0};
  header.check = check_of(header);
  write_exactly(file_, path_, std::as_bytes(std::span(&header, 1)), 0);
  const TeacherFile written(std::move(file_), path_);
  for (std::uint64_t sequence = 0; sequence < sequences_; ++sequence) {
    if (progress) progress("reading back", sequence, sequences_);
    written.read(sequence);
  }
  name_file(written.file(), path_);
}

TeacherFile::TeacherFile(std::filesystem::path path) : TeacherFile(open_regular(path), path) {}

TeacherFile::TeacherFile(File file, std::filesystem::path path) : path_(std::move(path)), file_(std::move(file)) {
  const std::uint64_t size = file_size(file_, path_);
  Header header{};
  if (size >= sizeof header) read_exactly(file_, path_, 0, std::as_writable_bytes(std::span(&header, 1)));
  if (header.magic != kMagic)
    fail_input(path_.string(),
               "holds no tokens of a teacher: `tierflow eval --teacher-out` writes such files (docs/distillation.md)");
  if (header.version != kVersion)
    fail_input(path_.string(), fmt::format("is of version {}, this program reads version {}: let the teacher write it "
                                           "again",
                                           header.version, kVersion));
  if (header.check != check_of(header)) fail_damaged("its header does not have its checksum");
  shape_ = {.top = header.top,
            .vocabulary = header.vocabulary,
            .sequence_length = header.sequence_length,
            .sequences = header.sequences,
            .positions = header.positions,
            .data = header.data};
  if (shape_.top == 0 || shape_.top > kMostTokens || shape_.top > shape_.vocabulary || shape_.vocabulary > INT32_MAX ||
      shape_.id_bytes() != header.id_bytes || header.largest_id >= shape_.vocabulary || shape_.sequences > kMost ||
      shape_.positions > kMost)
    fail_damaged("its header has impossible numbers");
  if (size != shape_.file_bytes()) fail_damaged(fmt::format("it has {} bytes, not {}", size, shape_.file_bytes()));
  largest_ = header.largest_id;
  index_hash_ = header.index_hash;
  hash_ = header.check;
  check_index();
}

void TeacherFile::check_index() const {
  std::uint64_t before = 0;
  bool grows = true;
  const std::uint64_t hash = read_index(file_, path_, shape_.sequences, [&](const std::vector<Entry>& entries) {
    for (const Entry& entry : entries) {
      grows = grows && entry.before >= before && entry.before <= shape_.positions;
      before = entry.before;
    }
  });
  if (hash != index_hash_ || !grows) fail_damaged("its index does not have its checksum");
}

void TeacherFile::fail_damaged(const std::string& what) const {
  fail(io::ErrorKind::corruption, path_.string(),
       "is damaged: " + what + "; remove it and let the teacher write it again");
}

TeacherTokens TeacherFile::read(std::uint64_t sequence) const {
  if (sequence >= shape_.sequences)
    fail(io::ErrorKind::usage, path_.string(), fmt::format("has {} sequences", shape_.sequences));
  std::array<Entry, 2> entries{};
  entries[1].before = shape_.positions;
  const std::uint64_t there = std::min<std::uint64_t>(2, shape_.sequences - sequence);
  read_exactly(file_, path_, sizeof(Header) + sizeof(Entry) * sequence,
               std::as_writable_bytes(std::span(entries.data(), there)));
  // The index was checked when the file was opened; what became of it since is not worth more than a refusal.
  if (entries[1].before < entries[0].before || entries[1].before > shape_.positions)
    fail_damaged("its index has changed");
  const std::uint64_t positions = entries[1].before - entries[0].before;
  if (positions > shape_.sequence_length) fail_damaged(fmt::format("sequence {} is too long", sequence));
  std::vector<std::byte> block(positions * shape_.position_bytes());
  read_exactly(file_, path_, place_of_blocks(shape_) + entries[0].before * shape_.position_bytes(), block);
  if (XXH3_64bits(block.data(), block.size()) != entries[0].hash)
    fail_damaged(fmt::format("sequence {} does not have its checksum", sequence));
  TeacherTokens tokens = tokens_of(block, shape_.id_bytes());
  const auto wrong = [&] { fail_damaged(fmt::format("sequence {} has impossible numbers", sequence)); };
  std::vector<std::uint32_t> sorted;
  for (std::uint64_t position = 0; position < positions; ++position) {
    const auto ids = std::span(tokens.ids).subspan(position * shape_.top, shape_.top);
    const auto words = std::span(tokens.log_probabilities).subspan(position * shape_.top, shape_.top);
    // Without their sign they are in the order of their values. The first is no infinity.
    std::uint16_t least = 0;
    for (const std::uint16_t word : words) {
      const std::uint16_t size = word & 0x7FFF;
      if ((word != 0 && word < 0x8000) || size > kInfinity || size < least) wrong();
      least = size;
    }
    if ((words.front() & 0x7FFF) == kInfinity) wrong();
    sorted.assign(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    if (sorted.back() > largest_ || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) wrong();
  }
  return tokens;
}

}  // namespace tierflow
