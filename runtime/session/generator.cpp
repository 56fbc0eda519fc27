#include "runtime/session/generator.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/models/key_value_cache.h"
#include "runtime/session/sampler.h"

namespace tierflow {
namespace {

using Tokens = std::vector<std::int64_t>;

// Tokens from which LongRoPE's other factors apply; 0: the model has none.
std::int64_t short_context(const ModelSpec& spec) {
  for (const RopeSpec& rope : spec.config.ropes)
    if (rope.type == "longrope") return rope.original_max_positions;
  return 0;
}

void check_prompt(const Tokens& prompt, std::size_t number, const ModelSpec& spec, std::int64_t new_tokens) {
  const auto wrong = [&](const std::string& what) {
    throw Exception(io::ErrorKind::usage, "prompt " + std::to_string(number + 1) + " " + what);
  };
  if (prompt.empty()) wrong("has no token");
  for (const std::int64_t token : prompt)
    if (token < 0 || token >= spec.config.vocab_size)
      wrong("has token " + std::to_string(token) + ", and the model's vocabulary has " +
            std::to_string(spec.config.vocab_size));
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (spec.config.max_positions > 0 && length + new_tokens > spec.config.max_positions)
    wrong("has " + std::to_string(length) + " tokens; with " + std::to_string(new_tokens) +
          " new ones (--max-new-tokens) that is beyond the model's " + std::to_string(spec.config.max_positions) +
          " positions");
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

// A sequence while it grows.
struct Sequence {
  std::size_t prompt = 0;
  Tokens tokens;              // the prompt and what was generated
  std::int64_t computed = 0;  // tokens in the cache
  std::int64_t capacity = 0;  // tokens that it may come to, the last one not computed
  Generated generated;

  std::int64_t left() const { return std::ssize(tokens) - computed; }
};

// So many places for sequences. One that ends leaves its place to the next prompt.
class Places {
 public:
  Places(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options)
      : session_(session),
        prompts_(prompts),
        options_(options),
        sequences_(std::min(prompts.size(), static_cast<std::size_t>(session.options().micro_batches))),
        cache_(session.model().spec(), std::vector<std::int64_t>(sequences_.size()), longest_span()) {}

  void run(const GenerationEvents& events) {
    for (;;) {
      admit();
      const std::vector<CachedRow> rows = next_rows();
      if (rows.empty()) return;
      events.before_pass();
      const std::vector<at::Tensor> logits = session_.next_logits(rows, goes_on_behind(rows));
      for (std::size_t row = 0; row < rows.size(); ++row)
        for (std::size_t at = 0; at < rows[row].spans.size(); ++at)
          take(rows[row].spans[at], logits[row][static_cast<std::int64_t>(at)], events);
    }
  }

 private:
  // Behind others of its sequence.
  std::int64_t longest_span() const {
    const std::int64_t most = session_.options().sequence_length;
    return std::ranges::any_of(prompts_, [&](const Tokens& prompt) { return std::ssize(prompt) > most; }) ? most : 1;
  }

  void admit() {
    for (std::size_t place = 0; place < sequences_.size() && next_prompt_ < prompts_.size(); ++place) {
      if (sequences_[place]) continue;
      const Tokens& prompt = prompts_[next_prompt_];
      const std::int64_t capacity = capacity_of(prompt, options_.max_new_tokens);
      sequences_[place] = {.prompt = next_prompt_++, .tokens = prompt, .capacity = capacity};
      cache_.replace(static_cast<std::int64_t>(place), capacity);
    }
  }

  // What is not computed yet of each sequence. Prompts have rows of their own, at most as long as the session's; the
  // last tokens of the others are in one row, or in two where sequences have different rotary factors.
  std::vector<CachedRow> next_rows() {
    std::vector<CachedRow> rows;
    struct {
      Tokens last;
      std::vector<CachedSpan> spans;
      std::int64_t context = 0;
    } next[2];
    const std::int64_t limit = short_context(session_.model().spec());
    for (std::size_t place = 0; place < sequences_.size(); ++place) {
      if (!sequences_[place]) continue;
      const Sequence& of = *sequences_[place];
      const auto sequence = static_cast<std::int64_t>(place);
      const std::int64_t count = std::min(of.left(), session_.options().sequence_length);
      if (of.generated.tokens.empty()) {
        rows.push_back(row_of(Tokens(of.tokens.begin() + of.computed, of.tokens.begin() + of.computed + count),
                              {{.sequence = sequence, .length = count, .before = of.computed}}, of.capacity));
      } else {
        auto& [last, spans, context] = next[limit > 0 && of.capacity > limit ? 1 : 0];
        spans.push_back({.sequence = sequence,
                         .begin = static_cast<std::int64_t>(last.size()),
                         .length = 1,
                         .before = of.computed});
        last.push_back(of.tokens.back());
        context = std::max(context, of.capacity);
      }
    }
    for (auto& [last, spans, context] : next)
      if (!last.empty()) rows.push_back(row_of(last, std::move(spans), context));
    return rows;
  }

  // Whether something is left to compute or to draw when this pass has ended, unless stop tokens end it.
  bool goes_on_behind(const std::vector<CachedRow>& rows) const {
    if (next_prompt_ < prompts_.size()) return true;
    for (const CachedRow& row : rows)
      for (const CachedSpan& span : row.spans)
        if (span.before + span.length < sequences_[static_cast<std::size_t>(span.sequence)]->capacity) return true;
    return false;
  }

  CachedRow row_of(const Tokens& tokens, std::vector<CachedSpan> spans, std::int64_t context) {
    return {.ids = at::tensor(tokens, at::kLong).unsqueeze(0),
            .spans = std::move(spans),
            .cache = &cache_,
            .context = context};
  }

  void take(const CachedSpan& span, const at::Tensor& logits, const GenerationEvents& events) {
    std::optional<Sequence>& place = sequences_[static_cast<std::size_t>(span.sequence)];
    place->computed = span.before + span.length;
    if (place->left() > 0) return;  // the prompt goes on
    Generated& generated = place->generated;
    const bool too_early = std::ssize(generated.tokens) < options_.sampling.min_new_tokens;
    const std::int64_t token =
        next_token({logits.const_data_ptr<float>(), static_cast<std::size_t>(logits.numel())}, place->tokens,
                   options_.sampling, options_.seed, place->prompt, too_early ? options_.stop_tokens : Tokens());
    bool ended = false;
    if (std::find(options_.stop_tokens.begin(), options_.stop_tokens.end(), token) != options_.stop_tokens.end()) {
      generated.reason = FinishReason::stop;
      ended = true;
    } else {
      generated.tokens.push_back(token);
      place->tokens.push_back(token);
      events.on_token(place->prompt, token);
      ended = std::ssize(generated.tokens) >= options_.max_new_tokens;
    }
    if (!ended) return;
    events.on_end(place->prompt, generated);
    cache_.replace(span.sequence, 0);
    place.reset();
  }

  Session& session_;
  const std::vector<Tokens>& prompts_;
  const GenerationOptions& options_;
  std::size_t next_prompt_ = 0;
  std::vector<std::optional<Sequence>> sequences_;  // by place
  KeyValueCache cache_;
};

}  // namespace

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
  const std::int64_t capacity = longest + options.max_new_tokens,
                     tables = capacity * c.head_dim * static_cast<std::int64_t>(sizeof(float)),
                     logits = c.vocab_size * 2 * static_cast<std::int64_t>(sizeof(float));
  shape.workspace =
      KeyValueCache::workspace(spec, capacity, pieces ? shape.tokens : 1) +
      static_cast<std::uint64_t>((pieces ? shape.batch : 1) * tables * std::max<std::int64_t>(1, std::ssize(c.ropes)) +
                                 shape.batch * logits);
  std::vector<std::uint64_t> caches;
  for (const Tokens& prompt : prompts)
    caches.push_back(
        KeyValueCache::bytes(spec, capacity_of(prompt, options.max_new_tokens), pieces ? shape.tokens : 1));
  std::sort(caches.begin(), caches.end(), std::greater<>());  // any may be there together
  for (std::int64_t i = 0; i < shape.batch; ++i) shape.cache += caches[static_cast<std::size_t>(i)];
  return shape;
}

void generate(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options,
              const GenerationEvents& events) {
  for (std::size_t i = 0; i < prompts.size(); ++i)
    check_prompt(prompts[i], i, session.model().spec(), options.max_new_tokens);
  Places(session, prompts, options).run(events);
}

}  // namespace tierflow
