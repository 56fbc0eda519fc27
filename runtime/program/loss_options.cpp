#include "runtime/program/loss_options.h"

#include "runtime/base/exception.h"
#include "runtime/program/data_options.h"
#include "runtime/spec/base_reference.h"

namespace tierflow {

void add_loss_rows(OptionTable& table, TrainOptions& o) {
  table.group(kTraining);
  table.choice("loss", o.loss, {"cross-entropy", "dpo", "simpo", "orpo"},
               "what is minimised; dpo, simpo and orpo learn from pairs of a chosen and a rejected answer, and count "
               "--micro-batch in pairs");
  table.number("beta", o.beta, 0, 1e6, "of dpo, simpo and orpo (there lambda): TRL's beta");
  table.number("simpo-gamma", o.simpo_gamma, -1e6, 1e6, "margin of simpo");
  table.path("distill", o.distill, "FILE",
             "learn also from a teacher's most likely tokens of the same data, from `tierflow eval --teacher-out`");
  table.number("kd-alpha", o.kd.alpha, 0, 1e6, "weight of the divergence from the teacher");
  table.number("kd-ce-alpha", o.kd.ce_alpha, 0, 1e6, "weight of the cross-entropy beside it");
  table.number("kd-temperature", o.kd.temperature, 0, 1e6, "of teacher and student in that divergence");
}

void check_loss(const TrainOptions& o) {
  const LossRule rule = loss_rule(o), plain;
  const auto wrong = [](const std::string& what) { fail(io::ErrorKind::usage, "", what); };
  if (!(o.beta > 0)) wrong("--beta must be above 0");
  if (rule.pairs() && o.lora.dropout != 0)
    wrong("--lora-dropout has no meaning with --loss " + o.loss + ": nothing is dropped there, leave it out");
  if (!rule.pairs() && o.beta != plain.beta) wrong("--beta is for --loss dpo, simpo and orpo");
  if (rule.pairs() && !o.distill.empty()) wrong("--distill is for --loss cross-entropy, not " + o.loss);
  if (o.distill.empty() && (o.kd.alpha != plain.distillation.alpha || o.kd.ce_alpha != plain.distillation.ce_alpha ||
                            o.kd.temperature != plain.distillation.temperature))
    wrong("--kd-alpha, --kd-ce-alpha and --kd-temperature are for --distill");
  if (!(o.kd.temperature > 0)) wrong("--kd-temperature must be above 0");
  if (!(o.kd.alpha > 0)) wrong("--kd-alpha must be above 0: without it no --distill is needed");
  if (rule.kind != LossKind::simpo && o.simpo_gamma != plain.simpo_gamma) wrong("--simpo-gamma is for --loss simpo");
}

LossRule loss_rule(const TrainOptions& o) {
  return {.kind = parse_loss(o.loss), .beta = o.beta, .simpo_gamma = o.simpo_gamma, .distillation = o.kd};
}

bool base_is_reference(const TrainOptions& o, const ModelSpec& spec) {
  return base_is_reference(loss_rule(o), spec, /*goes_on_with_adapter=*/!o.adapter.empty());
}

std::int64_t sequences_in_one(const TrainOptions& o) {
  return loss_rule(o).pairs() ? 2 : 1;
}

}  // namespace tierflow
