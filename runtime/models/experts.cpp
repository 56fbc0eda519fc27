#include "runtime/models/experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

#include "runtime/models/ops.h"
#include "runtime/models/products.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/expert_parameters.h"

namespace tierflow::models {
namespace {

// The part of `all` that belongs to an expert.
Tensor of_expert(const Tensor& all, const Assignment& assignment, std::int64_t expert) {
  return all.narrow(0, assignment.begin[static_cast<std::size_t>(expert)], assignment.count(expert));
}

std::int64_t tokens_of(const Assignment& assignment, std::int64_t begin, std::int64_t end) {
  return assignment.begin[static_cast<std::size_t>(end)] - assignment.begin[static_cast<std::size_t>(begin)];
}

// Of each token of an expert its weight, [tokens, 1].
Tensor weights_of_expert(const Routing& routing, const Assignment& assignment, std::int64_t expert) {
  return routing.weights.flatten().index_select(0, of_expert(assignment.places, assignment, expert)).unsqueeze(1);
}

void reserve(const Tensor& like, std::int64_t rows, std::int64_t words, std::int64_t wide_words) {
  const std::int64_t size = static_cast<std::int64_t>(like.element_size());
  at::empty({rows * (words * size + wide_words * std::max<std::int64_t>(size, 4))}, like.options().dtype(at::kByte));
}

}  // namespace

Experts::Experts(const ModelSpec& spec, int stage)
    : Experts(spec, spec.stages.at(static_cast<std::size_t>(stage)).units, TensorIndex(spec, stage),
              spec.stages.at(static_cast<std::size_t>(stage)).first_expert,
              spec.stages.at(static_cast<std::size_t>(stage)).experts) {}

// The tensors of all these units lie in the same order.
Experts Experts::on_demand(const ModelSpec& spec, int stage) {
  const int unit = spec.stages.at(static_cast<std::size_t>(stage)).on_demand.front();
  Experts experts(spec, {unit}, TensorIndex(spec.units.at(static_cast<std::size_t>(unit))), 0, 1);
  experts.alone_ = true;
  return experts;
}

Experts::Experts(const ModelSpec& spec, const std::vector<int>& units, const TensorIndex& index, std::int64_t first,
                 std::int64_t count)
    : activation_(spec.config.activation), spec_(spec.config.experts), first_(first), count_(count) {
  const DecoderNames& names = spec.config.names;
  in_adapter_ = ExpertAdapter(index, expert_module(spec.config), kExpertsIn);
  down_adapter_ = ExpertAdapter(index, expert_module(spec.config), kExpertsDown);
  std::ptrdiff_t factors = 0;
  for (const int unit : units)
    factors += std::ranges::count_if(spec.units[static_cast<std::size_t>(unit)].tensors, is_expert_adapter);
  if (factors != (in_adapter_ ? 2 : 0) + (down_adapter_ ? 2 : 0))
    throw std::logic_error("experts from " + std::to_string(first) + " on have an adapter that nothing uses");
  if (!names.stacked_in.empty()) {
    stacked_in_ = index.at(names.stacked_in);
    stacked_down_ = index.at(names.stacked_down);
    if (!spec_.biases) return;
    in_bias_ = index.at(names.stacked_in + "_bias");
    down_bias_ = index.at(names.stacked_down + "_bias");
    return;
  }
  for (std::int64_t expert = first_; expert < end(); ++expert) {
    const std::string name = names.expert + "." + std::to_string(expert) + ".";
    gate_.push_back(index.at(name + names.expert_gate + ".weight"));
    up_.push_back(index.at(name + names.expert_up + ".weight"));
    down_.push_back(index.at(name + names.expert_down + ".weight"));
  }
}

Experts::Matrices Experts::of(const std::vector<Tensor>& tensors, std::int64_t expert) const {
  const std::int64_t here = alone_ ? 0 : expert - first_;
  const auto at = [&](int position) { return at_position(tensors, position); };
  const auto one = [&](int position) {
    const Tensor all = position < 0 ? Tensor() : at(position);
    return all.defined() ? all.select(0, here) : all;
  };
  Matrices matrices{.in = in_adapter_.of(tensors, here), .of_down = down_adapter_.of(tensors, here)};
  if (stacked_in_ < 0) {
    const auto place = static_cast<std::size_t>(here);
    matrices.gate = at(gate_[place]);
    matrices.up = at(up_[place]);
    matrices.down = at(down_[place]);
    return matrices;
  }
  const Tensor in = one(stacked_in_), down = one(stacked_down_);
  matrices.down = spec_.transposed && down.defined() ? down.t() : down;
  if (spec_.transposed) {
    matrices.both = in.defined() ? in.t() : in;
    matrices.both_bias = one(in_bias_);
    matrices.down_bias = one(down_bias_);
  } else if (in.defined()) {
    matrices.gate = in.narrow(0, 0, spec_.width);
    matrices.up = in.narrow(0, spec_.width, spec_.width);
  }
  return matrices;
}

// Of an expert's adapter of gate and up the rows of B for one of them.
Tensor Experts::half_of(const ExpertFactors& in, std::int64_t which) const {
  return in.b.defined() ? in.b.narrow(0, which * spec_.width, spec_.width) : in.b;
}

// Columns of gate (0) or up (1).
Tensor Experts::part_of(const Tensor& both, std::int64_t which) const {
  return spec_.by_turns ? both.slice(1, which, std::nullopt, 2) : both.narrow(1, which * spec_.width, spec_.width);
}

// What the expert takes of its tokens.
Tensor Experts::taken(const Tensor& normed, const Routing& routing, const Assignment& assignment,
                      std::int64_t expert) const {
  const Tensor x = normed.index_select(0, of_expert(assignment.tokens, assignment, expert));
  return spec_.weights_of_input ? (x * weights_of_expert(routing, assignment, expert)).to(x.scalar_type()) : x;
}

Tensor Experts::between(const Tensor& gate, const Tensor& up) const {
  return spec_.clamped.sharpness > 0 ? gated(gate, up, spec_.clamped) : gated(gate, up, activation_);
}

// sum += d^T x of a matrix that gave what d is the gradient of and took x; as rows lie in memory.
void Experts::add_gradient(const Gradients& sums, const Tensor& sum, const Tensor& d, const Tensor& x) const {
  if (!sum.defined()) return;
  if (spec_.transposed)
    sums.add_product(sum.t(), x, d);
  else
    sums.add_product(sum, d, x);
}

Experts::Kept Experts::expand(const Weights& weights, const Tensor& normed, const Routing& routing,
                              const Assignment& assignment, std::int64_t begin, std::int64_t end) const {
  if (at::GradMode::is_enabled()) {
    std::vector<Tensor> gates, ups;
    for (std::int64_t expert = begin; expert < end; ++expert) {
      const Tensor x = taken(normed, routing, assignment, expert);
      const Matrices matrices = of(weights, expert);
      const Tensor low = matrices.in.low(x);
      if (matrices.both.defined()) {
        const Tensor both = with_product(linear_map(x, matrices.both, matrices.both_bias), low, matrices.in.b);
        gates.push_back(part_of(both, 0));
        ups.push_back(part_of(both, 1));
        continue;
      }
      gates.push_back(with_product(linear_map(x, matrices.gate), low, half_of(matrices.in, 0)));
      ups.push_back(with_product(linear_map(x, matrices.up), low, half_of(matrices.in, 1)));
    }
    return {.gate = at::cat(gates), .up = at::cat(ups)};
  }
  const std::int64_t rows = tokens_of(assignment, begin, end);
  Kept kept{.gate = at::empty({rows, spec_.width}, normed.options()),
            .up = at::empty({rows, spec_.width}, normed.options())};
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor x = taken(normed, routing, assignment, expert);
    const Matrices matrices = of(weights, expert);
    const Tensor low = matrices.in.low(x);
    Tensor gate = kept.gate.narrow(0, row, count), up = kept.up.narrow(0, row, count);
    if (matrices.both.defined()) {
      const Tensor both = with_product(linear_map(x, matrices.both, matrices.both_bias), low, matrices.in.b);
      gate.copy_(part_of(both, 0));
      up.copy_(part_of(both, 1));
      continue;
    }
    matrix_product_into(gate, x, matrices.gate.t());
    matrix_product_into(up, x, matrices.up.t());
    if (!low.defined()) continue;
    gate.add_(linear_map(low, half_of(matrices.in, 0)));
    up.add_(linear_map(low, half_of(matrices.in, 1)));
  }
  return kept;
}

