#pragma once
// One of the datasets that are mixed: its sequences, which of them are held out, and their order.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/data_source.h"
#include "runtime/data/sequences.h"
#include "runtime/data/token_store.h"

namespace tierflow {

// A permutation of [0, n) without a table.
std::uint64_t permute(std::uint64_t index, std::uint64_t n, std::uint64_t key);

class DataPart {
 public:
  // paths: the files of this part. number: of this part among all parts.
  DataPart(const DataOptions& options, std::vector<std::filesystem::path> paths, std::size_t number);

  // Counts and indices are of examples: pairs of sequences where pairs() is true, else sequences.
  std::int64_t training() const { return examples() - held_out_; }
  std::int64_t held_out() const { return held_out_; }
  bool pairs() const { return group_ == 2; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  // Depends only on the sequences, not on their order or which are held out.
  std::uint64_t sequences_hash() const { return sequences_hash_; }
  const DataSummary& summary() const { return summary_; }
  bool isolated() const { return isolated_; }
  // The place among all examples of the `index`-th training example over all epochs, or of the `index`-th held-out
  // example.
  std::int64_t training_place(std::int64_t index) const;
  std::int64_t held_out_place(std::int64_t k) const;
  std::int64_t examples() const { return source_->count() / group_; }
  // Sequence group_ * place + which of them in its example.
  const SequenceSource& source() const { return *source_; }

 private:
  void prepare_text(const DataOptions& options, const std::vector<Source>& sources);
  void prepare_examples(const DataOptions& options, const std::vector<Source>& sources,
                        const std::vector<std::string>& formats);
  void hold_out(double share);
  std::int64_t training_position(std::int64_t j) const;

  std::int64_t length_;
  std::uint64_t key_;
  std::unique_ptr<TokenStore> store_;  // for text
  std::unique_ptr<SequenceSource> source_;
  std::int64_t group_ = 1;  // sequences that stay together
  std::int64_t held_out_ = 0;
  std::uint64_t fingerprint_ = 0, sequences_hash_ = 0;
  bool isolated_ = false;
  DataSummary summary_;
};

}  // namespace tierflow
