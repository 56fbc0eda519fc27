#pragma once
#include <cmath>

#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {

// A model whose loss or whose gradient is not finite when a test says so.
class Spoiling : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  bool can_keep(int) const override { return false; }
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override {
    Carry d_in = ForwardingModel::backward(stage, weights, gradients, carry, shared, d_out);
    if (stage == spoiled_stage) gradients.back().view(-1)[0] = NAN;
    return d_in;
  }
  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const models::TokenScale& scale) const override {
    HeadResult result = ForwardingModel::head_loss_and_backward(weights, gradients, carry, shared, scale);
    if (spoiled_loss) result.loss_sum = torch::full({}, INFINITY, torch::kDouble);
    return result;
  }

  bool spoiled_loss = false;
  int spoiled_stage = -1;
};

}  // namespace tierflow::testing
