#pragma once
// Final norm, logits and cross-entropy. Logits exist for a chunk of tokens at a time; the chunk's rows depend only on
// the vocabulary and the kind of device, so that the bits do not depend on a budget.
#include <ATen/core/Tensor.h>

#include "runtime/models/head_adapter.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/logit_rule.h"
#include "runtime/models/norm.h"
#include "runtime/models/top_logits.h"

namespace tierflow::models {

// Tokens whose logits exist at once; on a device that is not the CPU they are more.
std::int64_t head_chunk_rows(std::int64_t vocab, bool on_device);
// The sum of the losses of tokens [tokens] fp64, a number on their device: on the CPU one after the other, elsewhere
// torch's reduction, whose order depends on their count alone.
at::Tensor sum_in_order(const at::Tensor& losses);
// The result of a head whose tokens have these losses, without the carry.
HeadResult distilled_result(const SoftTargets& teacher, const SoftTargets::Losses& losses);
// log-probabilities [tokens, top] fp64 of the largest logits, from complete sums as in ops.h.
at::Tensor top_log_probabilities(const TopLogits& top, const at::Tensor& sums);

class LossHead {
 public:
  // Tensor `own`, else `tied`, the embedding's [vocab, hidden]. dropout: of what an adapter takes.
  LossHead(const Norm& norm, const LogitRule& rule, const TensorIndex& index, std::string_view own,
           std::string_view tied, double dropout = 0);

  // -log probabilities of the labels that count; the most likely tokens where the targets ask for them.
  HeadScores scores(const Weights& weights, const at::Tensor& hidden, const Targets& targets,
                    std::int64_t chunk_rows = 0) const;
  // Adds the gradients of the scaled losses to `gradients`; the hidden states' gradient is the carry's. chunk_rows 0:
  // head_chunk_rows(). With a teacher the scale is the same for all tokens.
  HeadResult loss_and_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                               const Targets& targets, const TokenScale& scale, std::int64_t chunk_rows = 0) const;
  // All logits of hidden states [tokens, hidden] at once, for tests and short prompts.
  at::Tensor logits(const Weights& weights, const at::Tensor& hidden) const;

 private:
  HeadRows rows(const Weights& weights) const;

  Norm norm_;
  LogitRule rule_;
  HeadAdapter adapter_;
  int output_ = -1, b_ = -1;
};

}  // namespace tierflow::models
