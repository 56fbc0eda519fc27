#include "runtime/models/soft_targets.h"

#include <ATen/ATen.h>

#include <limits>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/models/grain.h"
#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// Which of the columns [rows, n], counted from the vocabulary's first, lie in the tile, and where.
struct Columns {
  Tensor inside, at;
};
Columns columns_of(const Tensor& ids, std::int64_t first, std::int64_t width) {
  const Tensor column = ids.to(at::kLong) - first;
  return {.inside = column.ge(0).logical_and(column.lt(width)), .at = column.clamp(0, width - 1)};
}

Tensor column(const Tensor& table, std::int64_t which) {
  return table.narrow(1, which, 1);
}

}  // namespace

SoftTargets::SoftTargets(const Tensor& ids, const Tensor& log_probabilities, const Distillation& rule)
    : ids_(ids.reshape({-1, ids.size(-1)})),
      log_probabilities_(log_probabilities.reshape({-1, ids.size(-1)})),
      rule_(rule) {}

SoftTargets SoftTargets::rows(std::int64_t first, std::int64_t count) const {
  if (!defined()) return {};
  return {ids_.narrow(0, first, count), log_probabilities_.narrow(0, first, count), rule_};
}

std::uint64_t SoftTargets::bytes() const {
  return defined() ? ids_.nbytes() + log_probabilities_.nbytes() : 0;
}

std::int64_t SoftTargets::largest_id() const {
  return ids_.numel() == 0 ? -1 : ids_.max().item<std::int64_t>();
}

Tensor SoftTargets::probabilities() const {
  return at::softmax(log_probabilities_.to(at::kDouble) / rule_.temperature, 1);
}

Tensor SoftTargets::no_sums() const {
  return at::zeros({ids_.size(0), 1 + ids_.size(1)}, ids_.options().dtype(at::kDouble));
}

void SoftTargets::add(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& sums,
                      const Tensor& soft) const {
  const Tensor before = column(sums, 0).clone();
  softmax_sums(logits, labels, first, sums);
  const Columns of = columns_of(ids_, first, logits.size(1));
  const Tensor chosen = soft.narrow(1, 1, ids_.size(1));
  chosen.copy_(at::where(of.inside, logits.gather(1, of.at).to(at::kDouble), chosen));
  if (rule_.temperature == 1) return;
  const Tensor counts = labels.ge(0).unsqueeze(1);
  const Tensor most = at::where(counts, column(sums, 0), 0.0), total = column(soft, 0);
  total.mul_(at::exp((before - most) / rule_.temperature));
  for_each_slice(logits, [&](std::int64_t row, std::int64_t rows) {
    const Tensor wide = logits.narrow(0, row, rows).to(wide_type(logits));
    const Tensor below = (wide - most.narrow(0, row, rows).to(wide.scalar_type())).div_(rule_.temperature);
    total.narrow(0, row, rows).add_(at::exp(below).sum(at::IntArrayRef{1}, true, at::kDouble));
  });
}

SoftTargets::Losses SoftTargets::losses(const Tensor& sums, const Tensor& soft, const Tensor& labels) const {
  const double t = rule_.temperature;
  const Tensor q = probabilities(), total = t == 1 ? sums.select(1, 1) : soft.select(1, 0);
  const Tensor normaliser = sums.select(1, 0) / t + at::log(total);
  const Tensor kd = (at::xlogy(q, q).sum(1) - (q * soft.narrow(1, 1, q.size(1))).sum(1) / t + normaliser).mul_(t * t);
  return {.ce = softmax_losses(sums, labels), .kd = at::where(labels.ge(0), kd, 0.0)};
}

// The largest logit, then what multiplies exp(z), the label's share, what multiplies exp(z / T), the teacher's share.
Tensor SoftTargets::factors(const Tensor& sums, const Tensor& soft, const Tensor& labels, double scale) const {
  const double t = rule_.temperature, ce = scale * rule_.ce_alpha, kd = scale * rule_.alpha * t;
  const Tensor of_one = (t == 1 ? ce + kd : ce) / sums.select(1, 1);
  const Tensor of_t = t == 1 ? at::zeros_like(of_one) : kd / soft.select(1, 0);
  const Tensor each =
      at::stack({sums.select(1, 0), of_one, at::full_like(of_one, ce), of_t, at::full_like(of_one, kd)}, 1);
  const Tensor nothing = at::zeros_like(each);
  nothing.select(1, 0).fill_(std::numeric_limits<double>::infinity());  // whose exponentials are 0
  return at::where(labels.ge(0).unsqueeze(1), each, nothing);
}

void SoftTargets::gradient(Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& factors) const {
  const double t = rule_.temperature;
  const Tensor label = labels.unsqueeze(1), counts = label.ge(0), is_label = ids_.eq(label);
  const Tensor most = column(factors, 0);
  // The entries that are not those of a softmax: the teacher's tokens, and the label where it is none of them.
  const Columns of = columns_of(at::cat({ids_.to(at::kLong), label}, 1), first, logits.size(1));
  const Tensor below = logits.gather(1, of.at).to(at::kDouble) - most;
  Tensor d = at::exp(below).mul_(column(factors, 1));
  if (t != 1) d.add_(at::exp(below / t).mul_(column(factors, 3)));
  d.sub_(at::cat({probabilities() * column(factors, 4) + is_label * column(factors, 2), column(factors, 2)}, 1));
  const Tensor alone = is_label.any(1, true).logical_not();
  const Tensor mine = of.inside.logical_and(counts).logical_and(at::cat({at::ones_like(is_label), alone}, 1));

  if (t == 1) {
    softmax_gradient(logits, labels, first, factors.narrow(1, 0, 3).contiguous());
  } else {
    for_each_slice(logits, [&](std::int64_t row, std::int64_t rows) {
      Tensor part = logits.narrow(0, row, rows);
      const Tensor factor = factors.narrow(0, row, rows).to(wide_type(logits));
      const Tensor wide = part.to(factor.scalar_type()) - column(factor, 0);
      part.copy_(at::exp(wide).mul_(column(factor, 1)).add_(at::exp(wide / t).mul_(column(factor, 3))));
    });
  }
  const Tensor places = at::nonzero(mine), row = places.select(1, 0), which = places.select(1, 1);
  logits.index_put_({row, of.at.index({row, which})}, d.index({row, which}).to(logits.scalar_type()));
}

void check_targets(const Targets& targets, std::int64_t vocabulary) {
  if (targets.labels.is_meta()) return;
  const auto beyond = [&](const std::string& what) {
    throw Exception(io::ErrorKind::usage, what + " is beyond the vocabulary of " + std::to_string(vocabulary));
  };
  if (targets.labels.numel() > 0 && targets.labels.max().item<std::int64_t>() >= vocabulary) beyond("a label");
  if (targets.teacher.defined() && targets.teacher.largest_id() >= vocabulary) beyond("a token of the teacher");
}

}  // namespace tierflow::models
