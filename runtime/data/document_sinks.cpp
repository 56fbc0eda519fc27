#include "runtime/data/document_sinks.h"

#include <fmt/format.h>

#include <array>

#include "runtime/base/exception.h"
#include "runtime/data/tokenizer_process.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_bytes =
    1 << 20;  // longer documents are tokenised in pieces, cut after a line where there are lines
constexpr std::size_t batch_bytes = 4 << 20;  // sent to the tokenizer at once
constexpr std::size_t batch_pieces = 16384;

bool has_content(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") != std::string_view::npos;
}

// Every byte is its own id; a zero byte stands between documents.
class ByteSink : public TokenSink {
 public:
  explicit ByteSink(TokenStore& store) : store_(store) {}

  void begin_document(const std::string& where) override {
    where_ = where;
    empty_ = true;
  }
  void text(std::string_view piece) override {
    if (piece.empty()) return;
    if (empty_ && store_.size() != 0) store_.append_bytes(where_, std::array<std::uint8_t, 1>{0});
    store_.append_bytes(where_, std::span(reinterpret_cast<const std::uint8_t*>(piece.data()), piece.size()));
    empty_ = false;
    content_ = content_ || has_content(piece);
  }
  void end_document() override {}
  void tokens(const std::string& where, std::span<const std::uint32_t> ids) override {
    store_.append(where, ids);
    content_ = content_ || !ids.empty();
  }

 private:
  TokenStore& store_;
  std::string where_;
  bool empty_ = true;
};

class TokenizerSink : public TokenSink {
 public:
  TokenizerSink(TokenStore& store, const DataOptions& options) : store_(store), options_(options) {}

  void begin_document(const std::string&) override { text_.clear(); }

  void text(std::string_view piece) override {
    text_ += piece;
    while (text_.size() > piece_bytes) take(cut(), false);
  }

  void end_document() override {
    if (!text_.empty()) take(text_.size(), true);
  }

  void tokens(const std::string& where, std::span<const std::uint32_t> ids) override {
    flush();
    store_.append(where, ids);
    content_ = content_ || !ids.empty();
  }

  void finish() override { flush(); }

 private:
  // A length of at most piece_bytes that ends with a line, a word, or at least a character.
  std::size_t cut() const {
    for (const char end : {'\n', ' '})
      if (const auto at = text_.rfind(end, piece_bytes - 1); at != std::string::npos) return at + 1;
    std::size_t length = piece_bytes;
    while (length > piece_bytes - 4 && (static_cast<unsigned char>(text_[length]) & 0xc0) == 0x80) --length;
    return length;
  }

  // The first `length` bytes go to the tokenizer.
  void take(std::size_t length, bool ends_document) {
    content_ = content_ || has_content(std::string_view(text_).substr(0, length));
    pending_bytes_ += length;
    pending_.push_back({text_.substr(0, length), ends_document});
    text_.erase(0, length);
    if (pending_bytes_ >= batch_bytes || pending_.size() >= batch_pieces) flush();
  }

  void flush() {
    if (pending_.empty()) return;
    if (!process_) process_ = std::make_unique<TokenizerProcess>(options_);
    store_.append(options_.tokenizer.string(), process_->encode(pending_));
    pending_.clear();
    pending_bytes_ = 0;
  }

  TokenStore& store_;
  const DataOptions& options_;
  std::unique_ptr<TokenizerProcess> process_;
  std::vector<TextPiece> pending_;
  std::size_t pending_bytes_ = 0;
  std::string text_;
};

}  // namespace

std::unique_ptr<TokenSink> make_byte_sink(TokenStore& store) {
  return std::make_unique<ByteSink>(store);
}

std::unique_ptr<TokenSink> make_tokenizer_sink(TokenStore& store, const DataOptions& options) {
  return std::make_unique<TokenizerSink>(store, options);
}

}  // namespace tierflow
