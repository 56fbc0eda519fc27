#include "runtime/models/soft_targets.h"

#include <ATen/ATen.h>

#include <limits>

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
  // Which entries are the row's, the device knows; the host does not wait for that. So all are written: an entry of
  // another tile writes what one of the row's own writes, to the same place, or what lies there already.
  const Tensor one = mine.to(at::kInt).argmax(1, true), any = mine.any(1, true);
  const Tensor place = at::where(any, of.at.gather(1, one), 0), value = d.to(logits.scalar_type());
  const Tensor there = at::where(any, value.gather(1, one), logits.narrow(1, 0, 1));
  logits.scatter_(1, at::where(mine, of.at, place), at::where(mine, value, there));
}

}  // namespace tierflow::models
