#pragma once
// FRONT DOOR of data. Text and token files in, fixed-length training sequences out. Documents (a text file, a jsonl
// line) follow one another, with the tokenizer's end-of-text token after each where it has one, and with a zero byte
// between them where tokens are bytes; sequences are cut without regard to documents, and what is left at the end is
// dropped. Tokens live in a file and are read where they are needed; the dataset's memory does not grow with its size.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tierflow {

struct DataOptions {
  std::vector<std::filesystem::path> paths;  // files or folders of .txt, .py, .md, .jsonl, .npy, .bin
  std::string jsonl_field = "text";
  std::filesystem::path tokenizer;  // a tokenizer.json; empty: bytes
  std::filesystem::path python;     // interpreter with the `tokenizers` package; used with a tokenizer only
  std::filesystem::path
      cache;  // folder for the packed token file, which never outlives the process; empty: the system's
  std::int64_t vocab_size = 0;  // token ids beyond it are an error of kind input
  std::int64_t sequence_length = 512;
  double held_out = 0.01;  // share of the sequences kept for evaluation, at least one where there are two
  std::uint64_t seed = 0;  // of the shuffle
  bool skip_bad_records =
      false;  // count, rather than refuse, documents that are not UTF-8 and jsonl lines that are not as said
  double tokenizer_seconds = 300;  // longest silence of the tokenizer before it is stopped
};

class Dataset {
 public:
  // Throws Exception (kind input) naming the file and what is wrong with it.
  static Dataset prepare(const DataOptions& options);
  Dataset(Dataset&&) noexcept;
  Dataset& operator=(Dataset&&) noexcept;
  ~Dataset();

  std::int64_t training_sequences() const;
  std::int64_t held_out_sequences() const;
  std::int64_t tokens() const;
  std::int64_t skipped_records() const;
  // Hash of the packed tokens and of the options that shape sequences: equal means that a position can be resumed.
  std::uint64_t fingerprint() const;
  // The `index`-th training sequence in the order of its epoch (index / training_sequences()): sequence_length token
  // ids. The same (seed, index) gives the same tokens in every run.
  void training_sequence(std::int64_t index, std::span<std::int64_t> out) const;
  void held_out_sequence(std::int64_t index, std::span<std::int64_t> out) const;

 private:
  struct Impl;
  explicit Dataset(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow
