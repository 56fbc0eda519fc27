#pragma once
// What training minimises: cross-entropy, which may go with that to a teacher's tokens, or a preference loss over pairs
// of a chosen and a rejected completion of one prompt. Every rule of --loss stands in loss_rule.cpp with its formula;
// beta and gamma are named as in TRL.
#include <cstdint>
#include <string>

namespace tierflow {

enum class LossKind : std::uint8_t { cross_entropy, dpo, simpo, orpo };

// Learning from a teacher's most likely tokens too (models/soft_targets.h has the formula): the weights of both parts
// and the temperature, named as in axolotl.
struct Distillation {
  std::int64_t top = 0;  // tokens that the teacher named for each position; 0: there is no teacher
  double alpha = 0.9, ce_alpha = 0.1, temperature = 1.0;
};

struct LossRule {
  LossKind kind = LossKind::cross_entropy;
  double beta = 0.1;               // above 0
  double simpo_gamma = 0.5;        // SimPO's target margin
  Distillation distillation = {};  // with cross-entropy alone
  // Of dpo: the reference is the model without its adapters, and steps and evaluations compute it in their own visits,
  // so that the base is read as often as without a reference. Else each batch brings it.
  bool base_is_reference = false;

  bool distills() const { return distillation.top > 0; }
  bool pairs() const { return kind != LossKind::cross_entropy; }
  // Whether the rule needs each completion's log-probability under a reference model.
  bool needs_reference() const { return kind == LossKind::dpo; }
  bool computes_reference() const { return needs_reference() && base_is_reference; }
  // Whether the rule adds the mean cross-entropy of the chosen rows, prompts included.
  bool adds_chosen_nll() const { return kind == LossKind::orpo; }
};

// One of cross-entropy, dpo, simpo, orpo. Throws Exception (kind usage).
LossKind parse_loss(const std::string& name);

struct Completion {
  double log_probability = 0;  // the sum over its tokens, natural log
  std::int64_t tokens = 0;     // above 0
  double reference = 0;        // its log-probability under the reference model, where the rule needs it
};

struct PairLoss {
  double loss = 0;
  double d_chosen = 0, d_rejected = 0;  // derivatives of the loss by each completion's log-probability
  double reward_chosen = 0, reward_rejected = 0;
};

// Without the cross-entropy that adds_chosen_nll() says. The rule is one of pairs.
PairLoss pair_loss(const LossRule& rule, const Completion& chosen, const Completion& rejected);

// Sums over pairs.
struct PairTotals {
  std::int64_t pairs = 0, right = 0;  // right: the chosen completion has the higher reward
  double loss = 0, nll = 0;           // nll: over nll_tokens, where the rule adds it
  std::int64_t nll_tokens = 0;
  double reward_chosen = 0, reward_rejected = 0;

  void add(const PairLoss& pair);
  void add(const PairTotals& more);
  double share(double sum) const { return sum / static_cast<double>(pairs > 0 ? pairs : 1); }
  // Mean over the pairs, plus the mean over the tokens of nll.
  double mean_loss() const { return share(loss) + (nll_tokens > 0 ? nll / static_cast<double>(nll_tokens) : 0); }
  double accuracy() const { return share(static_cast<double>(right)); }
  double margin() const { return share(reward_chosen - reward_rejected); }
};

}  // namespace tierflow
