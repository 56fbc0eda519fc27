#pragma once
// From documents to tokens: bytes as they are, or text through a tokenizer.
#include <memory>

#include "runtime/data_source.h"
#include "runtime/token_store.h"

namespace tierflow {

// A sink that fills a token store. finish() after the last document.
class TokenSink : public DocumentSink {
 public:
  virtual void finish() {}
  // Anything besides white space has come.
  bool content() const { return content_; }
  std::int64_t skipped() const { return skipped_; }
  void skip() override { ++skipped_; }

 protected:
  bool content_ = false;
  std::int64_t skipped_ = 0;
};

std::unique_ptr<TokenSink> make_byte_sink(TokenStore& store);
// The tokenizer's process starts with the first text.
std::unique_ptr<TokenSink> make_tokenizer_sink(TokenStore& store, const DataOptions& options);

// Where the first byte of `text` lies that is not part of valid UTF-8; npos where all is valid. A sequence that `text`
// ends in the middle of counts as invalid, from its first byte.
std::size_t find_invalid_utf8(std::string_view text);

}  // namespace tierflow
