#pragma once
// Host memory that a session takes while its first weights are loaded, besides what is arranged. The host budget sets
// room for it aside. No torch here.
#include <cstdint>

#include "runtime/spec/model_spec.h"
#include "swap/layout.h"

namespace tierflow {

// The most bytes, besides pieces of some KiB. They hold one frozen tensor, with the values that are converted to its
// format; or one weight in fp32, with what decomposes it (adapter_init.h), and the first values of one unit's adapters;
// and turned_factor_bytes() of two; and ModelSpec::source_bytes. The last two alone are left where weights are stored
// as they come and adapters do not begin with values of theirs.
std::uint64_t loading_bytes(const ModelSpec& spec);

// The `most` largest factors, in fp32, whose elements PEFT's folder has in another order (is_turned_beside_base()), so
// that each is read and written as a whole: Bs of all experts, and the A of the table of tokens. An expert's tensors
// take turns, so two are held while they are read. 0 where there are none.
std::uint64_t turned_factor_bytes(const ModelSpec& spec, std::size_t most);

// Host memory that the beginning of a window of projected gradients takes, in the same way: all new projectors; the
// factors of the unit that has the most, in fp32, with a product of some rows; and one chunk's words, state and values.
std::uint64_t window_bytes(const ModelSpec& spec, const swap::Layout& layout);

// Device memory that first values of a gradient take (of_gradient()), or projectors of it: the sums of the stage that
// has the most, in fp32, and a gradient in bf16 each on its way there; for projectors also what decomposes one of them.
// Else 0.
std::uint64_t gradient_bytes(const ModelSpec& spec);

}  // namespace tierflow
