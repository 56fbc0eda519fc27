#pragma once
// Shows a text while its tokens are generated.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tierflow {

class LiveText {
 public:
  using Tokens = std::vector<std::int64_t>;
  // decode: the text of tokens; U+FFFD at its end stands for a character some of whose bytes are still to come. write:
  // shows a further piece of the text. What these throw is passed on.
  LiveText(std::function<std::string(const Tokens&)> decode, std::function<void(std::string_view)> write);

  // Shows what the token adds, as soon as its last character is whole. Only the tokens of the last two pieces are
  // decoded for it.
  void add(std::int64_t token);
  // Shows what add() held back, and returns the whole text.
  std::string end();

 private:
  Tokens from(std::size_t first, std::size_t end) const;
  void show(std::string_view piece);
  std::string added(const std::string& now) const;

  std::function<std::string(const Tokens&)> decode_;
  std::function<void(std::string_view)> write_;
  Tokens tokens_;
  std::size_t first_ = 0, shown_ = 0;  // tokens: where the last piece began, and how many are shown
  std::string last_;                   // the text of those between
  std::string written_;
};

}  // namespace tierflow
