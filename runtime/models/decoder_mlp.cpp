#include "runtime/models/decoder_mlp.h"

#include <ATen/ATen.h>

namespace tierflow::models {

DecoderMlp::DecoderMlp(const ModelSpec& spec, int stage) {
  const TensorIndex index(spec, stage);
  const ModelConfig& c = spec.config;
  const DecoderNames& names = c.names;
  in_ = Norm(c.norm, c.norm_eps, index, names.mlp_norm);
  out_ = Norm(c.norm, c.norm_eps, index, names.mlp_out_norm);
  if (spec.stages.at(static_cast<std::size_t>(stage)).experts > 0)
    experts_.emplace(spec, stage);
  else
    dense_ = GatedMlp(
        index,
        {.gate = names.gate, .up = names.up, .gate_up = names.gate_up, .down = names.down, .up_first = c.up_first},
        c.activation);
}

at::Tensor DecoderMlp::forward(const Weights& weights, const at::Tensor& normed, double dropout,
                               const RouterWatch& watch) const {
  if (!experts_) return dense_.contract(weights, dense_.expand(weights, normed, dropout), dropout);
  const at::Tensor by_token = normed.reshape({-1, normed.size(-1)});
  return experts_->contract(weights, experts_->expand(weights, by_token, dropout, watch), dropout).view(normed.sizes());
}

DecoderMlp::Kept DecoderMlp::expand(const Weights& weights, const at::Tensor& normed, const RouterWatch& watch) const {
  Kept kept;
  if (experts_)
    kept.experts = experts_->expand(weights, normed, 0, watch);
  else
    kept.dense = dense_.expand(weights, normed);
  return kept;
}

at::Tensor DecoderMlp::contract(const Weights& weights, const Kept& kept) const {
  return experts_ ? experts_->contract(weights, kept.experts) : dense_.contract(weights, kept.dense);
}

at::Tensor DecoderMlp::backward(const Weights& weights, const Gradients& sums, at::Tensor normed, Kept kept,
                                const at::Tensor& d_out, const RouterWatch& watch) const {
  return experts_ ? experts_->backward(weights, sums, normed, std::move(kept.experts), d_out, watch.balance)
                  : dense_.backward(weights, sums, std::move(normed), std::move(kept.dense), d_out);
}

std::vector<at::Tensor> DecoderMlp::essentials(const Kept& kept) const {
  return experts_ ? experts_->essentials(kept.experts) : dense_.essentials(kept.dense);
}

DecoderMlp::Kept DecoderMlp::restore(const Weights& weights, std::vector<at::Tensor>::const_iterator& next) const {
  Kept kept;
  if (experts_)
    kept.experts = experts_->restore(weights, next);
  else
    kept.dense = dense_.restore(next);
  return kept;
}

}  // namespace tierflow::models
