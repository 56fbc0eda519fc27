#pragma once
// Which token comes next.
#include <cstdint>
#include <span>

#include "runtime/spec/generation_config.h"

namespace tierflow {

// Draws from the logits [vocab] of the token behind `before`, as transformers' processors do it in their order. The
// random number comes from (seed, sequence, before.size()) alone, so the text of a sequence does not depend on what is
// generated beside it. held_back: tokens that may not come. Throws Exception (kind
// numeric) where a logit is not a number, (kind usage) where no token may come.
std::int64_t next_token(std::span<const float> logits, std::span<const std::int64_t> before, const Sampling& sampling,
                        std::uint64_t seed, std::uint64_t sequence, std::span<const std::int64_t> held_back = {});

}  // namespace tierflow
