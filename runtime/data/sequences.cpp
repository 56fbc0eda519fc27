#include "runtime/data/sequences.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <map>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"

namespace tierflow {
namespace {

constexpr std::size_t kFlushEntries = 64 << 10;
constexpr std::uint64_t kRowsBetweenProgress = 4096;
constexpr std::size_t kWindowRows = 64 << 10;  // that are packed with each other

// A piece of a row.
struct Piece {
  std::uint64_t first = 0, length = 0;  // in words of the file of rows
  std::uint64_t row = 0;                // its number
};

// Entries of one size, appended, then read by number.
template <class Entry>
class EntryFile {
 public:
  explicit EntryFile(const std::filesystem::path& folder) : folder_(folder), file_(create_nameless(folder)) {}

  std::uint64_t size() const { return flushed_ + pending_.size(); }
  void append(const Entry& entry) {
    pending_.push_back(entry);
    if (pending_.size() >= kFlushEntries) flush();
  }
  void flush() {
    write_exactly(file_, folder_, std::as_bytes(std::span(pending_)));
    flushed_ += pending_.size();
    pending_.clear();
  }
  void read(std::uint64_t first, std::span<Entry> out) const {
    read_exactly(file_, folder_, first * sizeof(Entry), std::as_writable_bytes(out));
  }

 private:
  const std::filesystem::path folder_;
  const File file_;
  std::vector<Entry> pending_;
  std::uint64_t flushed_ = 0;
};

}  // namespace

void TextSequences::read(std::int64_t sequence, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                         std::span<std::int64_t> positions) const {
  store_.read(sequence * length_, ids);
  if (!labels.empty()) {
    std::copy(ids.begin() + 1, ids.end(), labels.begin());
    labels.back() = -100;
  }
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i);
}

std::vector<DocumentSpan> TextSequences::documents(std::int64_t) const {
  fail(io::ErrorKind::usage, "", "text is cut into sequences without regard to documents: give rows (docs/data.md)");
}

// Which pieces of rows each sequence consists of.
class PackedRows::Plan {
 public:
  Plan(const std::filesystem::path& folder, Packing packing, std::int64_t length, std::size_t together,
       RowSummary& summary)
      : packing_(packing),
        together_(together),
        length_(static_cast<std::uint64_t>(length)),
        summary_(summary),
        borrowed_(folder),
        starts_(folder),
        pieces_(folder) {}

  void take(std::uint64_t first, std::span<const std::uint32_t> row) {
    const std::uint64_t number = rows_++;
    ++summary_.lengths[static_cast<std::size_t>(std::bit_width(row.size() - 1))];
    if (packing_ == Packing::concat) return lay(first, row, number);
    const std::size_t kept = std::min<std::size_t>(row.size(), length_);
    waiting_.push_back({{first, kept, number}, trained_targets(row.first(kept)), kept < row.size()});
    if (waiting_.size() < together_) return;
    if (std::all_of(waiting_.begin(), waiting_.end(), [](const Cut& cut) { return cut.trained != 0; }))
      for (const Cut& cut : waiting_) use(cut);
    else
      ++summary_.untrained_when_cut;
    waiting_.clear();
  }

  void finish() {
    if (!window_.empty() && packing_ != Packing::concat) pack();
    starts_.append(pieces_.size());
    starts_.flush();
    pieces_.flush();
  }

  std::int64_t sequences() const { return static_cast<std::int64_t>(starts_.size()) - 1; }

  std::vector<Piece> pieces_of(std::int64_t sequence) const {
    std::array<std::uint64_t, 2> bounds{};
    starts_.read(static_cast<std::uint64_t>(sequence), bounds);
    std::vector<Piece> pieces(bounds[1] - bounds[0]);
    pieces_.read(bounds[0], pieces);
    return pieces;
  }

 private:
  struct Cut {
    Piece piece;
    std::uint64_t trained = 0;
    bool truncated = false;
  };

  void use(const Cut& cut) {
    summary_.truncated += cut.truncated ? 1 : 0;
    summary_.trained += static_cast<std::int64_t>(cut.trained);
    summary_.used += static_cast<std::int64_t>(cut.piece.length);
    window_.push_back(cut.piece);
    if (packing_ == Packing::none || window_.size() >= kWindowRows) pack();
  }

  void add(std::span<const Piece> sequence) {
    starts_.append(pieces_.size());
    for (const Piece& piece : sequence) pieces_.append(piece);
  }

  // The longest first, each into the sequence with the least room that still takes it, and of those into the first.
  void pack() {
    std::stable_sort(window_.begin(), window_.end(),
                     [](const Piece& a, const Piece& b) { return a.length > b.length; });
    std::vector<std::vector<Piece>> sequences;
    std::map<std::uint64_t, std::deque<std::size_t>> by_room;
    for (const Piece& piece : window_) {
      const auto found = by_room.lower_bound(piece.length);
      std::size_t at = sequences.size();
      std::uint64_t room = length_;
      if (found != by_room.end()) {
        room = found->first;
        at = found->second.front();
        found->second.pop_front();
        if (found->second.empty()) by_room.erase(found);
      } else {
        sequences.emplace_back();
      }
      sequences[at].push_back(piece);
      if (packing_ == Packing::bfd && room > piece.length) by_room[room - piece.length].push_back(at);
    }
    for (const auto& sequence : sequences) add(sequence);
    window_.clear();
  }

