#pragma once
// The device's half of arrange().
#include <string>

#include "swap/arrange.h"

namespace tierflow::swap {

// Device: one stage's weights, one unit's gradient, the tied ones; slots, where something leaves; then carries and
// activations, as many as fit; then more weights.
// Fills in what lies on the device; `result.deferred` is there already.
io::Error arrange_device(const Layout& layout, const ArrangeRequest& request, Arrangement& result);

// An error of kind usage: the option, what was given, the smallest that works, and what needs less.
io::Error too_small(const char* option, std::uint64_t given, std::uint64_t needed, const std::string& remedy);

}  // namespace tierflow::swap
