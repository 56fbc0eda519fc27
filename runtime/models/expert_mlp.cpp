#include "runtime/models/expert_mlp.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

at::ScalarType wide_of(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

SharedExpert::SharedExpert(const ModelSpec& spec, const TensorIndex& index) {
  const std::string& name = spec.config.names.shared;
  if (spec.config.experts.shared_width == 0 || index.find(name + ".down_proj.weight") < 0) return;
  mlp_ = GatedMlp(index, {.gate = name + ".gate_proj", .up = name + ".up_proj", .down = name + ".down_proj"},
                  spec.config.activation);
  if (spec.config.experts.shared_gate) gate_ = Linear(index, spec.config.names.shared_gate);
}

SharedExpert::Kept SharedExpert::expand(const Weights& weights, const Tensor& normed, double dropout) const {
  return {.mlp = mlp_.expand(weights, normed, dropout), .gate = gate_ ? gate_(weights, normed, dropout) : Tensor()};
}

Tensor SharedExpert::contract(const Weights& weights, const Kept& kept, double dropout) const {
  const Tensor result = mlp_.contract(weights, kept.mlp, dropout);
  return gate_ ? at::sigmoid(kept.gate) * result : result;
}

Tensor SharedExpert::backward(const Weights& weights, const Gradients& sums, const Tensor& normed, Kept kept,
                              const Tensor& d_out) const {
  if (!gate_) return mlp_.backward(weights, sums, normed, std::move(kept.mlp), d_out);
  const Tensor wide = d_out.to(wide_of(d_out)), share = at::sigmoid(kept.gate);
  const Tensor d_share = (wide * mlp_.contract(weights, kept.mlp)).sum(-1, true);
  const Tensor open = share.to(wide.scalar_type());
  const Tensor d_gate = (d_share * open * (1 - open)).to(d_out.scalar_type());
  const Tensor low = gate_.low_gradient(weights, d_gate);
  gate_.add_gradient(weights, sums, d_gate, normed, low);
  Tensor d_normed = mlp_.backward(weights, sums, normed, std::move(kept.mlp), d_out * share);
  gate_.add_input_gradient(weights, d_normed, d_gate, low);
  return d_normed;
}

void SharedExpert::add_essentials(const Kept& kept, std::vector<Tensor>& tensors) const {
  if (!mlp_) return;
  for (const Tensor& tensor : mlp_.essentials(kept.mlp)) tensors.push_back(tensor);
  if (gate_) tensors.push_back(kept.gate);
}

SharedExpert::Kept SharedExpert::restore(std::vector<Tensor>::const_iterator& next) const {
  Kept kept;
  if (!mlp_) return kept;
  kept.mlp = mlp_.restore(next);
  if (gate_) kept.gate = *next++;
  return kept;
}

ExpertMlp::ExpertMlp(const ModelSpec& spec, int stage)
    : spec_(spec.config.experts),
      hidden_(spec.config.hidden_size),
      router_(TensorIndex(spec, stage), spec.config.names.router),
      shared_(spec, TensorIndex(spec, stage)),
      experts_(spec, stage) {}

ExpertMlp::Kept ExpertMlp::expand(const Weights& weights, const Tensor& normed, double dropout) const {
  Kept kept{.logits = router_.logits(weights, normed)};
  kept.routing = route(spec_, kept.logits);
  kept.assignment = assign(spec_, kept.routing.chosen);
  kept.experts = experts_.expand(weights, normed, kept.assignment, 0, spec_.count);
  if (shared_) kept.shared = shared_.expand(weights, normed, dropout);
  return kept;
}

Tensor ExpertMlp::contract(const Weights& weights, const Kept& kept, double dropout) const {
  const at::ScalarType wide = wide_of(kept.logits);
  const Tensor sum = shared_ ? shared_.contract(weights, kept.shared, dropout).to(wide)
                             : at::zeros({kept.logits.size(0), hidden_}, kept.logits.options().dtype(wide));
  experts_.contract(weights, kept.experts, kept.routing, kept.assignment, 0, spec_.count, sum);
  return sum.to(kept.logits.scalar_type());
}

Tensor ExpertMlp::backward(const Weights& weights, const Gradients& sums, const Tensor& normed, Kept kept,
                           const Tensor& d_out) const {
  const Tensor d_weights = at::zeros_like(kept.routing.weights);
  const Tensor d_normed = at::zeros(normed.sizes(), kept.routing.scores.options());
  experts_.backward(weights, sums, normed, std::exchange(kept.experts, {}), kept.routing, kept.assignment, 0,
                    spec_.count, d_out, d_normed, d_weights);
  const Tensor d_logits = route_backward(spec_, kept.routing, d_weights);
  d_normed.add_(router_.backward(weights, sums, d_logits, normed));
  if (shared_) d_normed.add_(shared_.backward(weights, sums, normed, std::move(kept.shared), d_out));
  return d_normed.to(normed.scalar_type());
}

std::vector<Tensor> ExpertMlp::essentials(const Kept& kept) const {
  std::vector<Tensor> tensors{kept.logits, kept.experts.gate, kept.experts.up};
  shared_.add_essentials(kept.shared, tensors);
  return tensors;
}

ExpertMlp::Kept ExpertMlp::restore(std::vector<Tensor>::const_iterator& next) const {
  Kept kept{.logits = *next++};
  kept.routing = route(spec_, kept.logits);
  kept.assignment = assign(spec_, kept.routing.chosen);
  kept.experts.gate = *next++;
  kept.experts.up = *next++;
  kept.shared = shared_.restore(next);
  return kept;
}

ExpertStage::ExpertStage(const ModelSpec& spec, int stage)
    : spec_(spec.config.experts),
      residual_multiplier_(spec.config.residual_multiplier),
      hidden_(spec.config.hidden_size),
      experts_(spec, stage) {
  const TensorIndex index(spec, stage);
  const ModelConfig& c = spec.config;
  first_ = experts_.begin() == 0;
  last_ = experts_.end() == spec_.count;
  if (!first_) return;
  in_ = Norm(c.norm, c.norm_eps, index, c.names.mlp_norm);
  router_ = Router(index, c.names.router);
  shared_ = SharedExpert(spec, index);
}

Carry ExpertStage::forward(const Weights& weights, const Carry& carry, double dropout) const {
  const Tensor& x = carry.at(0);
  Tensor normed, logits, sum;
  if (first_) {
    normed = in_(weights, x.reshape({-1, hidden_}));
    logits = router_.logits(weights, normed);
    const at::TensorOptions wide = x.options().dtype(wide_of(x));
    sum = shared_ ? shared_.contract(weights, shared_.expand(weights, normed, dropout), dropout).to(wide.dtype())
                  : at::zeros(normed.sizes(), wide);
  } else {
    normed = carry.at(1);
    logits = carry.at(2);
    sum = carry.at(3).clone();
  }
  const Routing routing = route(spec_, logits);
  experts_.add(weights, normed, routing, assign(spec_, routing.chosen), sum);
  if (!last_) return {x, normed, logits, sum};
  const Tensor added = sum.to(x.scalar_type()).view(x.sizes());
  return {x + (residual_multiplier_ == 1 ? added : added * residual_multiplier_)};
}

Carry ExpertStage::backward(const Weights& weights, const Gradients& sums, const Carry& carry,
                            const Carry& d_out) const {
  const Tensor &like = carry.at(0), x = like.reshape({-1, hidden_});
  const at::TensorOptions wide = x.options().dtype(wide_of(x));
  Norm::Kept norm;
  const Tensor normed = first_ ? in_(weights, x, &norm) : carry.at(1);
  const Tensor logits = first_ ? router_.logits(weights, normed) : carry.at(2);
  const Routing routing = route(spec_, logits);
  Tensor d_sum, d_normed, d_logits;
  if (last_) {
    d_sum = d_out.at(0).reshape({-1, hidden_}).to(wide.dtype());
    if (residual_multiplier_ != 1) d_sum = d_sum * residual_multiplier_;
    d_normed = at::zeros(normed.sizes(), wide);
    d_logits = at::zeros(logits.sizes(), wide);
  } else {
    d_normed = d_out.at(1).clone();
    d_logits = d_out.at(2);
    d_sum = d_out.at(3);
  }
  const Tensor d_added = d_sum.to(x.scalar_type()), d_weights = at::zeros_like(routing.weights);
  experts_.add_backward(weights, sums, normed, routing, assign(spec_, routing.chosen), d_added, d_normed, d_weights);
  d_logits = d_logits + route_backward(spec_, routing, d_weights);
  if (!first_) return {d_out.at(0), d_normed, d_logits, d_sum};
  d_normed.add_(router_.backward(weights, sums, d_logits, normed));
  if (shared_) d_normed.add_(shared_.backward(weights, sums, normed, shared_.expand(weights, normed), d_added));
  const Tensor d_x = d_out.at(0).reshape({-1, hidden_}).contiguous();
  return {in_.backward(weights, sums, d_normed.to(x.scalar_type()), x, norm, d_x).view(like.sizes())};
}

}  // namespace tierflow::models
