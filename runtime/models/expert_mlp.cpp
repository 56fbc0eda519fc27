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
  const auto in = gate_.incoming(weights, d_gate);
  gate_.add_gradient(weights, sums, d_gate, normed, in);
  Tensor d_normed = mlp_.backward(weights, sums, normed, std::move(kept.mlp), d_out * share);
  gate_.add_input_gradient(weights, d_normed, d_gate, in);
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
      block_(spec.stages.at(static_cast<std::size_t>(stage)).block),
      router_(spec.config.experts, TensorIndex(spec, stage), spec.config.names.router),
      shared_(spec, TensorIndex(spec, stage)),
      experts_(spec, stage) {}

ExpertMlp::Kept ExpertMlp::expand(const Weights& weights, const Tensor& normed, double dropout,
                                  const RouterWatch& watch) const {
  Kept kept{.logits = router_.logits(weights, normed)};
  kept.routing = router_.route(weights, kept.logits);
  balance_routing(kept.routing, watch.balance);
  kept.assignment = assign(spec_, kept.routing.chosen);
  tell(kept.assignment, block_, watch.touched);
  kept.experts = experts_.expand(weights, normed, kept.routing, kept.assignment, 0, spec_.count);
  if (shared_) kept.shared = shared_.expand(weights, normed, dropout);
  return kept;
}

Tensor ExpertMlp::contract(const Weights& weights, const Kept& kept, double dropout) const {
  const at::ScalarType wide = kept.routing.scores.scalar_type();
  const Tensor sum = shared_ ? shared_.contract(weights, kept.shared, dropout).to(wide)
                             : at::zeros({kept.logits.size(0), hidden_}, kept.logits.options().dtype(wide));
  experts_.contract(weights, kept.experts, kept.routing, kept.assignment, 0, spec_.count, sum);
  return sum.to(kept.experts.gate.scalar_type());
}

Tensor ExpertMlp::backward(const Weights& weights, const Gradients& sums, const Tensor& normed, Kept kept,
                           const Tensor& d_out, const RouterBalance* balance) const {
  const Tensor d_weights = at::zeros_like(kept.routing.weights);
  const Tensor d_normed = at::zeros(normed.sizes(), kept.routing.scores.options());
  experts_.backward(weights, sums, normed, std::exchange(kept.experts, {}), kept.routing, kept.assignment, 0,
                    spec_.count, d_out, d_normed, d_weights);
  const Tensor d_logits = route_backward(spec_, kept.routing, d_weights, balance);
  d_normed.add_(router_.backward(weights, sums, d_logits, normed));
  if (shared_) d_normed.add_(shared_.backward(weights, sums, normed, std::move(kept.shared), d_out));
  return d_normed.to(normed.scalar_type());
}

std::vector<Tensor> ExpertMlp::essentials(const Kept& kept) const {
  std::vector<Tensor> tensors{kept.logits, kept.experts.gate, kept.experts.up};
  shared_.add_essentials(kept.shared, tensors);
  return tensors;
}

