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

// A token is decoded behind the piece before it: what it adds may depend on that, as a space at the begin does.
void LiveText::add(std::int64_t token) {
  tokens_.push_back(token);
  const std::string now = decode_(from(first_, tokens_.size()));
  if (now.size() <= last_.size() || now.ends_with(kUnfinished)) return;
  const std::string piece = now.substr(last_.size());
  last_ = decode_(from(shown_, tokens_.size()));
  first_ = std::exchange(shown_, tokens_.size());
  show(piece);
}

std::string LiveText::end() {
  std::string whole = decode_(tokens_);
  if (whole.starts_with(written_)) {
    show(whole.substr(written_.size()));
  } else if (const std::string now = decode_(from(first_, tokens_.size())); now.size() > last_.size()) {
    show(now.substr(last_.size()));
  }
  return whole;
}

}  // namespace tierflow