void Experts::contract(const Weights& weights, const Kept& kept, const Routing& routing, const Assignment& assignment,
                       std::int64_t begin, std::int64_t end, const Tensor& sum) const {
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor inner = between(kept.gate.narrow(0, row, count), kept.up.narrow(0, row, count));
    const Matrices matrices = of(weights, expert);
    const Tensor result = with_product(linear_map(inner, matrices.down, matrices.down_bias),
                                       matrices.of_down.low(inner), matrices.of_down.b)
                              .to(sum.scalar_type());
    sum.index_add_(0, of_expert(assignment.tokens, assignment, expert),
                   spec_.weights_of_input ? result : result * weights_of_expert(routing, assignment, expert));
  }
}

// Of the gradients of gate and up, that of low().
Tensor Experts::low_gradient(const ExpertFactors& in, const Tensor& d_gate, const Tensor& d_up) const {
  if (!in) return {};
  Tensor d_low = matrix_product(d_gate, half_of(in, 0));
  add_matrix_product(d_low, d_up, half_of(in, 1));
  return d_low.mul_(in.scale);
}

// The gradient of what the expert took, which `taken` gives; adds those of the matrices that took it.
template <class Taken>
Tensor Experts::backward_in(const Gradients& sums, const Matrices& matrices, const Matrices& gradients, Taken taken,
                            const Tensor& d_gate, const Tensor& d_up) const {
  Tensor d_both;
  if (matrices.both.defined())
    d_both = spec_.by_turns ? at::stack({d_gate, d_up}, 2).flatten(1) : at::cat({d_gate, d_up}, 1);
  const ExpertFactors& factors = matrices.in;
  const Tensor d_low = d_both.defined() ? factors.low_gradient(d_both) : low_gradient(factors, d_gate, d_up);
  if (gradients.gate.defined() || gradients.up.defined() || gradients.both.defined() || factors) {
    const Tensor x = taken();
    add_gradient(sums, gradients.gate, d_gate, x);
    add_gradient(sums, gradients.up, d_up, x);
    add_gradient(sums, gradients.both, d_both, x);
    if (factors) {
      const Tensor low = factors.low(x);
      sums.add_product(gradients.in.a, d_low, x);
      if (d_both.defined()) {
        sums.add_product(gradients.in.b, d_both, low);
      } else {
        sums.add_product(half_of(gradients.in, 0), d_gate, low);
        sums.add_product(half_of(gradients.in, 1), d_up, low);
      }
    }
  }
  if (d_both.defined()) add_rows(gradients.both_bias, d_both);
  Tensor d_x = d_both.defined() ? matrix_product(d_both, matrices.both) : matrix_product(d_gate, matrices.gate);
  if (!d_both.defined()) add_matrix_product(d_x, d_up, matrices.up);
  if (factors) add_matrix_product(d_x, d_low, factors.a);
  return d_x;
}

