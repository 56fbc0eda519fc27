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

// A sequence while it grows.
struct Sequence {
  std::size_t prompt = 0;
  Tokens tokens;              // the prompt and what was generated
  std::int64_t computed = 0;  // tokens in the cache
  std::int64_t capacity = 0;  // tokens that it may come to, the last one not computed
  Generated generated;

  std::int64_t left() const { return std::ssize(tokens) - computed; }
};

// Continuous batching: a sequence that ends leaves its place in the batch to the next prompt.
class ContinuousBatch {
 public:
  ContinuousBatch(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options)
      : session_(session),
        prompts_(prompts),
        options_(options),
        sequences_(std::min(prompts.size(), static_cast<std::size_t>(session.options().micro_batches))),
        own_cache_(std::in_place, session.model().spec(), std::vector<std::int64_t>(sequences_.size()), longest_span(),
                   session.key_values()),
        cache_(*own_cache_) {}
  // One prompt, whose first tokens `computed` are in the cache; in the end it has those that are there then.
  ContinuousBatch(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options,
                  KeyValueCache& cache, Tokens& computed)
      : session_(session), prompts_(prompts), options_(options), sequences_(1), cache_(cache), computed_(&computed) {}

  void run(const GenerationEvents& events) {
    for (;;) {
      admit();
      const std::vector<CachedRow> rows = next_rows();
      if (rows.empty()) return;
      events.before_pass();
      cache_.expect(rows);
      const std::vector<at::Tensor> logits = session_.next_logits(rows, continues_after(rows));
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
      if (computed_ != nullptr)
        sequences_[place]->computed = std::ssize(*computed_);
      else
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
  bool continues_after(const std::vector<CachedRow>& rows) const {
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
    if (computed_ != nullptr)
      computed_->assign(place->tokens.begin(), place->tokens.begin() + place->computed);
    else
      cache_.replace(span.sequence, 0);
    place.reset();
  }

  Session& session_;
  const std::vector<Tokens>& prompts_;
  const GenerationOptions& options_;
  std::size_t next_prompt_ = 0;
  std::vector<std::optional<Sequence>> sequences_;  // by place
  std::optional<KeyValueCache> own_cache_;
  KeyValueCache& cache_;
  Tokens* computed_ = nullptr;  // of a talk
};

}  // namespace

void generate(Session& session, const std::vector<Tokens>& prompts, const GenerationOptions& options,
              const GenerationEvents& events) {
  for (std::size_t i = 0; i < prompts.size(); ++i)
    check_prompt(prompts[i], i, session.model().spec(), options.max_new_tokens);
  ContinuousBatch(session, prompts, options).run(events);
}

Talk::Talk(Session& session, std::int64_t most)
    : session_(session),
      most_(most),
      cache_(std::make_unique<KeyValueCache>(session.model().spec(), std::vector<std::int64_t>{most},
                                             session.options().sequence_length, session.key_values())) {}

Talk::~Talk() = default;

void Talk::answer(const Tokens& prompt, const GenerationOptions& options, const GenerationEvents& events) {
  const ModelSpec& spec = session_.model().spec();
  check_prompt(prompt, 0, spec, options.max_new_tokens);
  if (std::ssize(prompt) + options.max_new_tokens > most_)
    fail_usage("a talk of " + std::to_string(prompt.size()) + " tokens and " + std::to_string(options.max_new_tokens) +
               " new ones is beyond its " + std::to_string(most_));
  Tokens known = std::exchange(computed_, {});
  // The last token is computed, for its logits. LongRoPE's factors follow the length that a sequence may come to.
  const auto most_known = std::min(known.size(), prompt.size() - 1);
  const auto end =
      std::mismatch(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(most_known), prompt.begin());
  known.erase(end.first, known.end());
  if (short_context(spec) > 0 || !cache_->rewind(0, std::ssize(known))) known.clear();
  if (known.empty()) cache_->replace(0, most_);
  taken_over_ = std::ssize(known);
  const std::vector<Tokens> prompts{prompt};
  ContinuousBatch(session_, prompts, options, *cache_, known).run(events);
  computed_ = std::move(known);
}

}  // namespace tierflow
