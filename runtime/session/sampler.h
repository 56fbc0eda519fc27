#pragma once
// Chooses the next token.
#include <cstdint>
#include <span>

#include "runtime/spec/generation_config.h"

namespace tierflow {

// Draws from the logits [vocab] of the token after `before`, as transformers' processors do in their order. The random
// number depends only on (seed, sequence, before.size()), so the text of a sequence does not depend on other sequences.
// held_back: tokens that may not come. Throws Exception (kind numeric) where a logit is not a number, (kind usage)
// where no token may come.
std::int64_t next_token(std::span<const float> logits, std::span<const std::int64_t> before, const Sampling& sampling,
                        std::uint64_t seed, std::uint64_t sequence, std::span<const std::int64_t> held_back = {});

}  // namespace tierflow
