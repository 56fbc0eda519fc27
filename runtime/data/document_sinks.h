#pragma once
// Turns documents into tokens: each byte is a token, or text goes through a tokenizer.
#include <memory>

#include "runtime/data/data_source.h"
#include "runtime/data/token_store.h"

namespace tierflow {

// A sink that fills a token store. Call finish() after the last document.
class TokenSink : public DocumentSink {
 public:
  virtual void finish() {}
  // Whether anything but white space has come.
  bool content() const { return content_; }
  std::int64_t skipped() const { return skipped_; }
  // Why the first of them was skipped.
  const io::Error& first_skipped() const { return first_skipped_; }
  void skip(const io::Error& why) override {
    if (skipped_++ == 0) first_skipped_ = why;
  }

 protected:
  bool content_ = false;
  std::int64_t skipped_ = 0;
  io::Error first_skipped_;
};

std::unique_ptr<TokenSink> make_byte_sink(TokenStore& store);
// The tokenizer's process starts with the first text.
std::unique_ptr<TokenSink> make_tokenizer_sink(TokenStore& store, const DataOptions& options);

}  // namespace tierflow