void Experts::backward(const Weights& weights, const Gradients& sums, const Tensor& normed, Kept kept,
                       const Routing& routing, const Assignment& assignment, std::int64_t begin, std::int64_t end,
                       const Tensor& d_out, const Tensor& d_normed, const Tensor& d_weights) const {
  const Tensor d_flat = d_weights.flatten();
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor tokens = of_expert(assignment.tokens, assignment, expert);
    const Tensor places = of_expert(assignment.places, assignment, expert);
    const Tensor weight = weights_of_expert(routing, assignment, expert);
    const auto weighted = [&](const Tensor& result) { return spec_.weights_of_input ? result : result * weight; };
    const Matrices matrices = of(weights, expert), gradients = of(sums.tensors(), expert);
    const Tensor d = d_out.index_select(0, tokens);
    Tensor unweighted = matrix_product(d, matrices.down);
    const Tensor d_low = matrices.of_down.low_gradient(d);
    if (d_low.defined()) add_matrix_product(unweighted, d_low, matrices.of_down.a);
    Tensor inner = weighted(unweighted).to(normed.scalar_type());
    Tensor gate = kept.gate.narrow(0, row, count), up = kept.up.narrow(0, row, count);
    // Now gradients, and what down took.
    if (spec_.clamped.sharpness > 0)
      gated_backward(gate, up, inner, spec_.clamped);
    else
      gated_backward(gate, up, inner, activation_);
    if (!spec_.weights_of_input) {
      Tensor d_weight = (unweighted.to(weight.scalar_type()) * inner).sum(1);
      if (matrices.down_bias.defined()) d_weight.add_((d.to(weight.scalar_type()) * matrices.down_bias).sum(1));
      d_flat.index_add_(0, places, d_weight);
    }
    if (gradients.down_bias.defined()) add_rows(gradients.down_bias, weighted(d));
    if (gradients.down.defined() || d_low.defined()) {
      const Tensor for_sums = weighted(inner).to(normed.scalar_type());
      add_gradient(sums, gradients.down, d, for_sums);
      if (d_low.defined()) {
        sums.add_product(gradients.of_down.a, d_low, for_sums);
        sums.add_product(gradients.of_down.b, d, matrices.of_down.low(for_sums));
      }
    }
    Tensor d_x = backward_in(
                     sums, matrices, gradients, [&] { return taken(normed, routing, assignment, expert); }, gate, up)
                     .to(d_normed.scalar_type());
    if (spec_.weights_of_input) {
      d_flat.index_add_(0, places, (d_x * normed.index_select(0, tokens)).sum(1));
      d_x = d_x * weight;
    }
    d_normed.index_add_(0, tokens, d_x);
  }
}

