#include "runtime/models/pair_batch.h"

#include <ATen/ATen.h>

#include <string>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

// Completions of a batch, by row.
std::vector<Completion> completions(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses) {
  const std::vector<double> sums = row_log_probabilities(batch, losses);
  const at::Tensor counts = batch.labels.ge(0).sum(1);
  std::vector<Completion> all;
  for (std::size_t row = 0; row < sums.size(); ++row)
    all.push_back({.log_probability = sums[row],
                   .tokens = counts[static_cast<std::int64_t>(row)].item<std::int64_t>(),
                   .reference = rule.needs_reference() ? batch.reference[row] : 0});
  return all;
}

// Calls use(chosen row, its loss) for each pair.
template <class Use>
void for_each_pair(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses, Use use) {
  const std::vector<Completion> rows = completions(rule, batch, losses);
  for (std::size_t row = 0; row + 1 < rows.size(); row += 2)
    use(static_cast<std::int64_t>(row), pair_loss(rule, rows[row], rows[row + 1]));
}

// Of chosen rows, whether each position counts [rows, sequence].
at::Tensor chosen_positions(const LossRule& rule, const MicroBatch& batch) {
  at::Tensor counts = head_labels(rule, batch).ge(0);
  counts.slice(0, 1, c10::nullopt, 2).fill_(false);
  return counts;
}

}  // namespace

at::Tensor head_labels(const LossRule& rule, const MicroBatch& batch) {
  if (!rule.adds_chosen_nll()) return batch.labels;
  at::Tensor labels = batch.labels.clone();
  const std::int64_t length = labels.size(1);
  for (std::int64_t row = 0; row < labels.size(0); row += 2) {
    const at::Tensor counted = at::nonzero(labels[row].ge(0));
    if (counted.numel() == 0) continue;
    // What stands before the last token that counts is prompt; behind it is padding.
    const std::int64_t last = std::min(counted.max().item<std::int64_t>() + 1, length - 1);
    labels[row].narrow(0, 0, last).copy_(batch.ids[row].narrow(0, 1, last));
  }
  return labels;
}

PairCounts count_pairs(const LossRule& rule, const std::vector<MicroBatch>& batches) {
  const auto wrong = [](const std::string& what) { fail_usage(what); };
  PairCounts counts;
  for (const MicroBatch& batch : batches) {
    const std::int64_t rows = batch.labels.size(0);
    if (rows % 2 != 0) wrong("a micro-batch of pairs has an even number of rows, not " + std::to_string(rows));
    if (!batch.labels.ge(0).any(1).all().item<bool>()) wrong("a row of a pair has no token that counts");
    if (rule.needs_reference() && !rule.base_is_reference && static_cast<std::int64_t>(batch.reference.size()) != rows)
      wrong("the loss needs each row's log-probability under the reference model");
    counts.pairs += rows / 2;
    if (rule.adds_chosen_nll()) counts.nll_tokens += chosen_positions(rule, batch).sum().item<std::int64_t>();
  }
  return counts;
}

std::vector<double> row_log_probabilities(const MicroBatch& batch, const at::Tensor& losses) {
  const std::int64_t rows = batch.labels.size(0), length = batch.labels.size(1);
  const at::Tensor labels = batch.labels.contiguous();
  const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
  const double* loss = losses.const_data_ptr<double>();
  std::vector<double> sums;
  for (std::int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (std::int64_t token = row * length; token < (row + 1) * length; ++token)
      if (label[token] >= 0) sum -= loss[token];
    sums.push_back(sum);
  }
  return sums;
}

PairTotals pair_totals(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses) {
  PairTotals totals;
  for_each_pair(rule, batch, losses, [&](std::int64_t, const PairLoss& pair) { totals.add(pair); });
  if (rule.adds_chosen_nll()) {
    const at::Tensor counts = chosen_positions(rule, batch).contiguous();
    const bool* counted = counts.const_data_ptr<bool>();
    const double* loss = losses.const_data_ptr<double>();
    for (std::int64_t token = 0; token < counts.numel(); ++token) {  // in order: the same sum for any number of threads
      if (!counted[token]) continue;
      ++totals.nll_tokens;
      totals.nll += loss[token];
    }
  }
  return totals;
}

models::TokenScale pair_scale(const LossRule& rule, const MicroBatch& batch, const at::Tensor& losses,
                              const PairCounts& step) {
  at::Tensor scale = at::zeros(batch.labels.sizes(), at::kDouble);
  // A token's loss is minus its log-probability.
  const double share = -1 / static_cast<double>(step.pairs);
  for_each_pair(rule, batch, losses, [&](std::int64_t row, const PairLoss& pair) {
    scale[row].fill_(share * pair.d_chosen);
    scale[row + 1].fill_(share * pair.d_rejected);
  });
  scale.mul_(batch.labels.ge(0));
  if (rule.adds_chosen_nll())
    scale.add_(chosen_positions(rule, batch).to(at::kDouble), 1 / static_cast<double>(step.nll_tokens));
  return models::TokenScale(scale.view(-1));
}

}  // namespace tierflow
