#include "runtime/models/experts.h"

#include <ATen/ATen.h>

#include "runtime/models/ops.h"

namespace tierflow::models {
namespace {

// The part of `all` that belongs to an expert.
Tensor of_expert(const Tensor& all, const Assignment& assignment, std::int64_t expert) {
  return all.narrow(0, assignment.begin[static_cast<std::size_t>(expert)], assignment.count(expert));
}

std::int64_t tokens_of(const Assignment& assignment, std::int64_t begin, std::int64_t end) {
  return assignment.begin[static_cast<std::size_t>(end)] - assignment.begin[static_cast<std::size_t>(begin)];
}

void reserve(const Tensor& like, std::int64_t rows, std::int64_t words, std::int64_t wide_words) {
  const std::int64_t size = static_cast<std::int64_t>(like.element_size());
  at::empty({rows * (words * size + wide_words * std::max<std::int64_t>(size, 4))}, like.options().dtype(at::kByte));
}

}  // namespace

Experts::Experts(const ModelSpec& spec, int stage)
    : activation_(spec.config.activation), width_(spec.config.experts.width) {
  const StageSpec& of = spec.stages.at(static_cast<std::size_t>(stage));
  const DecoderNames& names = spec.config.names;
  const TensorIndex index(spec, stage);
  first_ = of.first_expert;
  count_ = of.experts;
  if (!names.stacked_in.empty()) {
    stacked_in_ = index.at(names.stacked_in);
    stacked_down_ = index.at(names.stacked_down);
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
  const auto here = static_cast<std::size_t>(expert - first_);
  const auto at = [&](int position) { return tensors[static_cast<std::size_t>(position)]; };
  if (stacked_in_ < 0) return {.gate = at(gate_[here]), .up = at(up_[here]), .down = at(down_[here])};
  Matrices matrices;
  if (const Tensor in = at(stacked_in_); in.defined()) {
    const Tensor both = in.select(0, expert - first_);
    matrices.gate = both.narrow(0, 0, width_);
    matrices.up = both.narrow(0, width_, width_);
  }
  if (const Tensor down = at(stacked_down_); down.defined()) matrices.down = down.select(0, expert - first_);
  return matrices;
}

Experts::Kept Experts::expand(const Weights& weights, const Tensor& normed, const Assignment& assignment,
                              std::int64_t begin, std::int64_t end) const {
  if (at::GradMode::is_enabled()) {
    std::vector<Tensor> gates, ups;
    for (std::int64_t expert = begin; expert < end; ++expert) {
      const Tensor x = normed.index_select(0, of_expert(assignment.tokens, assignment, expert));
      const Matrices matrices = of(weights, expert);
      gates.push_back(at::linear(x, matrices.gate));
      ups.push_back(at::linear(x, matrices.up));
    }
    return {.gate = at::cat(gates), .up = at::cat(ups)};
  }
  const std::int64_t rows = tokens_of(assignment, begin, end);
  Kept kept{.gate = at::empty({rows, width_}, normed.options()), .up = at::empty({rows, width_}, normed.options())};
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor x = normed.index_select(0, of_expert(assignment.tokens, assignment, expert));
    const Matrices matrices = of(weights, expert);
    Tensor gate = kept.gate.narrow(0, row, count), up = kept.up.narrow(0, row, count);
    at::mm_out(gate, x, matrices.gate.t());
    at::mm_out(up, x, matrices.up.t());
  }
  return kept;
}

void Experts::contract(const Weights& weights, const Kept& kept, const Routing& routing, const Assignment& assignment,
                       std::int64_t begin, std::int64_t end, const Tensor& sum) const {
  const Tensor flat = routing.weights.flatten();
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor inner = gated(kept.gate.narrow(0, row, count), kept.up.narrow(0, row, count), activation_);
    const Tensor result = at::linear(inner, of(weights, expert).down).to(sum.scalar_type());
    const Tensor weight = flat.index_select(0, of_expert(assignment.places, assignment, expert));
    sum.index_add_(0, of_expert(assignment.tokens, assignment, expert), result * weight.unsqueeze(1));
  }
}

void Experts::backward(const Weights& weights, const Gradients& sums, const Tensor& normed, Kept kept,
                       const Routing& routing, const Assignment& assignment, std::int64_t begin, std::int64_t end,
                       const Tensor& d_out, const Tensor& d_normed, const Tensor& d_weights) const {
  const Tensor flat = routing.weights.flatten(), d_flat = d_weights.flatten();
  for (std::int64_t expert = begin, row = 0; expert < end; row += assignment.count(expert++)) {
    const std::int64_t count = assignment.count(expert);
    if (count == 0) continue;
    const Tensor tokens = of_expert(assignment.tokens, assignment, expert);
    const Tensor places = of_expert(assignment.places, assignment, expert);
    const Tensor weight = flat.index_select(0, places).unsqueeze(1);
    const Matrices matrices = of(weights, expert), gradients = of(sums, expert);
    const Tensor d = d_out.index_select(0, tokens);
    const Tensor unweighted = at::mm(d, matrices.down);
    Tensor inner = (unweighted * weight).to(normed.scalar_type());
    Tensor gate = kept.gate.narrow(0, row, count), up = kept.up.narrow(0, row, count);
    gated_backward(gate, up, inner, activation_);  // now gradients, and what down took
    d_flat.index_add_(0, places, (unweighted.to(weight.scalar_type()) * inner).sum(1));
    if (gradients.down.defined()) add_product(gradients.down, d, (inner * weight).to(normed.scalar_type()));
    if (gradients.gate.defined() || gradients.up.defined()) {
      const Tensor x = normed.index_select(0, tokens);
      add_product(gradients.gate, gate, x);
      add_product(gradients.up, up, x);
    }
    Tensor d_x = at::mm(gate, matrices.gate);
    d_x.addmm_(up, matrices.up);
    d_normed.index_add_(0, tokens, d_x.to(d_normed.scalar_type()));
  }
}

void Experts::add(const Weights& weights, const Tensor& normed, const Routing& routing, const Assignment& assignment,
                  const Tensor& sum) const {
  reserve(normed, normed.size(0), 2 * normed.size(1) + 3 * width_, 2 * normed.size(1));
  for (std::int64_t expert = first_; expert < end(); ++expert)
    contract(weights, expand(weights, normed, assignment, expert, expert + 1), routing, assignment, expert, expert + 1,
             sum);
}

void Experts::add_backward(const Weights& weights, const Gradients& sums, const Tensor& normed, const Routing& routing,
                           const Assignment& assignment, const Tensor& d_out, const Tensor& d_normed,
                           const Tensor& d_weights) const {
  reserve(normed, normed.size(0), 3 * normed.size(1) + 7 * width_, normed.size(1) + 2 * width_);
  for (std::int64_t expert = first_; expert < end(); ++expert)
    backward(weights, sums, normed, expand(weights, normed, assignment, expert, expert + 1), routing, assignment,
             expert, expert + 1, d_out, d_normed, d_weights);
}

}  // namespace tierflow::models
