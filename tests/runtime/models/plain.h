#pragma once
// A model by the textbook, for autograd over the whole of it.
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {

// The logits by the textbook [rows, sequence, vocab]: every stage before the head differentiable, logits whole.
inline torch::Tensor plain_logits(const ResidentModel& m, const std::vector<Weights>& units, const MicroBatch& batch,
                                  std::uint64_t seed) {
  const Shared shared = m.model->share(batch, torch::kCPU);
  Carry carry;
  int stage = 0;
  for (; m.spec().stages[static_cast<std::size_t>(stage)].kind < StageKind::norm; ++stage) {
    torch::manual_seed(seed + static_cast<std::uint64_t>(stage));
    carry = m.model->forward(stage, m.bind(stage, units), carry, shared, true);
  }
  torch::Tensor norm_weight, norm_bias;
  std::vector<torch::Tensor> output, tokens;  // tiles of one table
  for (; stage < m.stages(); ++stage) {
    const Weights head = m.bind(stage, units);
    std::size_t i = 0;
    for (int unit : m.spec().stages[static_cast<std::size_t>(stage)].units) {
      for (const TensorSpec& tensor : m.spec().units[static_cast<std::size_t>(unit)].tensors) {
        const torch::Tensor value = head[i++];
        if (tensor.name == m.spec().config.names.head) output.push_back(value);
        if (tensor.name == m.spec().units.front().tensors.front().name) tokens.push_back(value);
        if (tensor.shape.size() == 1 && tensor.name.ends_with(".weight")) norm_weight = value;
        if (tensor.shape.size() == 1 && tensor.name.ends_with(".bias")) norm_bias = value;
      }
    }
  }
  torch::Tensor x = carry[0];
  const ModelConfig& c = m.spec().config;
  if (norm_weight.defined()) {
    if (subtracts_mean(c.norm)) {
      if (c.norm == NormKind::layer_plus_one) norm_weight = norm_weight + 1;
      x = torch::layer_norm(x, {x.size(-1)}, norm_weight, norm_bias, c.norm_eps);
    } else {
      if (c.norm == NormKind::rms_plus_one) norm_weight = norm_weight + 1;
      x = x * torch::rsqrt(x.square().mean(-1, true) + c.norm_eps) * norm_weight;
    }
  }
  torch::Tensor logits = torch::matmul(x, torch::cat(output.empty() ? tokens : output).t()) * c.logits_multiplier;
  if (c.logits_softcap > 0) logits = torch::tanh(logits / c.logits_softcap) * c.logits_softcap;
  return logits;
}

}  // namespace tierflow::testing
