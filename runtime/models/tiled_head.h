#pragma once
// The head whose vocabulary comes in tiles, each a stage: first the final norm, then forward over the tiles with
// running sums of the softmax, then, from the last tile back to the first, logits again and gradients. Nothing but the
// norm's input is kept for the backward. A token's logits in one tile are those that the whole head computes.
//
// Carries: forward {normed hidden [tokens, hidden], sums [tokens, 4]}; backward {its gradient in fp32 (fp64 beside
// fp64), summed over the tiles so far, normed hidden, factors [tokens, 3]}; sums and factors as in ops.h. With a
// teacher the sums of soft_targets.h go behind the forward's, and the factors are its own; where the most likely tokens
// are wanted, their logits and ids go behind (top_logits.h). Where there is an adapter, what its A gives comes last in
// the forward (head_adapter.h), and in the backward that and its gradient, summed as the other.
#include <vector>

#include "runtime/models/head_adapter.h"
#include "runtime/models/logit_rule.h"
#include "runtime/models/norm.h"

namespace tierflow::models {

class TiledHead {
 public:
  // The stages from the final norm to the last tile. Output weights as in LossHead.
  TiledHead(const ModelSpec& spec, int norm_stage, const Norm& norm, const LogitRule& rule, std::string_view tied);

  // training: what an adapter takes is dropped from; the backward finds the generator in the same state.
  Carry normalise(const Weights& weights, const at::Tensor& hidden, const Targets& targets, bool training) const;
  Carry normalise_backward(const Weights& weights, const Gradients& gradients, const at::Tensor& hidden,
                           const Carry& d_out) const;

  Carry forward(int stage, const Weights& weights, const Carry& carry, const Targets& targets) const;
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& d_out,
                 const Targets& targets) const;

  // Generation: the final norm of hidden states, then {normed hidden, logits of the tiles before [tokens, ..], if any}
  // -> the same with the tile's; with an adapter, what its A gives comes last.
  Carry normalise(const Weights& weights, const at::Tensor& hidden) const;
  Carry logits(int stage, const Weights& weights, const Carry& carry) const;

  // The last tile. With a teacher the scale is the same for all tokens.
  HeadScores scores(const Weights& weights, const Carry& carry, const Targets& targets) const;
  HeadResult loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                               const Targets& targets, const TokenScale& scale) const;

 private:
  struct Tile {
    int output = -1, b = -1;  // of its weights
    std::int64_t first = 0;
    HeadRows rows(const Weights& weights) const {
      return {.output = at_position(weights, output), .b = b < 0 ? at::Tensor() : at_position(weights, b)};
    }
  };
  const Tile& tile(int stage) const { return tiles_.at(static_cast<std::size_t>(stage - norm_stage_ - 1)); }
  Norm norm_;
  LogitRule rule_;
  HeadAdapter adapter_;
  int norm_stage_;
  std::vector<Tile> tiles_;
};

}  // namespace tierflow::models
