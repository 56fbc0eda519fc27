#pragma once
// The options that choose the loss.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"
#include "runtime/spec/loss_rule.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

void add_loss_rows(OptionTable& table, TrainOptions& options);
// Throws Exception (kind usage) for options that contradict each other.
void check_loss(const TrainOptions& options);
// Without the number of tokens that the teacher named, which the file of --distill has.
LossRule loss_rule(const TrainOptions& options);
// Whether the reference that the loss needs is computed in the visits of the steps: that of the model without its
// adapters, where these begin as nothing and nothing else is trained.
bool base_is_reference(const TrainOptions& options, const ModelSpec& spec);
// How many sequences one unit of --micro-batch is: two for preference losses, which count pairs.
std::int64_t sequences_in_one(const TrainOptions& options);

}  // namespace tierflow
