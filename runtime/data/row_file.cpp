#include "runtime/data/row_file.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"

namespace tierflow {
namespace {

constexpr std::uint32_t kVersion = 1, kVersionOfPairs = 2;
constexpr std::size_t kPieceWords = 256 << 10;
constexpr std::uint64_t kLongestNotes = 16 << 20;
constexpr std::array<char, 8> kMagic = {'T', 'F', 'D', 'R', 'O', 'W', 'S', '\n'};

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version, largest_id;
  std::uint64_t rows, tokens, trained, hash, notes, check;
};
static_assert(sizeof(Header) == 64);

std::uint64_t check_of(const Header& header, std::string_view notes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, &header, offsetof(Header, check));
  XXH3_64bits_update(&state, notes.data(), notes.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace

std::uint64_t trained_targets(std::span<const std::uint32_t> row) {
  if (row.empty()) return 0;
  return static_cast<std::uint64_t>(
      std::count_if(row.begin() + 1, row.end(), [](std::uint32_t word) { return (word & kTrainedToken) != 0; }));
}

struct RowFileWriter::Hasher {
  Hasher() { XXH3_64bits_reset(&state); }
  XXH3_state_t state;
};

RowFileWriter::RowFileWriter(const std::filesystem::path& folder)
    : folder_(folder), file_(create_nameless(folder)), hasher_(std::make_unique<Hasher>()) {
  const Header empty{};
  write_exactly(file_, folder_, std::as_bytes(std::span(&empty, 1)));
}

RowFileWriter::~RowFileWriter() = default;

void RowFileWriter::flush() {
  throw_if_stopped();
  const auto bytes = std::as_bytes(std::span(pending_));
  XXH3_64bits_update(&hasher_->state, bytes.data(), bytes.size());
  write_exactly(file_, folder_, bytes);
  pending_.clear();
}

void RowFileWriter::add(std::span<const std::uint32_t> row) {
  pending_.push_back(static_cast<std::uint32_t>(row.size()));
  pending_.insert(pending_.end(), row.begin(), row.end());
  counts_.rows += 1;
  counts_.tokens += row.size();
  counts_.trained += trained_targets(row);
  for (const std::uint32_t word : row) counts_.largest_id = std::max(counts_.largest_id, word & ~kTrainedToken);
  if (pending_.size() >= kPieceWords) flush();
}

void RowFileWriter::finish(const std::filesystem::path& path, const std::string& notes, bool pairs) {
  flush();
  write_exactly(file_, folder_, std::as_bytes(std::span(notes.data(), notes.size())));
  Header header{.magic = kMagic,
                .version = pairs ? kVersionOfPairs : kVersion,
                .largest_id = counts_.largest_id,
                .rows = counts_.rows,
                .tokens = counts_.tokens,
                .trained = counts_.trained,
                .hash = XXH3_64bits_digest(&hasher_->state),
                .notes = notes.size(),
                .check = 0};
  header.check = check_of(header, notes);
  write_exactly(file_, folder_, std::as_bytes(std::span(&header, 1)), 0);
  name_file(file_, path);
}

RowFile::RowFile(std::filesystem::path path) : path_(std::move(path)), file_(open_regular(path_)) {
  const std::uint64_t size = file_size(file_, path_);
  Header header{};
  if (size >= sizeof header) read_exactly(file_, path_, 0, std::as_writable_bytes(std::span(&header, 1)));
  if (header.magic != kMagic)
    fail_input(path_.string(), "holds no prepared rows: `tierflow data prepare --out` writes such files");
  if (header.version != kVersion && header.version != kVersionOfPairs)
    fail_input(path_.string(),
               fmt::format("is of version {}, this program reads versions up to {}: prepare the data again",
                           header.version, kVersionOfPairs));
  if (header.notes > kLongestNotes || header.notes > size - sizeof header)
    fail_damaged("its notes end beyond the file");
  const std::uint64_t bytes = size - sizeof header - header.notes;
  notes_.resize(header.notes);
  read_exactly(file_, path_, size - header.notes, std::as_writable_bytes(std::span(notes_.data(), notes_.size())));
  if (header.check != check_of(header, notes_)) fail_damaged("its header does not have its checksum");
  if (bytes != 4 * (header.rows + header.tokens))
    fail_damaged(fmt::format("it has {} bytes of rows, not {}", bytes, 4 * (header.rows + header.tokens)));
  pairs_ = header.version == kVersionOfPairs;
  if (pairs_ && header.rows % 2 != 0) fail_damaged("it is a file of pairs with an odd number of rows");
  words_ = bytes / 4;
  hash_ = header.hash;
  counts_ = {.rows = header.rows, .tokens = header.tokens, .trained = header.trained, .largest_id = header.largest_id};
}

void RowFile::fail_damaged(const std::string& what) const {
  fail(io::ErrorKind::corruption, path_.string(), "is damaged: " + what + "; remove it and prepare the data again");
}

void RowFile::read(std::uint64_t first, std::span<std::uint32_t> words) const {
  read_exactly(file_, path_, sizeof(Header) + 4 * first, std::as_writable_bytes(words));
}

void RowFile::read_all(const Take& take) const {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  std::vector<std::uint32_t> piece, row;
  std::uint64_t expected = 0, rows = 0;  // tokens that the row lacks
  for (std::uint64_t at = 0; at < words_;) {
    throw_if_stopped();
    piece.resize(std::min<std::uint64_t>(kPieceWords, words_ - at));
    read(at, piece);
    XXH3_64bits_update(&state, piece.data(), 4 * piece.size());
    for (std::size_t i = 0; i < piece.size();) {
      if (expected == 0) {
        expected = piece[i++];
        if (expected == 0 || expected > words_ - at - i) fail_damaged(fmt::format("row {} is no row", rows));
        row.clear();
        continue;
      }
      const std::size_t count = std::min<std::uint64_t>(expected, piece.size() - i);
      row.insert(row.end(), piece.begin() + static_cast<std::ptrdiff_t>(i),
                 piece.begin() + static_cast<std::ptrdiff_t>(i + count));
      i += count;
      expected -= count;
      if (expected != 0) continue;
      ++rows;
      take(at + i - row.size(), row);
    }
    at += piece.size();
  }
  if (XXH3_64bits_digest(&state) != hash_ || expected != 0 || rows != counts_.rows)
    fail_damaged("its rows do not have their checksum");
}

}  // namespace tierflow
