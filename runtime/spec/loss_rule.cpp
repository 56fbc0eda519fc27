#include "runtime/spec/loss_rule.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

// log p of a mean stays below 0 by so much, where the odds p / (1 - p) would be infinite.
constexpr double kLeastLoss = 1e-12;

// -log(1 / (1 + exp(-x))) and its derivative.
struct Slope {
  double value, derivative;
};
Slope minus_log_sigmoid(double x) {
  const double tail = std::log1p(std::exp(-std::abs(x)));
  const double other = x >= 0 ? std::exp(-x) / (1 + std::exp(-x)) : 1 / (1 + std::exp(x));  // 1 - sigmoid(x)
  return {.value = x >= 0 ? tail : tail - x, .derivative = -other};
}

double per_token(const Completion& completion) {
  return completion.log_probability / static_cast<double>(completion.tokens);
}

// Rafailov et al. 2023, Direct Preference Optimization, equation 7: -log sigmoid(rc - rr) of the rewards
// r = beta * (log p - log p_reference). TRL: DPOTrainer, loss_type "sigmoid".
PairLoss dpo(const LossRule& rule, const Completion& chosen, const Completion& rejected) {
  const double up = rule.beta * (chosen.log_probability - chosen.reference);
  const double down = rule.beta * (rejected.log_probability - rejected.reference);
  const Slope slope = minus_log_sigmoid(up - down);
  return {.loss = slope.value,
          .d_chosen = slope.derivative * rule.beta,
          .d_rejected = -slope.derivative * rule.beta,
          .reward_chosen = up,
          .reward_rejected = down};
}

// Meng et al. 2024, SimPO, equation 6: -log sigmoid(rc - rr - gamma) of the rewards r = beta * log p / tokens.
// TRL: CPOTrainer, loss_type "simpo" with cpo_alpha 0.
PairLoss simpo(const LossRule& rule, const Completion& chosen, const Completion& rejected) {
  const double up = rule.beta * per_token(chosen), down = rule.beta * per_token(rejected);
  const Slope slope = minus_log_sigmoid(up - down - rule.simpo_gamma);
  return {.loss = slope.value,
          .d_chosen = slope.derivative * rule.beta / static_cast<double>(chosen.tokens),
          .d_rejected = -slope.derivative * rule.beta / static_cast<double>(rejected.tokens),
          .reward_chosen = up,
          .reward_rejected = down};
}

// Hong et al. 2024, ORPO, equations 4, 6 and 7: beta (their lambda) times -log sigmoid(log odds(pc) - log odds(pr)) of
// p = exp(log p / tokens), odds(p) = p / (1 - p). TRL: ORPOTrainer, whose rewards are beta * log p / tokens.
PairLoss orpo(const LossRule& rule, const Completion& chosen, const Completion& rejected) {
  struct Odds {
    double log, derivative;  // by log p
  };
  const auto odds = [](const Completion& completion) {
    const double p = std::min(per_token(completion), -kLeastLoss), rest = -std::expm1(p);
    return Odds{.log = p - std::log(rest), .derivative = 1 / rest};
  };
  const Odds up = odds(chosen), down = odds(rejected);
  const Slope slope = minus_log_sigmoid(up.log - down.log);
  return {.loss = rule.beta * slope.value,
          .d_chosen = rule.beta * slope.derivative * up.derivative / static_cast<double>(chosen.tokens),
          .d_rejected = -rule.beta * slope.derivative * down.derivative / static_cast<double>(rejected.tokens),
          .reward_chosen = rule.beta * per_token(chosen),
          .reward_rejected = rule.beta * per_token(rejected)};
}

}  // namespace

LossKind parse_loss(const std::string& name) {
  if (name == "cross-entropy") return LossKind::cross_entropy;
  if (name == "dpo") return LossKind::dpo;
  if (name == "simpo") return LossKind::simpo;
  if (name == "orpo") return LossKind::orpo;
  fail_usage("a loss is cross-entropy, dpo, simpo or orpo, not " + name);
}

PairLoss pair_loss(const LossRule& rule, const Completion& chosen, const Completion& rejected) {
  switch (rule.kind) {
    case LossKind::dpo:
      return dpo(rule, chosen, rejected);
    case LossKind::simpo:
      return simpo(rule, chosen, rejected);
    case LossKind::orpo:
      return orpo(rule, chosen, rejected);
    case LossKind::cross_entropy:
      break;
  }
  throw Exception(io::ErrorKind::internal, "cross-entropy is no loss of pairs");
}

void PairTotals::add(const PairLoss& pair) {
  ++pairs;
  right += pair.reward_chosen > pair.reward_rejected ? 1 : 0;
  loss += pair.loss;
  reward_chosen += pair.reward_chosen;
  reward_rejected += pair.reward_rejected;
}

void PairTotals::add(const PairTotals& more) {
  pairs += more.pairs;
  right += more.right;
  loss += more.loss;
  nll += more.nll;
  nll_tokens += more.nll_tokens;
  reward_chosen += more.reward_chosen;
  reward_rejected += more.reward_rejected;
}

}  // namespace tierflow
