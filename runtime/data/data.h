#pragma once
// FRONT DOOR of data. Turns text, token files and rows of conversations into training sequences of one length.
//
// Text: documents (a text file, a jsonl line) follow one another. After each comes the tokenizer's end-of-text token if
// it has one; if tokens are bytes, a zero byte separates documents. Sequences are cut without regard to documents, and
// what is left at the end is dropped.
// Rows (messages, prompts and completions, token ids; see docs/data.md): each is an example with tokens that are
// trained on and others that are not; the options say how they are packed.
// Tokens live in a file and are read when they are needed; the dataset's memory does not grow with its size.
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/progress.h"

namespace tierflow {

// Whether rows are pairs of a chosen and a rejected answer, which only a preference loss takes.
enum class Pairs : std::uint8_t { none, only, either };

struct DataOptions {
  std::vector<std::filesystem::path>
      paths;                    // files or folders of .txt, .py, .md, .jsonl, .npy, .bin; prepared .tfd files
  std::vector<double> weights;  // one for each path: its share of the sequences; empty: all paths are one dataset
  std::string format = "auto";  // of .jsonl rows: auto, or what row_format() returns
  std::string jsonl_field = "text";
  std::string train_on = "assistant";   // which tokens of a row: assistant (turns and completions), all
  std::string packing = "auto";         // auto (bfd for rows, concat for text), bfd, none, concat
  std::filesystem::path chat_template;  // a file, in place of the tokenizer's own template; empty: none
  std::filesystem::path tokenizer;      // a tokenizer.json; empty: bytes
  // A file of the model's tokenizer in another form: text is no bytes then, and refused. Empty: there is none.
  std::filesystem::path other_tokenizer;
  // A model's folder without a tokenizer, where bytes are tokens although nobody asked for them and its vocabulary is
  // larger. Empty: none.
  std::filesystem::path lacks_tokenizer;
  std::filesystem::path python;     // interpreter with the `tokenizers` package; used with a tokenizer only
  std::filesystem::path row_cache;  // folder where prepared rows are kept for the next time; empty: cache_folder()/data
  std::filesystem::path
      cache;  // folder for the packed token file, which never outlives the process; empty: the system's
  std::int64_t vocab_size = 0;  // token ids beyond it are an error of kind input
  Pairs pairs = Pairs::none;    // whether the rows are to be pairs: others are an error of kind usage
  std::int64_t sequence_length = 512;
  double held_out = 0.01;  // share of the sequences kept for evaluation; at least one sequence if there are two
  std::uint64_t seed = 0;  // of the shuffle
  bool skip_bad_records =
      false;  // leave out and count documents that are not UTF-8 and malformed jsonl lines; false: they are an error
  double tokenizer_seconds = 300;  // longest silence of the tokenizer before it is stopped
  Progress progress;               // of preparing rows; may be empty
};

// How rows became sequences.
struct RowSummary {
  bool pairs = false;                      // an example is a pair of rows, each a sequence
  std::int64_t examples = 0, tokens = 0;   // prepared, before any is cut
  std::int64_t used = 0, trained = 0;      // tokens in sequences, and those of them that are predicted and count
  std::int64_t truncated = 0;              // examples cut at the sequence's length
  std::int64_t untrained = 0;              // left out: nothing to train on
  std::int64_t untrained_when_cut = 0;     // left out: nothing to train on within the sequence's length
  std::int64_t merged = 0;                 // prompts whose last tokens merge with the completion's first
  std::array<std::int64_t, 33> lengths{};  // [n]: examples of 2^(n-1) + 1 to 2^n tokens
  std::string formats, masks, train_on;    // in words
  std::filesystem::path prepared;          // the file of rows
};

// How one of several mixed datasets became sequences; if none are mixed, all data.
struct DataSummary {
  std::vector<std::filesystem::path> paths;
  double share = 1;
  std::int64_t tokens = 0, sequences = 0, held_out = 0;
  std::int64_t skipped = 0;      // bad records passed over
  std::string first_skipped;     // why
  std::int64_t other_files = 0;  // of kinds that are not read, in folders among `paths`
  std::string first_other_file;
  std::string packing;
  std::optional<RowSummary> rows;  // nothing for text
};

// A row, or a part of one, in a sequence.
struct DocumentSpan {
  std::int64_t document = 0;           // its number among the prepared rows, in their order, from 0
  std::int64_t begin = 0, tokens = 0;  // in the sequence
};

class Dataset {
 public:
  // Throws Exception (kind input) naming the file and what is wrong with it.
  static Dataset prepare(const DataOptions& options);
  Dataset(Dataset&&) noexcept;
  Dataset& operator=(Dataset&&) noexcept;
  ~Dataset();

  // The number in one epoch. If datasets are mixed, an epoch ends when one of them is used up; the others continue in
  // the next epoch.
  std::int64_t training_sequences() const;
  std::int64_t held_out_sequences() const;
  std::int64_t sequence_length() const;
  std::int64_t tokens() const;
  // Hash of the packed tokens and of the options that shape sequences. If it is equal, a run can resume with this data.
  std::uint64_t fingerprint() const;
  // Hash of all sequences by number, and of which tokens count in each. Their order, and which are held out, do not
  // matter.
  std::uint64_t sequences_hash() const;
  std::vector<DataSummary> summaries() const;
  // Writes the prepared rows as a .tfd file that `paths` take. The file appears when it is whole. Throws Exception
  // (kind usage) for text and for mixed data.
  void write_rows(const std::filesystem::path& out) const;
  // Sequences 2k and 2k + 1, of training and held out, are the chosen and the rejected answer of one pair: pairs stay
  // together in every order.
  bool pairs() const;
  // Documents in a sequence do not see each other: `positions` begins anew with each.
  bool isolated() const;

  // The `index`-th training sequence in the order of its epoch (index / training_sequences()): sequence_length token
  // ids, the token that each position predicts (-100 where none counts), and each token's place in its document. The
  // same (seed, index) gives the same tokens in every run. `ids` has sequence_length() elements; labels and positions
  // have as many, or are empty if they are not wanted. Throws Exception (kind usage) if ids has another size or index
  // is negative.
  void training_sequence(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels = {},
                         std::span<std::int64_t> positions = {}) const;
  // The rows that this training sequence consists of, in its order. Throws Exception (kind usage) for text and for
  // mixed data.
  std::vector<DocumentSpan> training_documents(std::int64_t index) const;
  // How many tokens of this training sequence come before the padding.
  std::int64_t training_tokens(std::int64_t index) const;
  void held_out_sequence(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels = {},
                         std::span<std::int64_t> positions = {}) const;

  // All sequences, numbered in the order in which they were prepared: how many there are, the one with a number, and
  // the number of a training or held-out sequence.
  std::int64_t all_sequences() const;
  void numbered_sequence(std::int64_t number, std::span<std::int64_t> ids, std::span<std::int64_t> labels = {},
                         std::span<std::int64_t> positions = {}) const;
  std::int64_t number_of_training(std::int64_t index) const;
  std::int64_t number_of_held_out(std::int64_t index) const;

 private:
  struct Impl;
  explicit Dataset(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow
