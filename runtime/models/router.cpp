#include "runtime/models/router.h"

#include <ATen/ATen.h>

#include <limits>

#include "runtime/models/norm.h"
#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/models/upload.h"

namespace tierflow::models {
namespace {

constexpr double kLeastSum = 1e-20;  // of sigmoids, as transformers has it

at::Tensor descending(const at::Tensor& values) {
  return std::get<1>(at::sort(values, true, -1, true));
}

// Minus infinity for the experts of the groups that are not taken.
at::Tensor of_taken_groups(const ExpertsSpec& spec, const at::Tensor& choice) {
  if (spec.groups == 1) return choice;
  const at::Tensor grouped = choice.view({choice.size(0), spec.groups, -1});
  const std::int64_t best = std::min<std::int64_t>(2, grouped.size(2));
  const at::Tensor of_group = std::get<0>(at::sort(grouped, true, -1, true)).narrow(2, 0, best).sum(-1);
  const at::Tensor left = descending(of_group).narrow(1, spec.groups_taken, spec.groups - spec.groups_taken);
  const at::Tensor out = at::zeros_like(of_group, at::kBool).scatter_(1, left, true);
  return grouped.masked_fill(out.unsqueeze(2), -std::numeric_limits<double>::infinity()).view(choice.sizes());
}

// NaN for infinities, of which sigmoid() and softmax() may make 0 or 1: a router that overflows makes the step
// non-finite.
at::Tensor finite_or_nan(const at::Tensor& logits) {
  return logits + logits * 0;
}

// What a token's chosen scores are divided by.
at::Tensor divisor(const ExpertsSpec& spec, const at::Tensor& chosen) {
  const at::Tensor sum = chosen.sum(-1, true);
  return spec.sigmoid ? sum + kLeastSum : sum;
}

}  // namespace

Routing route(const ExpertsSpec& spec, const at::Tensor& logits, const at::Tensor& correction) {
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor found = finite_or_nan(logits.to(wide));
  Routing routing;
  routing.scores = spec.sigmoid ? at::sigmoid(found) : at::softmax(found, -1);
  // Sigmoids of large logits are equal.
  at::Tensor choice = (spec.sigmoid && !spec.corrected ? found : routing.scores).detach();
  if (correction.defined()) choice = choice + correction;
  routing.chosen = descending(of_taken_groups(spec, choice)).narrow(1, 0, spec.per_token).contiguous();
  at::Tensor weights = routing.scores.gather(1, routing.chosen);
  if (spec.normalised) weights = weights / divisor(spec, weights);
  if (spec.scale != 1) weights = weights * spec.scale;
  if (spec.rounded) weights = weights.to(logits.scalar_type()).to(wide);
  routing.weights = weights;
  return routing;
}

at::Tensor route_backward(const ExpertsSpec& spec, const Routing& routing, const at::Tensor& d_weights,
                          const RouterBalance* balance) {
  at::Tensor d_chosen = spec.scale != 1 ? d_weights * spec.scale : d_weights;
  if (spec.normalised) {
    const at::Tensor chosen = routing.scores.gather(1, routing.chosen), sum = divisor(spec, chosen);
    d_chosen = (d_chosen - (d_chosen * chosen).sum(-1, true) / sum) / sum;
  }
  const at::Tensor d_scores = at::zeros_like(routing.scores).scatter_(1, routing.chosen, d_chosen);
  add_gradient(balance, d_scores);
  if (spec.sigmoid) return d_scores * routing.scores * (1 - routing.scores);
  return routing.scores * (d_scores - (routing.scores * d_scores).sum(-1, true));
}

Router::Router(const ExpertsSpec& spec, const TensorIndex& index, const std::string& name)
    : spec_(spec),
      weight_(index.at(name + ".weight")),
      bias_(spec.biases ? index.at(name + ".bias") : -1),
      correction_(spec.corrected ? index.at(name + ".e_score_correction_bias") : -1) {}

at::Tensor Router::in_type(const at::Tensor& x) const {
  return spec_.wide && x.scalar_type() != at::kDouble ? x.to(at::kFloat) : x;
}

at::Tensor Router::logits(const Weights& weights, const at::Tensor& normed) const {
  const at::Tensor x = in_type(normed), weight = in_type(weights[static_cast<std::size_t>(weight_)]);
  return bias_ < 0 ? linear_map(x, weight) : linear_map(x, weight, in_type(weights[static_cast<std::size_t>(bias_)]));
}

Routing Router::route(const Weights& weights, const at::Tensor& logits) const {
  return models::route(spec_, logits, at_or_none(weights, correction_));
}

at::Tensor Router::backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_logits,
                            const at::Tensor& normed) const {
  const at::Tensor x = in_type(normed), d = d_logits.to(x.scalar_type());
  sums.add_product(weight_, d, x);
  add_rows(at_or_none(sums, bias_), d_logits);
  return matrix_product(d, in_type(weights[static_cast<std::size_t>(weight_)]));
}

void tell(const Assignment& assignment, std::int64_t block, ExpertsTouched* touched) {
  if (touched == nullptr) return;
  std::vector<bool>& experts = (*touched)[block];
  experts.resize(assignment.begin.size() - 1);
  for (std::size_t expert = 0; expert < experts.size(); ++expert)
    if (assignment.count(static_cast<std::int64_t>(expert)) != 0) experts[expert] = true;
}

Assignment assign(const ExpertsSpec& spec, const at::Tensor& chosen) {
  const at::Tensor host = download(chosen).contiguous();
  const std::int64_t pairs = host.numel();
  const auto* expert = host.const_data_ptr<std::int64_t>();
  Assignment assignment;
  assignment.begin.assign(static_cast<std::size_t>(spec.count) + 1, 0);
  for (std::int64_t pair = 0; pair < pairs; ++pair) ++assignment.begin[static_cast<std::size_t>(expert[pair]) + 1];
  for (std::size_t e = 1; e < assignment.begin.size(); ++e) assignment.begin[e] += assignment.begin[e - 1];
  std::vector<std::int64_t> next(assignment.begin.begin(), assignment.begin.end() - 1);
  at::Tensor places = at::empty({pairs}, at::kLong);
  auto* place = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t pair = 0; pair < pairs; ++pair) place[next[static_cast<std::size_t>(expert[pair])]++] = pair;
  assignment.places = upload({places}, chosen.device()).front();
  assignment.tokens = assignment.places.div(spec.per_token, "floor");
  return assignment;
}

}  // namespace tierflow::models
