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
  // paths: of this part. number: among the parts.
  DataPart(const DataOptions& options, std::vector<std::filesystem::path> paths, std::size_t number);

  std::int64_t training() const { return source_->count() - held_out_; }
  std::int64_t held_out() const { return held_out_; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  const DataSummary& summary() const { return summary_; }
  bool isolated() const { return isolated_; }
  // The `index`-th training sequence over all epochs; its tokens without padding.
  std::int64_t training_tokens(std::int64_t index) const { return source_->tokens(training_place(index)); }
  // Throws Exception (kind usage) for text.
  std::vector<DocumentSpan> training_documents(std::int64_t index) const {
    return source_->documents(training_place(index));
  }
  void read_training(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                     std::span<std::int64_t> positions) const;
  void read_held_out(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                     std::span<std::int64_t> positions) const;

 private:
  void prepare_text(const DataOptions& options, const std::vector<Source>& sources);
  void prepare_examples(const DataOptions& options, const std::vector<Source>& sources,
                        const std::vector<std::string>& formats);
  void hold_out(double share);
  std::int64_t held_out_position(std::int64_t k) const;
  std::int64_t training_position(std::int64_t j) const;
  std::int64_t training_place(std::int64_t index) const;

  std::int64_t length_;
  std::uint64_t key_;
  std::unique_ptr<TokenStore> store_;  // of text
  std::unique_ptr<SequenceSource> source_;
  std::int64_t held_out_ = 0;
  std::uint64_t fingerprint_ = 0;
  bool isolated_ = false;
  DataSummary summary_;
};

}  // namespace tierflow
