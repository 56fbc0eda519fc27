#pragma once
// One element's update, for host and device. Every product and sum is rounded once, in the order written here.
#include <cmath>
#include <cstdint>

#include "optim/adamw.h"
#include "optim/block_codec.h"

namespace tierflow::optim {

// AdamWParams, digested once a call (in double, then rounded to float).
struct Coefficients {
  float scale = 1;             // of the gradient
  float beta1 = 0, rest1 = 0;  // rest = 1 - beta
  float beta2 = 0, rest2 = 0;
  float root_correction2 = 1;  // 1 / sqrt(1 - beta2^step)
  float eps = 0;
  float step_size = 0;  // lr / (1 - beta1^step); lr for Lion and SGD
  float decay = 1;      // 1 - lr * weight_decay
  float l2 = 0;         // Adam, SGD: weight_decay added to the gradient
  float bound = 0;      // largest |m / (sqrt(v) + eps)|; infinity for none
};

Coefficients coefficients_of(const AdamWParams& params, bool eight_bit);

struct Element {
  float p, m, v;
};

// `g` is the raw gradient.
template <Rule R>
TIERFLOW_HD Element stepped(const Coefficients& k, float g, Element e) {
  g = g * k.scale;
  if constexpr (R == Rule::adam || R == Rule::sgd) g = ::fmaf(k.l2, e.p, g);
  if constexpr (R == Rule::adamw || R == Rule::adam) {
    const float scaled = k.rest2 * g;
    e.m = ::fmaf(k.beta1, e.m, k.rest1 * g);
    e.v = ::fmaf(k.beta2, e.v, scaled * g);
    float u = e.m / ::fmaf(::sqrtf(e.v), k.root_correction2, k.eps);
    u = u < k.bound ? u : k.bound;
    u = u > -k.bound ? u : -k.bound;
    e.p = ::fmaf(-k.step_size, u, R == Rule::adamw ? e.p * k.decay : e.p);
  } else if constexpr (R == Rule::lion) {
    const float direction = ::fmaf(k.beta1, e.m, k.rest1 * g);
    const float sign = direction > 0 ? 1.0F : direction < 0 ? -1.0F : 0.0F;
    e.m = ::fmaf(k.beta2, e.m, k.rest2 * g);
    e.p = ::fmaf(-k.step_size, sign, e.p * k.decay);
  } else {
    e.m = ::fmaf(k.beta1, e.m, g);
    e.p = ::fmaf(-k.step_size, e.m, e.p);
  }
  return e;
}

}  // namespace tierflow::optim
