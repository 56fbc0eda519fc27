#include "runtime/spec/generation_shape.h"

#include <algorithm>
#include <functional>
#include <string>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

using Tokens = std::vector<std::int64_t>;

// About the memory that KeyValueCache::attend() takes on the device for a span of `queries` queries after `capacity`
// cached tokens.
std::uint64_t attention_workspace(const ModelSpec& spec, std::int64_t capacity, std::int64_t queries) {
  const ModelConfig& c = spec.config;
  constexpr std::int64_t kStored = 2, kWide = 4, kCopies = 3;  // of scores: before and after the softmax, and masked
  const std::int64_t tokens = 2 * c.kv_heads * c.head_dim * (kStored + kWide),
                     scores = kCopies * kWide * c.heads * std::min(kAttendedQueries, queries);
  return static_cast<std::uint64_t>(capacity * (tokens + scores));
}

// Device memory that rotary tables and logits take beside that, for so many rows of a pass.
std::uint64_t beside_cache(const ModelConfig& c, std::int64_t capacity, std::int64_t tables, std::int64_t logits) {
  const std::int64_t table = capacity * c.head_dim * static_cast<std::int64_t>(sizeof(float)),
                     of_one = c.vocab_size * 2 * static_cast<std::int64_t>(sizeof(float));
  return static_cast<std::uint64_t>(tables * table * std::max<std::int64_t>(1, std::ssize(c.ropes)) + logits * of_one);
}

}  // namespace

// Tokens from which LongRoPE's other factors apply; 0: the model has none.
std::int64_t short_context(const ModelSpec& spec) {
  for (const RopeSpec& rope : spec.config.ropes)
    if (rope.type == "longrope") return rope.original_max_positions;
  return 0;
}

void check_prompt(const Tokens& prompt, std::size_t number, const ModelSpec& spec, std::int64_t new_tokens) {
  const auto wrong = [&](const std::string& what) { fail_usage("prompt " + std::to_string(number + 1) + " " + what); };
  if (prompt.empty()) wrong("has no token");
  for (const std::int64_t token : prompt)
    if (token < 0 || token >= spec.config.vocab_size)
      wrong("has token " + std::to_string(token) + ", and the model's vocabulary has " +
            std::to_string(spec.config.vocab_size));
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (const std::int64_t most = spec.config.longest_sequence(); most > 0 && length + new_tokens > most)
    wrong("has " + std::to_string(length) + " tokens; with " + std::to_string(new_tokens) +
          " new ones (--max-new-tokens) that is beyond the model's " + std::to_string(most) + " positions");
  const std::int64_t limit = short_context(spec);
  if (length <= limit && length + new_tokens - 1 > limit)
    wrong("has " + std::to_string(length) + " tokens and may come to " + std::to_string(length + new_tokens) +
          ": beyond " + std::to_string(limit) +
          " tokens this model has other rotary factors, and what is cached has those before; at most " +
          std::to_string(limit - length + 1) + " new ones (--max-new-tokens)");
}

std::int64_t capacity_of(const Tokens& prompt, std::int64_t new_tokens) {
  return static_cast<std::int64_t>(prompt.size()) + new_tokens - 1;  // the last one is not computed with
}

std::int64_t kept_tokens(std::int64_t capacity, std::int64_t reach, std::int64_t longest_span) {
  return reach > 0 ? std::min(capacity, reach + longest_span) : capacity;
}

bool has_keys_and_values(const ModelSpec& spec, int stage) {
  const StageKind kind = spec.stages[static_cast<std::size_t>(stage)].kind;
  return kind == StageKind::block || kind == StageKind::attention;
}

GenerationShape GenerationShape::of(const ModelSpec& spec, const std::vector<Tokens>& prompts,
                                    const GenerationOptions& options, std::int64_t most_at_once,
                                    std::int64_t most_tokens) {
  GenerationShape shape{.batch = std::min(most_at_once, static_cast<std::int64_t>(prompts.size()))};
  std::int64_t longest = 2;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check_prompt(prompts[i], i, spec, options.max_new_tokens);
    longest = std::max(longest, static_cast<std::int64_t>(prompts[i].size()));
  }
  const ModelConfig& c = spec.config;
  if (c.max_positions > 0)
    shape.batch = std::min(shape.batch, c.max_positions);  // a row that is measured is a sequence
  shape.tokens = std::max(std::min(longest, most_tokens), shape.batch);
  const bool pieces = longest > std::min(shape.tokens, most_tokens);
  const std::int64_t capacity = longest + options.max_new_tokens;
  shape.workspace = attention_workspace(spec, capacity, pieces ? shape.tokens : 1) +
                    beside_cache(c, capacity, pieces ? shape.batch : 1, shape.batch);
  std::vector<std::int64_t> capacities;
  for (const Tokens& prompt : prompts) capacities.push_back(capacity_of(prompt, options.max_new_tokens));
  std::sort(capacities.begin(), capacities.end(), std::greater<>());  // any may be there together
  capacities.resize(static_cast<std::size_t>(shape.batch));
  shape.cache = CacheShape::of(spec, capacities, pieces ? shape.tokens : 1);
  return shape;
}

GenerationShape GenerationShape::of_talk(const ModelSpec& spec, std::int64_t most, std::int64_t most_tokens) {
  GenerationShape shape{.batch = 1, .tokens = std::max<std::int64_t>(2, std::min(most, most_tokens))};
  shape.cache = CacheShape::of(spec, {most}, shape.tokens);
  shape.workspace = attention_workspace(spec, most, shape.tokens) + beside_cache(spec.config, most, 1, 1);
  return shape;
}

}  // namespace tierflow
