#include "runtime/program/live_text.h"

#include <utility>

namespace tierflow {
namespace {

constexpr std::string_view kUnfinished = "\xef\xbf\xbd";

}  // namespace

LiveText::LiveText(std::function<std::string(const Tokens&)> decode, std::function<void(std::string_view)> write)
    : decode_(std::move(decode)), write_(std::move(write)) {}

LiveText::Tokens LiveText::from(std::size_t first, std::size_t end) const {
  return {tokens_.begin() + static_cast<std::ptrdiff_t>(first), tokens_.begin() + static_cast<std::ptrdiff_t>(end)};
}

void LiveText::show(std::string_view piece) {
  written_ += piece;
  write_(piece);
}

// What the tokens that are not shown yet add to those before them. Bytes that are no character together with what was
// shown stand alone.
std::string LiveText::added(const std::string& now) const {
  return now.starts_with(last_) ? now.substr(last_.size()) : decode_(from(shown_, tokens_.size()));
}

// A token is decoded behind the piece before it: what it adds may depend on that, as a space at the begin does.
void LiveText::add(std::int64_t token) {
  tokens_.push_back(token);
  const std::string now = decode_(from(first_, tokens_.size()));
  if (now.size() <= last_.size() || now.ends_with(kUnfinished)) return;
  const std::string piece = added(now);
  last_ = decode_(from(shown_, tokens_.size()));
  first_ = std::exchange(shown_, tokens_.size());
  show(piece);
}

std::string LiveText::end() {
  std::string whole = decode_(tokens_);
  if (whole.starts_with(written_)) {
    show(whole.substr(written_.size()));
  } else if (shown_ < tokens_.size()) {
    show(added(decode_(from(first_, tokens_.size()))));
  }
  return whole;
}

}  // namespace tierflow
