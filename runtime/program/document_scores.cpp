#include "runtime/program/document_scores.h"

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr std::size_t kPiece = 1 << 20;

}  // namespace

DocumentScores::DocumentScores(std::filesystem::path path, std::int64_t sequence_length)
    : path_(std::filesystem::absolute(std::move(path))),
      length_(sequence_length),
      file_(create_nameless(path_.parent_path())) {
  std::error_code ignored;
  if (std::filesystem::exists(path_, ignored) && !std::filesystem::is_regular_file(path_, ignored))
    fail(io::ErrorKind::usage, path_.string(), "is no regular file: --per-document takes the name of one");
}

void DocumentScores::add(const Dataset& data, std::int64_t first, const MicroBatch& batch, const HeadScores& scores) {
  const double* losses = scores.losses.const_data_ptr<double>();
  const bool* hits = scores.hits.const_data_ptr<bool>();
  const auto* labels = batch.labels.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < scores.losses.numel() / length_; ++row) {
    for (const DocumentSpan& span : data.training_documents(first + row)) {
      Sum& sum = sums_[span.document];
      // A position counts for the document of the token that it predicts.
      for (std::int64_t token = std::max<std::int64_t>(1, span.begin); token < span.begin + span.tokens; ++token) {
        const std::int64_t at = row * length_ + token - 1;
        if (labels[at] < 0) continue;
        ++sum.tokens;
        sum.hits += hits[at] ? 1 : 0;
        sum.loss += losses[at];
      }
    }
  }
}

void DocumentScores::write() {
  std::string lines;
  for (const auto& [document, sum] : sums_) {
    if (sum.tokens == 0) continue;
    const auto tokens = static_cast<double>(sum.tokens);
    lines += nlohmann::ordered_json{{"document", document},
                                    {"tokens", sum.tokens},
                                    {"loss", sum.loss / tokens},
                                    {"accuracy", static_cast<double>(sum.hits) / tokens}}
                 .dump() +
             "\n";
    if (lines.size() < kPiece) continue;
    write_exactly(file_, path_, std::as_bytes(std::span(lines)));
    lines.clear();
  }
  write_exactly(file_, path_, std::as_bytes(std::span(lines)));
  name_file(file_, path_);
}

}  // namespace tierflow