// What adapters take more of, for each token of an expert: two low() of each, a product with B and a sum.
std::int64_t Experts::adapter_words(const Weights& weights, std::int64_t hidden) const {
  std::int64_t words = 0;
  for (const ExpertFactors& factors : {in_adapter_.of(weights, 0), down_adapter_.of(weights, 0)})
    if (factors) words += 2 * (factors.a.size(0) + std::max(2 * spec_.width, hidden));
  return words;
}

void Experts::add(const Weights& weights, const Tensor& normed, const Routing& routing, const Assignment& assignment,
                  const Tensor& sum) const {
  add(weights, normed, routing, assignment, first_, end(), sum);
}

void Experts::add(const Weights& weights, const Tensor& normed, const Routing& routing, const Assignment& assignment,
                  std::int64_t begin, std::int64_t end, const Tensor& sum) const {
  const std::int64_t clamped = spec_.clamped.sharpness > 0 ? 1 : 0, joined = spec_.transposed ? 2 : 0;
  reserve(normed, normed.size(0),
          2 * normed.size(1) + (3 + joined + clamped) * spec_.width + adapter_words(weights, normed.size(1)),
          2 * normed.size(1));
  for (std::int64_t expert = begin; expert < end; ++expert)
    contract(weights, expand(weights, normed, routing, assignment, expert, expert + 1), routing, assignment, expert,
             expert + 1, sum);
}

void Experts::add_backward(const Weights& weights, const Gradients& sums, const Tensor& normed, const Routing& routing,
                           const Assignment& assignment, const Tensor& d_out, const Tensor& d_normed,
                           const Tensor& d_weights) const {
  const std::int64_t clamped = spec_.clamped.sharpness > 0 ? 1 : 0, biased = spec_.biases ? 1 : 0,
                     joined = spec_.transposed ? 2 : 0, of_input = spec_.weights_of_input ? 1 : 0;
  reserve(normed, normed.size(0),
          (3 + of_input) * normed.size(1) + (7 + joined) * spec_.width + adapter_words(weights, normed.size(1)),
          (1 + 2 * biased + of_input) * normed.size(1) + (2 + 6 * clamped) * spec_.width);
  for (std::int64_t expert = first_; expert < end(); ++expert)
    backward(weights, sums, normed, expand(weights, normed, routing, assignment, expert, expert + 1), routing,
             assignment, expert, expert + 1, d_out, d_normed, d_weights);
}

}  // namespace tierflow::models
