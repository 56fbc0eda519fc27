#pragma once
// Text from a model whose weights stream: every pass over the weights serves all sequences of a batch.
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/session/session.h"
#include "runtime/spec/generation_config.h"

namespace tierflow {

struct GenerationOptions {
  Sampling sampling;
  std::vector<std::int64_t> stop_tokens;
  std::int64_t max_new_tokens = 256;
  std::uint64_t seed = 0;
};

enum class FinishReason : std::uint8_t { length, stop };

struct Generated {
  std::vector<std::int64_t> tokens;  // without the prompt and without the stop token
  FinishReason reason = FinishReason::length;
};

// What GenerationOptions and these prompts need of a session, in SessionOptions' terms.
struct GenerationShape {
  std::int64_t batch = 0;       // sequences at once: micro_batches
  std::int64_t tokens = 0;      // of a row that is computed at once: sequence_length, with a micro_batch of 1
  std::uint64_t cache = 0;      // bytes of host memory for keys and values, beside the session's budget
  std::uint64_t workspace = 0;  // SessionOptions::workspace
  static GenerationShape of(const ModelSpec& spec, const std::vector<std::vector<std::int64_t>>& prompts,
                            const GenerationOptions& options, std::int64_t most_at_once, std::int64_t most_tokens);
};

// What throws in one of these ends the generation.
struct GenerationEvents {
  std::function<void()> before_pass = [] {};  // over the weights
  // Of each sequence as its tokens come, stop tokens left out; and when it ends.
  std::function<void(std::size_t prompt, std::int64_t token)> on_token = [](std::size_t, std::int64_t) {};
  std::function<void(std::size_t prompt, const Generated& generated)> on_end = [](std::size_t, const Generated&) {};
};

// Continues each prompt, as many at once as the session has micro_batches. They begin in the order given: where one
// ends, the next one begins in the same pass as the others' next tokens. `session` is made with train
// false, a micro_batch of 1, and the shape above. A prompt longer than the session's sequence_length is computed in
// pieces. Throws Exception (kind usage) for an empty prompt, a token that the model does not have, and a sequence that
// would be longer than the model's positions, or would cross the length from which LongRoPE has other factors.
void generate(Session& session, const std::vector<std::vector<std::int64_t>>& prompts, const GenerationOptions& options,
              const GenerationEvents& events);

}  // namespace tierflow
