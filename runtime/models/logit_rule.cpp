#include "runtime/models/logit_rule.h"

#include <ATen/ATen.h>

namespace tierflow::models {

void LogitRule::apply(at::Tensor& logits) const {
  if (multiplier != 1) logits.mul_(multiplier);
  if (softcap > 0) logits.div_(softcap).tanh_().mul_(softcap);
}

at::Tensor LogitRule::slope(const at::Tensor& logits) const {
  return softcap > 0 ? at::rsub(at::square(logits / softcap), 1) : at::Tensor();
}

void LogitRule::backward(at::Tensor& d_logits, const at::Tensor& slope) const {
  if (slope.defined()) d_logits.mul_(slope);
  if (multiplier != 1) d_logits.mul_(multiplier);
}

}  // namespace tierflow::models
