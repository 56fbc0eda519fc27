// A talk whose next prompt is not what its cache has behind the last: what is taken over, and what that gives.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/device/device_memory.h"
#include "runtime/session/generator.h"
#include "tests/runtime/session/cached_rows.h"

namespace tierflow::testing {
namespace {

SessionOptions for_one(std::int64_t tokens) {
  SessionOptions options = for_generation(resident(1));
  options.sequence_length = tokens;
  return options;
}

// Logits behind tokens [before, end) of a sequence whose first ones are in the cache.
at::Tensor behind(Session& session, KeyValueCache& cache, const Tokens& tokens, std::int64_t before) {
  const Tokens part(tokens.begin() + before, tokens.end());
  return session.next_logits({row(cache, part, {{.length = std::ssize(part), .before = before}})}).at(0)[0].clone();
}

// What a ring forgot does not come back: where a window would reach it, the cache cannot go back.
TEST(CacheThatGoesBack, HasTheLogitsOfASequenceThatWasNeverLonger) {
  DeviceMemory::install();
  constexpr std::int64_t kPiece = 4, kCached = 22, kBehind = 5;
  int went = 0, refused = 0;
  for (const Case& which : cases()) {
    SCOPED_TRACE(which.name);
    Session session(plain_model(which), for_one(kCached + kBehind));
    const ModelSpec& spec = session.model().spec();
    const Tokens first = some_tokens(kCached, 5);
    for (const std::int64_t back : {3, 14, 18, 21}) {
      SCOPED_TRACE(back);
      KeyValueCache cache(spec, {kCached + kBehind}, kPiece);
      for (std::int64_t at = 0; at < kCached;) {
        const std::int64_t count = std::min(at == 0 ? 6 : kPiece, kCached - at);
        behind(session, cache, {first.begin(), first.begin() + at + count}, at);
        at += count;
      }
      if (!cache.rewind(0, back)) {
        ++refused;
        continue;
      }
      ++went;
      Tokens next(first.begin(), first.begin() + back);
      for (const std::int64_t token : some_tokens(kPiece, 40 + back)) next.push_back(token);
      KeyValueCache whole(spec, {kCached + kBehind});
      const at::Tensor expected = behind(session, whole, next, 0), found = behind(session, cache, next, back);
      EXPECT_LT(((found - expected).norm() / expected.norm()).item<double>(), 0.03);
    }
  }
  EXPECT_GT(went, 60);
  EXPECT_GT(refused, 10);
}

// The last token of a prompt is computed, whatever is known: its logits are wanted.
TEST(TalkAgain, APromptThatIsKnownWholeIsAnswered) {
  DeviceMemory::install();
  const Case which = case_called("llama");
  Session session(plain_model(which), for_one(16));
  Talk talk(session, 40);
  const Tokens prompt = some_tokens(9, 3);
  std::vector<Tokens> answers;
  const auto answer = [&](const Tokens& to) {
    talk.answer(to, {.max_new_tokens = 4},
                {.on_end = [&](std::size_t, const Generated& generated) { answers.push_back(generated.tokens); }});
  };
  answer(prompt);
  EXPECT_EQ(talk.taken_over(), 0);
  for (const std::size_t length : {9, 5}) {  // the same once more, and only its beginning
    answer({prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(length)});
    EXPECT_EQ(talk.taken_over(), static_cast<std::int64_t>(length) - 1);
  }
  ASSERT_EQ(answers.size(), 3U);
  for (const Tokens& each : answers) EXPECT_EQ(each.size(), 4U);
}

// What is kept was rotated for the length that the sequence had then.
TEST(TalkAgain, TakesNothingOverWhereRotaryFactorsFollowTheLength) {
  DeviceMemory::install();
  const Case which = case_called("phi3");
  Session session(plain_model(which), for_one(16));
  Talk talk(session, 40);
  for (const std::int64_t length : {5, 9}) {
    talk.answer(some_tokens(length, 3), {.max_new_tokens = 4}, {});
    EXPECT_EQ(talk.taken_over(), 0);
  }
}

}  // namespace
}  // namespace tierflow::testing
