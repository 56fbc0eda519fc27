#pragma once
// The memory that generating text takes, computed before any of it is taken: keys and values on the host, and computing
// with them on the device. No torch here, because `tierflow plan` counts it too.
#include <cstdint>
#include <vector>

#include "runtime/spec/cache_shape.h"
#include "runtime/spec/generation_config.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

struct GenerationOptions {
  Sampling sampling;
  std::vector<std::int64_t> stop_tokens;
  std::int64_t max_new_tokens = 256;
  std::uint64_t seed = 0;
};

// What GenerationOptions and these prompts need of a session, in SessionOptions' terms.
struct GenerationShape {
  std::int64_t batch = 0;       // sequences at once: micro_batches
  std::int64_t tokens = 0;      // of a row that is computed at once: sequence_length, with a micro_batch of 1
  CacheShape cache;             // SessionOptions::cache
  std::uint64_t workspace = 0;  // SessionOptions::workspace
  static GenerationShape of(const ModelSpec& spec, const std::vector<std::vector<std::int64_t>>& prompts,
                            const GenerationOptions& options, std::int64_t most_at_once, std::int64_t most_tokens);
  // The shape of a Talk of at most `most` tokens, answers included.
  static GenerationShape of_talk(const ModelSpec& spec, std::int64_t most, std::int64_t most_tokens);
};

// Throws Exception (kind usage) if the model cannot continue a prompt by this many tokens; it names the prompt by its
// number, from 0.
void check_prompt(const std::vector<std::int64_t>& prompt, std::size_t number, const ModelSpec& spec,
                  std::int64_t new_tokens);
// The most tokens of a sequence, without the last one, which is not computed.
std::int64_t capacity_of(const std::vector<std::int64_t>& prompt, std::int64_t new_tokens);
// Tokens from which LongRoPE's other factors apply; 0: the model has none.
std::int64_t short_context(const ModelSpec& spec);

// How many tokens of a sequence a layer keeps: all; if a query sees `reach` tokens at most (0: all), these and a
// span's.
std::int64_t kept_tokens(std::int64_t capacity, std::int64_t reach, std::int64_t longest_span);
// Whether the stage has attention.
bool has_keys_and_values(const ModelSpec& spec, int stage);

inline constexpr std::int64_t kAttendedQueries = 128;  // of a span, whose scores exist at once

}  // namespace tierflow
