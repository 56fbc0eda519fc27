#pragma once
// Sessions that generate, and rows of tokens that continue what a cache has.
#include <utility>
#include <vector>

#include "runtime/models/key_value_cache.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {

using Tokens = std::vector<std::int64_t>;

inline SessionOptions for_generation(SessionOptions options) {
  options.train = false;
  options.micro_batch = 1;
  return options;
}

inline Tokens some_tokens(std::int64_t count, std::int64_t first) {
  Tokens tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back((first + 37 * i * i + 11 * i) % 96);
  return tokens;
}

inline CachedRow row(KeyValueCache& cache, const Tokens& tokens, std::vector<CachedSpan> spans) {
  return {.ids = at::tensor(tokens, at::kLong).unsqueeze(0), .spans = std::move(spans), .cache = &cache};
}

}  // namespace tierflow::testing
