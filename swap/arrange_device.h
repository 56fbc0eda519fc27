#pragma once
// The device's half of arrange().
#include <string>

#include "swap/arrange.h"

namespace tierflow::swap {

// Fills in what lies on the device; `result.deferred` must be set. Room goes first to one stage's weights, one unit's
// gradient and the gradients of tied units; then to slots, if something leaves the device; then to as many carries and
// activations as fit; then to more weights.
io::Error arrange_device(const Layout& layout, const ArrangeRequest& request, Arrangement& result);

// An error of kind usage. It names the option, what was given, the smallest budget that works, and what would need
// less.
io::Error too_small(const char* option, std::uint64_t given, std::uint64_t needed, const std::string& remedy);

}  // namespace tierflow::swap
