#include "runtime/models/router.h"

#include <ATen/ATen.h>

namespace tierflow::models {

Router::Router(const TensorIndex& index, const std::string& name) {
  if (index.find(name + ".weight") >= 0) linear_ = Linear(index, name);
}

at::Tensor Router::backward(const Weights& weights, const Gradients& sums, const at::Tensor& d_logits,
                            const at::Tensor& normed) const {
  const at::Tensor d = d_logits.to(normed.scalar_type()), low = linear_.low_gradient(weights, d);
  linear_.add_gradient(weights, sums, d, normed, low);
  return linear_.input_gradient(weights, d, low);
}

Routing route(const ExpertsSpec& spec, const at::Tensor& logits) {
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Routing routing;
  routing.scores = at::softmax(logits, -1, wide);
  routing.chosen = std::get<1>(at::sort(routing.scores.detach(), true, -1, true)).narrow(1, 0, spec.per_token);
  routing.chosen = routing.chosen.contiguous();
  at::Tensor weights = routing.scores.gather(1, routing.chosen);
  if (spec.normalised) weights = weights / weights.sum(-1, true);
  if (spec.rounded) weights = weights.to(logits.scalar_type()).to(wide);
  routing.weights = weights;
  return routing;
}

at::Tensor route_backward(const ExpertsSpec& spec, const Routing& routing, const at::Tensor& d_weights) {
  at::Tensor d_chosen = d_weights;
  if (spec.normalised) {
    const at::Tensor chosen = routing.scores.gather(1, routing.chosen), sum = chosen.sum(-1, true);
    d_chosen = (d_weights - (d_weights * chosen).sum(-1, true) / sum) / sum;
  }
  const at::Tensor d_scores = at::zeros_like(routing.scores).scatter_(1, routing.chosen, d_chosen);
  return routing.scores * (d_scores - (routing.scores * d_scores).sum(-1, true));
}

Assignment assign(const ExpertsSpec& spec, const at::Tensor& chosen) {
  const at::Tensor host = chosen.to(at::kCPU).contiguous();
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
  assignment.places = places.to(chosen.device());
  assignment.tokens = assignment.places.div(spec.per_token, "floor");
  return assignment;
}

}  // namespace tierflow::models
