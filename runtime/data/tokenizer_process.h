#pragma once
// The Hugging Face tokenizers library, in a Python process of its own, with a time limit: a hostile tokenizer.json can
// do harm only there.
#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/files.h"
#include "runtime/data/data.h"

namespace tierflow {

struct TextPiece {
  std::string text;  // valid UTF-8
  bool ends_document = false;
};

class TokenizerProcess {
 public:
  // Starts options.python with options.tokenizer. Throws Exception: input where the tokenizer is bad, environment where
  // Python is.
  explicit TokenizerProcess(const DataOptions& options);
  TokenizerProcess(const TokenizerProcess&) = delete;
  TokenizerProcess& operator=(const TokenizerProcess&) = delete;
  // Stops the process if it still runs.
  ~TokenizerProcess();

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t end_of_text() const { return end_of_text_; }  // -1: none
  // The pieces' tokens, with the end-of-text token after each document.
  std::vector<std::uint32_t> encode(std::span<const TextPiece> pieces);

 private:
  void start(const std::string& python);
  void stop() noexcept;
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> out);
  void wait_for(short events);
  [[noreturn]] void fail_ended();

  std::string path_, python_;
  double patience_ = 0;
  pid_t process_ = -1;
  File socket_, errors_;
  std::int64_t vocab_size_ = 0, end_of_text_ = -1;
};

}  // namespace tierflow
