#pragma once
// Distillation: the loss against the K most likely tokens that a teacher named for each position, and its gradient. Of
// a position whose logits are z, over the whole vocabulary, and whose label is y:
//
//   loss = ce_alpha * CE + alpha * KD
//   CE   = -log softmax(z)[y]
//   KD   = T^2 * sum_k q_k * (log q_k - log softmax(z / T)[k]),  q_k = p_k^(1/T) / sum_j p_j^(1/T),  k and j of the K
//   d loss / d z_i = ce_alpha * (softmax(z)_i - [i = y]) + alpha * T * (softmax(z / T)_i - q_i),  q_i = 0 beyond the K
//
// p are the teacher's probabilities. What it gave to other tokens is left out, and q sums to 1; the student's softmax
// is not cut. Source: axolotl, src/axolotl/integrations/kd: q in chat_template.py, the rest in kernels/liger.py with
// kd_beta 0 and without kd_normalize_topk. T^2: Hinton, Vinyals, Dean 2015, Distilling the Knowledge in a Neural
// Network, section 2.
//
// The vocabulary may come in tiles, as in ops.h; all of it is one tile that begins at 0. Arithmetic is fp32 over the
// vocabulary, with sums in fp64, and fp64 over the K; a gradient is rounded once.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "runtime/spec/loss_rule.h"

namespace tierflow::models {

class SoftTargets {
 public:
  SoftTargets() = default;  // there is no teacher
  // ids: [.., K] int32, distinct in a row; log_probabilities: the same shape, fp16, natural log, at least one of a row
  // finite. Rows whose label does not count are not looked at.
  SoftTargets(const at::Tensor& ids, const at::Tensor& log_probabilities, const Distillation& rule);

  bool defined() const { return ids_.defined(); }
  SoftTargets rows(std::int64_t first, std::int64_t count) const;
  std::uint64_t bytes() const;

  // Running sums beside those of ops.h, [rows, 1 + K] fp64: the sum of exponentials of z / T relative to the largest
  // logit so far (where T is 1 that of ops.h serves), then the logits of the K.
  at::Tensor no_sums() const;
  // Adds a tile [rows, width], whose columns begin at `first`, to both sums. labels [rows] int64.
  void add(const at::Tensor& logits, const at::Tensor& labels, std::int64_t first, const at::Tensor& sums,
           const at::Tensor& soft) const;

  // Of complete sums.
  struct Losses {
    at::Tensor ce, kd;  // [rows] fp64, 0 where no label counts
  };
  Losses losses(const at::Tensor& sums, const at::Tensor& soft, const at::Tensor& labels) const;
  // What gradient() wants beside each row's logits, for that of scale * sum of the losses: [rows, 5] fp64.
  at::Tensor factors(const at::Tensor& sums, const at::Tensor& soft, const at::Tensor& labels, double scale) const;
  // Replaces the tile's logits by their gradient.
  void gradient(at::Tensor& logits, const at::Tensor& labels, std::int64_t first, const at::Tensor& factors) const;

  const Distillation& rule() const { return rule_; }

 private:
  at::Tensor probabilities() const;  // q [rows, K] fp64

  at::Tensor ids_, log_probabilities_;  // [rows, K]
  Distillation rule_;
};

// The targets of the head's loss.
struct Targets {
  Targets(const at::Tensor& of_tokens, SoftTargets of_teacher = {}, std::int64_t most_likely = 0)  // NOLINT
      : labels(of_tokens.reshape({-1}).contiguous()), teacher(std::move(of_teacher)), top(most_likely) {}
  at::Tensor labels;    // [tokens] int64, -100 where none counts
  SoftTargets teacher;  // training, where there is one
  std::int64_t top;     // evaluation: how many most likely tokens of each position are wanted
};

}  // namespace tierflow::models
