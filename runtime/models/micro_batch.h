#pragma once
// The input of one forward and backward.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tierflow {

// Tokens [begin, begin + length) of a row: a query attends to keys of its own document alone.
struct Document {
  std::int64_t row = 0, begin = 0, length = 0;
};

struct MicroBatch {
  at::Tensor ids;     // [micro-batch, sequence] int64
  at::Tensor labels;  // the same shape: the token that each position predicts (already shifted), -100 where none counts
  // The same shape, int64: where rows are packed, the position of each token in its document. It is 0 at the first
  // token of a row and of each document, and one more at each next token. Undefined: each row is one document.
  at::Tensor positions = {};
  // Of pairs (pair_batch.h): each row's log-probability under the reference model, where the loss needs it.
  std::vector<double> reference = {};
  // Of each row, how many of its tokens come before the padding. Empty: there is none.
  std::vector<std::int64_t> lengths = {};

  // A teacher's most likely tokens for each position [micro-batch, sequence, K], where the loss needs them: ids int32
  // and log-probabilities fp16 (soft_targets.h).
  at::Tensor teacher_ids = {}, teacher_log_probabilities = {};

  std::int64_t target_tokens() const;  // labels that count
  // The documents of all rows in order; none where each row is one. Throws Exception (kind usage) for positions that
  // are not as above.
  std::vector<Document> documents() const;
};

// Where the documents begin among the tokens of all rows, and where the last one ends: int32 [documents + 1].
at::Tensor document_ends(const std::vector<Document>& documents);

// Throws Exception (kind usage), in one line with the place and the value, where an id is none of the vocabulary's, or
// a label or a token of the teacher is beyond it, or where their tensors are of other types. vocabulary: 0 if nobody
// knows it. Nothing behind this looks again: on a GPU a lookup outside of a table would end the program's use of the
// card. `called`: what the line calls the micro-batch.
void check_tokens(const MicroBatch& batch, std::int64_t vocabulary, const std::string& called);

}  // namespace tierflow
