#include "runtime/program/loss_options.h"

#include "runtime/base/exception.h"
#include "runtime/program/data_options.h"

namespace tierflow {

void add_loss_rows(OptionTable& table, TrainOptions& o) {
  table.group(kTraining);
  table.choice("loss", o.loss, {"cross-entropy", "dpo", "simpo", "orpo"},
               "what is minimised; dpo, simpo and orpo learn from pairs of a chosen and a rejected answer, and count "
               "--micro-batch in pairs");
  table.number("beta", o.beta, 0, 1e6, "of dpo, simpo and orpo (there lambda): TRL's beta");
  table.number("simpo-gamma", o.simpo_gamma, -1e6, 1e6, "margin of simpo");
}

void check_loss(const TrainOptions& o) {
  const LossRule rule = loss_rule(o), plain;
  const auto wrong = [](const std::string& what) { fail(io::ErrorKind::usage, "", what); };
  if (!(o.beta > 0)) wrong("--beta must be above 0");
  if (rule.pairs() && o.lora.dropout != 0)
    wrong("--lora-dropout has no meaning with --loss " + o.loss + ": nothing is dropped there, leave it out");
  if (!rule.pairs() && o.beta != plain.beta) wrong("--beta is for --loss dpo, simpo and orpo");
  if (rule.kind != LossKind::simpo && o.simpo_gamma != plain.simpo_gamma) wrong("--simpo-gamma is for --loss simpo");
}

LossRule loss_rule(const TrainOptions& o) {
  return {.kind = parse_loss(o.loss), .beta = o.beta, .simpo_gamma = o.simpo_gamma};
}

std::int64_t sequences_in_one(const TrainOptions& o) {
  return loss_rule(o).pairs() ? 2 : 1;
}

}  // namespace tierflow