ExpertMlp::Kept ExpertMlp::restore(const Weights& weights, std::vector<Tensor>::const_iterator& next) const {
  Kept kept{.logits = *next++};
  kept.routing = router_.route(weights, kept.logits);
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
      block_(spec.stages.at(static_cast<std::size_t>(stage)).block),
      experts_(spec.stages.at(static_cast<std::size_t>(stage)).on_demand.empty() ? Experts(spec, stage)
                                                                                 : Experts::on_demand(spec, stage)) {
  const TensorIndex index(spec, stage);
  const ModelConfig& c = spec.config;
  const StageSpec& of = spec.stages.at(static_cast<std::size_t>(stage));
  first_ = of.first_expert == 0;
  last_ = of.first_expert + of.experts == spec_.count;
  if (!first_) return;
  in_ = Norm(c.norm, c.norm_eps, index, c.names.mlp_norm);
  router_ = Router(spec_, index, c.names.router);
  shared_ = SharedExpert(spec, index);
}

ExpertStage::Begun ExpertStage::begun(const Weights& weights, const Tensor& x, double dropout,
                                      RouterBalance* balance) const {
  Begun begun{.normed = in_(weights, x.reshape({-1, hidden_}))};
  begun.routing = router_.route(weights, router_.logits(weights, begun.normed));
  balance_routing(begun.routing, balance);
  const at::TensorOptions wide = x.options().dtype(wide_of(x));
  begun.sum = shared_
                  ? shared_.contract(weights, shared_.expand(weights, begun.normed, dropout), dropout).to(wide.dtype())
                  : at::zeros(begun.normed.sizes(), wide);
  return begun;
}

Tensor ExpertStage::finished(const Tensor& x, const Tensor& sum) const {
  const Tensor added = sum.to(x.scalar_type()).view(x.sizes());
  return x + (residual_multiplier_ == 1 ? added : added * residual_multiplier_);
}

Carry ExpertStage::forward(const Weights& weights, const Carry& carry, double dropout, const RouterWatch& watch) const {
  const Tensor& x = carry.at(0);
  const auto& [normed, sum, routing] =
      first_ ? begun(weights, x, dropout, watch.balance)
             : Begun{.normed = carry.at(1),
                     .sum = carry.at(4).clone(),
                     .routing = {.scores = {}, .chosen = carry.at(3), .weights = carry.at(2)}};
  const Assignment assignment = assign(spec_, routing.chosen);
  tell(assignment, block_, watch.touched);
  experts_.add(weights, normed, routing, assignment, sum);
  if (!last_) return {x, normed, routing.weights, routing.chosen, sum};
  return {finished(x, sum)};
}

class ExpertStage::InParts final : public StageInParts {
 public:
  InParts(const ExpertStage& stage, Tensor x, Begun begun)
      : stage_(stage),
        x_(std::move(x)),
        begun_(std::move(begun)),
        assignment_(assign(stage.spec_, begun_.routing.chosen)) {}

  std::vector<int> needed() const override {
    std::vector<int> experts;
    for (std::int64_t expert = 0; expert < stage_.spec_.count; ++expert)
      if (assignment_.count(expert) != 0) experts.push_back(static_cast<int>(expert));
    return experts;
  }
  void add(int position, const Weights& weights) override {
    if (assignment_.count(position) != 0)
      stage_.experts_.add(weights, begun_.normed, begun_.routing, assignment_, position, position + 1, begun_.sum);
  }
  Carry finish() override { return {stage_.finished(x_, begun_.sum)}; }

 private:
  const ExpertStage& stage_;
  const Tensor x_;
  const Begun begun_;
  const Assignment assignment_;
};

std::unique_ptr<StageInParts> ExpertStage::begin(const Weights& weights, const Tensor& x) const {
  return std::make_unique<InParts>(*this, x, begun(weights, x, 0, nullptr));
}

Carry ExpertStage::backward(const Weights& weights, const Gradients& sums, const Carry& taken, const Carry& d_out,
                            const RouterBalance* balance) const {
  const Tensor& d_x = d_out.at(0);
  const at::TensorOptions wide = d_x.options().dtype(wide_of(d_x));
  Tensor x, normed;
  Norm::Kept norm;
  Routing routing;
  if (first_) {
    x = taken.at(0).reshape({-1, hidden_});
    normed = in_(weights, x, &norm);
    routing = router_.route(weights, router_.logits(weights, normed));
  } else {
    normed = taken.at(0);
    routing = {.scores = {}, .chosen = taken.at(2), .weights = taken.at(1)};
  }
  Tensor d_sum, d_normed, d_weights;
  if (last_) {
    d_sum = d_x.reshape({-1, hidden_}).to(wide.dtype());
    if (residual_multiplier_ != 1) d_sum = d_sum * residual_multiplier_;
    d_normed = at::zeros(normed.sizes(), wide);
    d_weights = at::zeros(routing.weights.sizes(), wide);
  } else {
    d_normed = d_out.at(1).clone();
    d_weights = d_out.at(2).clone();
    d_sum = d_out.at(4);
  }
  const Tensor d_added = d_sum.to(normed.scalar_type());
  experts_.add_backward(weights, sums, normed, routing, assign(spec_, routing.chosen), d_added, d_normed, d_weights);
  if (!first_) return {d_x, d_normed, d_weights, {}, d_sum};
  d_normed.add_(router_.backward(weights, sums, route_backward(spec_, routing, d_weights, balance), normed));
  if (shared_) d_normed.add_(shared_.backward(weights, sums, normed, shared_.expand(weights, normed), d_added));
  return {in_.backward(weights, sums, d_normed.to(x.scalar_type()), x, norm, d_x.reshape({-1, hidden_}).contiguous())
              .view(d_x.sizes())};
}

Carry ExpertStage::completed(const Carry& taken, const Carry& d_out) const {
  if (first_) return taken;
  const Tensor &d_x = d_out.at(0), &normed = taken.at(0);
  return {at::zeros_like(d_x), normed, taken.at(1), taken.at(2),
          at::zeros(normed.sizes(), normed.options().dtype(wide_of(normed)))};
}

}  // namespace tierflow::models
