#pragma once
// The load-balancing loss of a mixture of experts, as transformers' load_balancing_loss_func has it (after equations
// (4) to (6) of Switch Transformers, arXiv 2101.03961). Of one micro-batch it is
//     experts * sum over experts e of  (C_e / R) * (P_e / R)
// with R its tokens, C_e how many of them took e, and P_e the sum of their scores for e; each is added up over all
// layers with experts, and padding counts in none. The gradient flows through P_e alone. So the backward of a layer
// needs the C_e and R of all layers, which are known when the forward has passed the last one.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tierflow::models {

struct Routing;

// What a micro-batch's tokens took of the experts, in one layer or in several added up.
struct RouterLoads {
  std::int64_t tokens = 0;             // R
  std::vector<double> chosen, scores;  // of each expert, C_e and P_e

  void add(const RouterLoads& layer);
  double loss() const;
  // Of the loss times `factor`: the gradient by one token's score of each expert, the same for every token and layer.
  std::vector<double> gradient(double factor) const;
};

// Neighbouring tokens of one micro-batch, none of them padding, among all that a computation takes.
struct CountedTokens {
  std::size_t micro_batch = 0;  // among those of the computation
  std::int64_t begin = 0, length = 0;
};

// What a layer's router tells of one computation, or takes.
struct RouterBalance {
  std::vector<CountedTokens> parts;
  // The forward leaves what each micro-batch took in this layer.
  std::vector<RouterLoads> found;
  // The backward takes RouterLoads::gradient() of each micro-batch; in the forward there is none.
  std::vector<std::vector<double>> gradients;
};

// In a forward. Without autograd: tells what the layer's tokens took; waits for the device. With it: has the backward
// add the loss's gradient to that of the scores. Where `balance` is null, neither.
void balance_routing(const Routing& routing, RouterBalance* balance);
// By hand: adds it to d_scores [tokens, experts]. Where `balance` is null there is none.
void add_gradient(const RouterBalance* balance, const at::Tensor& d_scores);

}  // namespace tierflow::models
