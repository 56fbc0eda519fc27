#include "runtime/program/live_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "runtime/base/utf8.h"

namespace tierflow::testing {
namespace {

constexpr std::int64_t kFirstHalf = 1000, kSecondHalf = 1001, kNothing = 1002;

// As a tokenizer with words does it: a space before each but the first, two tokens for one character, and a token
// without a text.
std::string text_of(const LiveText::Tokens& tokens) {
  std::string text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int64_t token = tokens[i];
    if (token == kNothing) continue;
    if (token == kFirstHalf) {
      const bool whole = i + 1 < tokens.size() && tokens[i + 1] == kSecondHalf;
      text += whole ? "\xc3\xa9" : "\xef\xbf\xbd";
    } else if (token == kSecondHalf) {
      if (i == 0 || tokens[i - 1] != kFirstHalf) text += "\xef\xbf\xbd";
    } else {
      text += (i == 0 ? "w" : " w") + std::to_string(token);
    }
  }
  return text;
}

struct Shown {
  std::vector<std::string> pieces;
  std::string text;
  std::size_t decoded = 0, longest = 0;
  LiveText live{[this](const LiveText::Tokens& tokens) {
                  decoded += tokens.size();
                  longest = std::max(longest, tokens.size());
                  return text_of(tokens);
                },
                [this](std::string_view piece) {
                  pieces.emplace_back(piece);
                  text += piece;
                }};
};

TEST(LiveText, ShowsEachTokenWhenItComesAndNoHalfCharacter) {
  Shown shown;
  const LiveText::Tokens tokens{5, 6, kFirstHalf, kSecondHalf, kNothing, 7, kFirstHalf};
  for (const std::int64_t token : tokens) shown.live.add(token);
  EXPECT_EQ(shown.pieces, (std::vector<std::string>{"w5", " w6", "\xc3\xa9", " w7"}));
  EXPECT_EQ(shown.live.end(), text_of(tokens));
  EXPECT_EQ(shown.text, text_of(tokens)) << "what was held back is shown at the end";
}

// As a tokenizer whose tokens are bytes: bytes that are no characters together are U+FFFD, each of them.
std::string text_of_bytes(const LiveText::Tokens& tokens) {
  std::string bytes, replaced;
  for (const std::int64_t token : tokens) bytes += static_cast<char>(token), replaced += "\xef\xbf\xbd";
  return find_invalid_utf8(bytes) == std::string_view::npos ? bytes : replaced;
}

TEST(LiveText, BytesOfNoCharacterChangeNothingThatWasShown) {
  const LiveText::Tokens broken{'\n', 0xe2, 0x82}, whole{'\n', 0xe2, 0x82, 0xac, 'a'}, followed{'\n', 0xbf, '\n', 'a'};
  std::vector<std::string> shown;
  for (const LiveText::Tokens& tokens : {broken, whole, followed}) {
    std::string text;
    LiveText live(text_of_bytes, [&](std::string_view piece) { text += piece; });
    for (const std::int64_t token : tokens) live.add(token);
    live.end();
    EXPECT_EQ(find_invalid_utf8(text), std::string_view::npos);
    EXPECT_TRUE(text.starts_with("\n"));
    shown.push_back(text);
  }
  EXPECT_EQ(shown[0], "\n\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(shown[1],
            "\n\xe2\x82\xac"
            "a");
}

TEST(LiveText, DecodesAFewTokensForEach) {
  Shown shown;
  LiveText::Tokens tokens;
  for (int i = 0; i < 1000; ++i) {
    tokens.push_back(i % 7 == 0 ? kFirstHalf : i % 7 == 1 ? kSecondHalf : i);
    shown.live.add(tokens.back());
  }
  EXPECT_EQ(shown.text, text_of(tokens));
  EXPECT_LE(shown.longest, 4U);
  EXPECT_LE(shown.decoded, 6 * tokens.size());
}

}  // namespace
}  // namespace tierflow::testing
