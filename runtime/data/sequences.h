#pragma once
// Sequences of one length, cut from text or packed from rows. They are found by number.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/row_file.h"
#include "runtime/data/token_store.h"

namespace tierflow {

class SequenceSource {
 public:
  virtual ~SequenceSource() = default;
  virtual std::int64_t count() const = 0;
  // Tokens of that sequence, without the padding after them.
  virtual std::int64_t tokens(std::int64_t sequence) const = 0;
  // The rows that a sequence consists of, in its order. Throws Exception (kind usage) for text.
  virtual std::vector<DocumentSpan> documents(std::int64_t sequence) const = 0;
  // An empty span means that this part is not wanted. A label is the token that the position predicts, or -100.
  virtual void read(std::int64_t sequence, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                    std::span<std::int64_t> positions) const = 0;
};

// Documents one after the other, cut without regard to them: every position but the last predicts its neighbour.
class TextSequences : public SequenceSource {
 public:
  TextSequences(const TokenStore& store, std::int64_t length) : store_(store), length_(length) {}
  std::int64_t count() const override { return store_.size() / length_; }
  std::int64_t tokens(std::int64_t) const override { return length_; }
  [[noreturn]] std::vector<DocumentSpan> documents(std::int64_t sequence) const override;
  void read(std::int64_t sequence, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
            std::span<std::int64_t> positions) const override;

 private:
  const TokenStore& store_;
  const std::int64_t length_;
};

// How rows become sequences.
enum class Packing : std::uint8_t {
  none,    // one row in a sequence, cut at the sequence's length, padded after its end
  bfd,     // several rows in a sequence by best fit, each cut at the sequence's length, none seeing another
  concat,  // rows one after the other, cut into sequences without regard to rows; what is left at the end is dropped
};

// Sequences of rows. Its data lies in nameless files, so memory does not grow with the number of rows.
class PackedRows : public SequenceSource {
 public:
  // Reads all of the rows, and checks them.
  PackedRows(RowFile rows, Packing packing, std::int64_t length, const std::filesystem::path& folder,
             const Progress& progress);
  ~PackedRows() override;
  std::int64_t count() const override;
  std::int64_t tokens(std::int64_t sequence) const override;
  std::vector<DocumentSpan> documents(std::int64_t sequence) const override;
  const RowFile& rows() const { return rows_; }
  const RowSummary& summary() const { return summary_; }
  void read(std::int64_t sequence, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
            std::span<std::int64_t> positions) const override;

 private:
  class Plan;
  RowFile rows_;
  const Packing packing_;
  RowSummary summary_;
  std::unique_ptr<Plan> plan_;
};

}  // namespace tierflow
