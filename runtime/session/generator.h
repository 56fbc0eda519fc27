#pragma once
// Text from a model whose weights stream: every pass over the weights serves all sequences of a batch.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/session/session.h"
#include "runtime/spec/generation_shape.h"

namespace tierflow {

class KeyValueCache;

enum class FinishReason : std::uint8_t { length, stop };

struct Generated {
  std::vector<std::int64_t> tokens;  // without the prompt and without the stop token
  FinishReason reason = FinishReason::length;
};

// An exception from one of these ends the generation.
struct GenerationEvents {
  std::function<void()> before_pass = [] {};  // over the weights
  // Called for each token of a sequence but stop tokens, and when the sequence ends.
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

// A conversation: prompts each of which contains the prompts before it and their answers. The tokens that a prompt has
// in common with the last prompt and its answer, from the first token on, are not computed again, because their keys
// and values are kept. The other tokens continue a sequence (key_value_cache.h), so that logits may differ by rounding
// from those of the whole prompt computed at once.
class Talk {
 public:
  // session: made with the shape of_talk() of `most` tokens.
  Talk(Session& session, std::int64_t most);
  ~Talk();
  // As generate(), for one prompt. Also throws Exception (kind usage) if the prompt and its answer may have more than
  // `most` tokens. After an exception nothing that was computed is used again.
  void answer(const std::vector<std::int64_t>& prompt, const GenerationOptions& options,
              const GenerationEvents& events);
  // The number of tokens of the last prompt that were not computed again.
  std::int64_t taken_over() const { return taken_over_; }

 private:
  Session& session_;
  const std::int64_t most_;
  std::unique_ptr<KeyValueCache> cache_;
  std::vector<std::int64_t> computed_;  // tokens whose keys and values are kept
  std::int64_t taken_over_ = 0;
};

}  // namespace tierflow