  // Behind what came before; whole sequences leave.
  void lay(std::uint64_t first, std::span<const std::uint32_t> row, std::uint64_t number) {
    while (!row.empty()) {
      const std::size_t kept = std::min<std::size_t>(row.size(), length_ - laid_);
      window_.push_back({first, kept, number});
      // The first token of a sequence is predicted by none.
      trained_ += trained_targets(row.first(kept)) + (laid_ != 0 && (row[0] & kTrainedToken) != 0 ? 1 : 0);
      laid_ += kept;
      first += kept;
      row = row.subspan(kept);
      if (laid_ < length_) return;
      if (trained_ == 0) {
        ++summary_.untrained_when_cut;
      } else {
        add(window_);
        summary_.trained += static_cast<std::int64_t>(trained_);
        summary_.used += static_cast<std::int64_t>(length_);
      }
      window_.clear();
      laid_ = trained_ = 0;
    }
  }

  const Packing packing_;
  const std::size_t together_;  // rows of which all are kept or none
  const std::uint64_t length_;
  RowSummary& summary_;
  const BorrowedFolder borrowed_;
  EntryFile<std::uint64_t> starts_;
  EntryFile<Piece> pieces_;
  std::vector<Piece> window_;
  std::vector<Cut> waiting_;  // for the rest of those that belong together
  std::uint64_t rows_ = 0;
  std::uint64_t laid_ = 0, trained_ = 0;  // of the sequence that is being laid
};

PackedRows::PackedRows(RowFile rows, Packing packing, std::int64_t length, const std::filesystem::path& folder,
                       const Progress& progress)
    : rows_(std::move(rows)),
      packing_(packing),
      plan_(std::make_unique<Plan>(folder.empty() ? temporary_folder() : folder, packing, length, rows_.pairs() ? 2 : 1,
                                   summary_)) {
  summary_.pairs = rows_.pairs();
  summary_.examples = static_cast<std::int64_t>(rows_.counts().rows) / (rows_.pairs() ? 2 : 1);
  summary_.tokens = static_cast<std::int64_t>(rows_.counts().tokens);
  std::uint64_t seen = 0;
  rows_.read_all([&](std::uint64_t first, std::span<const std::uint32_t> row) {
    plan_->take(first, row);
    if (progress && ++seen % kRowsBetweenProgress == 0)
      progress("packing rows", first + row.size(), rows_.counts().rows + rows_.counts().tokens);
  });
  plan_->finish();
}

PackedRows::~PackedRows() = default;

std::int64_t PackedRows::count() const {
  return plan_->sequences();
}

std::int64_t PackedRows::tokens(std::int64_t sequence) const {
  std::uint64_t tokens = 0;
  for (const Piece& piece : plan_->pieces_of(sequence)) tokens += piece.length;
  return static_cast<std::int64_t>(tokens);
}

std::vector<DocumentSpan> PackedRows::documents(std::int64_t sequence) const {
  std::vector<DocumentSpan> spans;
  std::int64_t begin = 0;
  for (const Piece& piece : plan_->pieces_of(sequence)) {
    const auto tokens = static_cast<std::int64_t>(piece.length);
    spans.push_back({.document = static_cast<std::int64_t>(piece.row), .begin = begin, .tokens = tokens});
    begin += tokens;
  }
  return spans;
}

void PackedRows::read(std::int64_t sequence, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                      std::span<std::int64_t> positions) const {
  std::fill(ids.begin(), ids.end(), 0);
  std::fill(labels.begin(), labels.end(), -100);
  std::size_t begin = 0;
  std::vector<std::uint32_t> words;
  const auto count_from = [&](std::size_t start, std::size_t end) {
    for (std::size_t i = start; i < end && !positions.empty(); ++i) positions[i] = static_cast<std::int64_t>(i - start);
  };
  for (const Piece& piece : plan_->pieces_of(sequence)) {
    words.resize(piece.length);
    rows_.read(piece.first, words);
    for (std::size_t i = 0; i < words.size(); ++i) {
      const auto id = static_cast<std::int64_t>(words[i] & ~kTrainedToken);
      ids[begin + i] = id;
      const bool predicted = i != 0 || (begin != 0 && packing_ == Packing::concat);
      if (!labels.empty() && predicted && (words[i] & kTrainedToken) != 0) labels[begin + i - 1] = id;
    }
    if (packing_ != Packing::concat) count_from(begin, begin + words.size());
    begin += words.size();
  }
  count_from(packing_ == Packing::concat ? 0 : begin, ids.size());  // padding is a document of its own
}

}  // namespace tierflow
