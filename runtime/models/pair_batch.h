#pragma once
// Micro-batches of pairs: rows 2k and 2k + 1 are the chosen and the rejected completion of one prompt, their labels
// those of the completions alone. A preference loss depends on a row's tokens through the sum of their
// log-probabilities, so its gradient is one factor a row, known when the row's sum is (spec/loss_rule.h).
#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/models/micro_batch.h"
#include "runtime/models/token_scale.h"
#include "runtime/spec/loss_rule.h"

namespace tierflow {

// The labels that the head counts: those of the batch, and of chosen rows the prompt's too where the rule adds their
// cross-entropy.
at::Tensor head_labels(const LossRule& rule, const MicroBatch& batch);

// The divisor of a step's loss.
struct PairCounts {
  std::int64_t pairs = 0, nll_tokens = 0;
};
// Over all of its micro-batches. Throws Exception (kind usage) for a batch that holds no whole pairs, a row without a
// label, or pairs without the reference that the rule needs.
PairCounts count_pairs(const LossRule& rule, const std::vector<MicroBatch>& batches);

// The log-probability of each row's completion. losses: of each token [rows * sequence] fp64 on the host, for
// head_labels().
std::vector<double> row_log_probabilities(const MicroBatch& batch, const at::Tensor& losses);

PairTotals pair_totals(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses);

// The derivative of the step's loss, PairTotals::mean_loss() over all of its pairs, by each token's loss.
models::TokenScale pair_scale(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses,
                              const PairCounts& step);

}  // namespace tierflow
