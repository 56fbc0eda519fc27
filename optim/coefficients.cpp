#include <algorithm>
#include <cmath>
#include <limits>

#include "optim/step.h"

namespace tierflow::optim {
namespace {

// By squaring, so that the bits do not depend on a mathematics library.
double power(double base, std::int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if ((exponent & 1) != 0) result *= base;
  return result;
}

// With m and v exact averages of g and g^2, Cauchy and Schwarz give |m| <= K sqrt(v), K^2 = (1-b1)^2 / ((1-b2) (1 -
// b1^2/b2)) where b1^2 < b2, so |m / (sqrt(v) r + eps)| <= K / r. Infinite where the series diverges. The factor leaves
// room for rounding.
double exact_adam_bound(double beta1, double beta2, double root_correction2) {
  const double rest = 1 - beta1 * beta1 / beta2;
  if (!(beta2 > 0) || !(beta2 < 1) || !(rest > 0)) return std::numeric_limits<double>::infinity();
  return 1.001 * (1 - beta1) / std::sqrt((1 - beta2) * rest) / root_correction2;
}

}  // namespace

Coefficients coefficients_of(const AdamWParams& params, bool eight_bit) {
  const double beta1 = params.beta1, beta2 = params.beta2, lr = params.lr;
  const bool adam = params.rule == Rule::adamw || params.rule == Rule::adam;
  const bool decoupled = params.rule == Rule::adamw || params.rule == Rule::lion;
  Coefficients k;
  k.scale = params.gradient_scale;
  k.beta1 = params.beta1;
  k.rest1 = static_cast<float>(1 - beta1);
  k.beta2 = params.beta2;
  k.rest2 = static_cast<float>(1 - beta2);
  const double root_correction2 = 1 / std::sqrt(1 - power(beta2, params.step));
  k.root_correction2 = static_cast<float>(root_correction2);
  k.eps = std::max(params.eps, 0x1p-100F);
  k.step_size = static_cast<float>(adam ? lr / (1 - power(beta1, params.step)) : lr);
  k.decay = static_cast<float>(decoupled ? 1 - lr * params.weight_decay : 1.0);
  k.l2 = decoupled ? 0.0F : params.weight_decay;
  const double automatic =
      eight_bit ? exact_adam_bound(beta1, beta2, root_correction2) : std::numeric_limits<double>::infinity();
  k.bound = params.update_bound > 0 ? params.update_bound : static_cast<float>(automatic);
  return k;
}

}  // namespace tierflow::optim
