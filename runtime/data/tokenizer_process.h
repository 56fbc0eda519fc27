#pragma once
// The Hugging Face tokenizers library in a Python process of its own, with a time limit. A hostile tokenizer.json can
// do harm only there.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/python_process.h"

namespace tierflow {

// Throws Exception (kind input) if text would be taken for bytes though the model has a tokenizer, in another form than
// tokenizer.json.
void expect_tokenizer(const DataOptions& options);

struct TextPiece {
  std::string text;  // valid UTF-8
  bool ends_document = false;
};

class TokenizerProcess {
 public:
  // Starts options.python with options.tokenizer. Throws Exception: input where the tokenizer is bad, environment where
  // Python is.
  explicit TokenizerProcess(const DataOptions& options);

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t end_of_text() const { return end_of_text_; }  // -1: none
  // The tokens of the pieces. Before each document comes what the tokenizer's post-processor adds at the beginning of a
  // text, and after it the end-of-text token, unless the document ends with it. A document may go on in the next call.
  std::vector<std::uint32_t> encode(std::span<const TextPiece> pieces);

 private:
  PythonProcess process_;
  std::int64_t vocab_size_ = 0, end_of_text_ = -1;
};

}  // namespace tierflow
