#include "runtime/session/generator.h"

#include <ATen/ATen.h>

#include <algorithm>

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

// The sequences of one batch while they grow.
class Batch {
 public:
  Batch(Session& session, const std::vector<Tokens>& prompts, std::size_t first, std::size_t count,
        const GenerationOptions& options)
      : session_(session),
        options_(options),
        first_(first),
        sequences_(prompts.begin() + static_cast<std::ptrdiff_t>(first),
                   prompts.begin() + static_cast<std::ptrdiff_t>(first + count)),
        computed_(count),
        generated_(count),
        ended_(count),
        capacities_(capacities()),
        cache_(session.model().spec(), capacities_) {}

  // another: one more batch follows.
  void run(const GenerationEvents& events, bool another) {
    for (std::vector<CachedRow> rows = next_rows(); !rows.empty(); rows = next_rows()) {
      events.before_pass();
      const std::vector<at::Tensor> logits = session_.next_logits(rows, another || goes_on_behind(rows));
      for (std::size_t row = 0; row < rows.size(); ++row)
        for (std::size_t at = 0; at < rows[row].spans.size(); ++at)
          take(rows[row].spans[at], logits[row][static_cast<std::int64_t>(at)], events);
    }
  }

 private:
  std::vector<std::int64_t> capacities() const {
    std::vector<std::int64_t> tokens;
    for (const Tokens& sequence : sequences_) tokens.push_back(capacity_of(sequence, options_.max_new_tokens));
    return tokens;
  }

  // What is not computed yet of each sequence. Prompts have rows of their own, at most as long as the session's; when
  // none is left, a row has the last tokens.
  std::vector<CachedRow> next_rows() {
    std::vector<CachedRow> rows;
    bool prompts = false;
    for (std::size_t i = 0; i < sequences_.size(); ++i)
      prompts = prompts || (!ended_[i] && generated_[i].tokens.empty());
    struct {
      Tokens last;
      std::vector<CachedSpan> spans;
      std::int64_t context = 0;
    } next[2];  // sequences of one row have the same rotary factors
    const std::int64_t limit = short_context(session_.model().spec());
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const auto sequence = static_cast<std::int64_t>(i);
      if (ended_[i] || (prompts && !generated_[i].tokens.empty())) continue;
      const auto left = static_cast<std::int64_t>(sequences_[i].size()) - computed_[i];
      const std::int64_t count = std::min(left, session_.options().sequence_length);
      if (prompts) {
        rows.push_back(
            row_of(Tokens(sequences_[i].begin() + computed_[i], sequences_[i].begin() + computed_[i] + count),
                   {{.sequence = sequence, .length = count, .before = computed_[i]}}, capacities_[i]));
      } else {
        auto& [last, spans, context] = next[limit > 0 && capacities_[i] > limit ? 1 : 0];
        spans.push_back({.sequence = sequence,
                         .begin = static_cast<std::int64_t>(last.size()),
                         .length = 1,
                         .before = computed_[i]});
        last.push_back(sequences_[i].back());
        context = std::max(context, capacities_[i]);
      }
    }
    for (auto& [last, spans, context] : next)
      if (!last.empty()) rows.push_back(row_of(last, std::move(spans), context));
    return rows;
  }

  // Whether a sequence has more to compute or to draw when this pass has ended, unless a stop token ends it.
  bool goes_on_behind(const std::vector<CachedRow>& rows) const {
    std::vector<std::int64_t> computed = computed_;
    for (const CachedRow& row : rows)
      for (const CachedSpan& span : row.spans)
        computed[static_cast<std::size_t>(span.sequence)] = span.before + span.length;
    for (std::size_t i = 0; i < sequences_.size(); ++i)
      if (!ended_[i] && computed[i] < capacities_[i]) return true;
    return false;
  }

  CachedRow row_of(const Tokens& tokens, std::vector<CachedSpan> spans, std::int64_t context) {
    return {.ids = at::tensor(tokens, at::kLong).unsqueeze(0),
            .spans = std::move(spans),
            .cache = &cache_,
            .context = context};
  }

  void take(const CachedSpan& span, const at::Tensor& logits, const GenerationEvents& events) {
    const auto i = static_cast<std::size_t>(span.sequence);
    computed_[i] = span.before + span.length;
    if (computed_[i] < static_cast<std::int64_t>(sequences_[i].size())) return;  // the prompt goes on
    const std::int64_t token = next_token({logits.const_data_ptr<float>(), static_cast<std::size_t>(logits.numel())},
                                          sequences_[i], options_.sampling, options_.seed, first_ + i);
    Generated& generated = generated_[i];
    if (std::find(options_.stop_tokens.begin(), options_.stop_tokens.end(), token) != options_.stop_tokens.end()) {
      generated.reason = FinishReason::stop;
      ended_[i] = true;
    } else {
      generated.tokens.push_back(token);
      sequences_[i].push_back(token);
      events.on_token(first_ + i, token);
      ended_[i] = static_cast<std::int64_t>(generated.tokens.size()) >= options_.max_new_tokens;
    }
    if (ended_[i]) events.on_end(first_ + i, generated);
  }

  Session& session_;
  const GenerationOptions& options_;
  const std::size_t first_;
  std::vector<Tokens> sequences_;       // prompt and what was generated
  std::vector<std::int64_t> computed_;  // tokens of each in the cache
  std::vector<Generated> generated_;
  std::vector<bool> ended_;
  const std::vector<std::int64_t> capacities_;  // tokens that each may come to, the last one not computed
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
  for (std::size_t first = 0; first < prompts.size(); first += static_cast<std::size_t>(shape.batch)) {
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < std::min(prompts.size(), first + static_cast<std::size_t>(shape.batch)); ++i)
      bytes += KeyValueCache::bytes(spec, capacity_of(prompts[i], options.max_new_tokens));
    shape.cache = std::max(shape.cache, bytes);
  }
  return shape;
}

void generate(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options,
              const GenerationEvents& events) {
  const auto at_once = static_cast<std::size_t>(session.options().micro_batches);
  for (std::size_t i = 0; i < prompts.size(); ++i)
    check_prompt(prompts[i], i, session.model().spec(), options.max_new_tokens);
  for (std::size_t first = 0; first < prompts.size(); first += at_once)
    Batch(session, prompts, first, std::min(at_once, prompts.size() - first), options)
        .run(events, first + at_once < prompts.size());
}

}  // namespace tierflow
