#pragma once
// Whether the reference of a preference loss is the model without its adapters, so that steps can compute it.
#include "runtime/spec/adapters.h"
#include "runtime/spec/loss_rule.h"

namespace tierflow {

// For LossRule::base_is_reference of a run that trains: nothing but adapters is trained, and they begin as nothing.
// goes_on_with_adapter: they have the values of an adapter that was trained before.
inline bool base_is_reference(const LossRule& loss, const ModelSpec& spec, bool goes_on_with_adapter) {
  return loss.needs_reference() && !goes_on_with_adapter && trains_adapters_alone(spec);
}

}  // namespace tierflow
